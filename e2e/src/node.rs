//! The machine of a node: a kind node is a container, in which the engine runs commands.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Node as CoreNode;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::api::Api;
use tokio::sync::Mutex;

use crate::shell::Shell;
use crate::wait;
use crate::wait::Limit;

/// The machine file of a node's simulated GPUs.
pub const MACHINE: &str = "/etc/nvidia-sim/machine.toml";

/// The file of the calls of the simulated driver that fail or hang.
const FAULTS: &str = "/etc/nvidia-sim/faults.toml";

/// The folder of a node's driver libraries.
pub const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// The node plugin's process, in a script.
const PLUGIN: &str = "$(pgrep -f '^/usr/bin/tranche-kubelet-plugin')";
/// Our folder below the kubelet's: sockets, journals, files that are mounted into containers.
pub const PLUGIN_DIR: &str = "/var/lib/kubelet/plugins/gpu.tranche.dev";

/// A script that kills the processes of the containers whose ID begins with `id`, for both runtimes. CRI-O's container monitors
/// (`crio-conmon-…`) survive: without its monitor, CRI-O waits seconds at each request about a container, and may report that it
/// runs.
#[must_use]
pub fn kill_containers(id: &str) -> String {
    format!(
        "found=$(grep -lsE '/(cri-containerd|crio)-{id}[0-9a-f]*([./]|$)' /proc/[0-9]*/cgroup || true)
        [ -n \"$found\" ]
        for cgroup in $found; do
            pid=${{cgroup#/proc/}}
            kill -KILL ${{pid%/cgroup}} 2>/dev/null || true # it may have ended with another one
        done"
    )
}

#[derive(Clone, Debug)]
pub struct Node {
    name: String,
    shell: Arc<Mutex<Option<Shell>>>,
}

impl Node {
    /// The node, whose container has the same name.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self {
            name,
            shell: Arc::default(),
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs a shell script as root on the node, one at a time, and returns its output.
    pub async fn shell(&self, script: &str) -> anyhow::Result<String> {
        let mut shell = self.shell.lock().await;
        // If the caller drops this future, the shell ends.
        let mut open = match shell.take() {
            Some(open) => open,
            None => Shell::open(&self.name)?,
        };
        let context = || format!("on {}: `{script}`", self.name);
        let ended = open.run(script).await.with_context(context)?;
        *shell = Some(open);
        let (status, stderr) = (ended.status, ended.stderr.trim());
        ensure!(status == 0, "{}: exit status {status}: {stderr}", context());
        Ok(ended.stdout)
    }

    /// All files of claims on the node: journals, CDI specs, share pages, and their temporary files.
    pub async fn claim_files(&self) -> anyhow::Result<Vec<String>> {
        let found = self
            .shell(&format!(
                "find {PLUGIN_DIR}/claims /run/tranche/shares /run/tranche/load /run/tranche/metadata /var/run/cdi -mindepth 1 \
                 ! -name gpu.tranche.dev-driver.json 2>/dev/null || true"
            ))
            .await?;
        Ok(found.lines().map(str::to_owned).collect())
    }

    /// What a test can leave behind on the node, a line for each thing.
    pub(crate) async fn state(&self) -> anyhow::Result<String> {
        self.shell(&format!(
            "nvidia-smi --query-gpu=uuid,mig.mode.current,compute_mode,persistence_mode --format=csv,noheader
            nvidia-smi -L | grep MIG- || true
            find {PLUGIN_DIR}/claims {PLUGIN_DIR}/gpus /run/tranche/shares /run/tranche/load /run/tranche/metadata /var/run/cdi -mindepth 1 2>/dev/null || true
            find {LIBRARIES}/ -maxdepth 1 -name 'libcuda*' -o -maxdepth 1 -name 'libnvidia-ml*' | sort
            findmnt --raw --noheadings --output TARGET | grep '^/run/tranche/' || true
            md5sum {MACHINE}"
        ))
        .await
    }

    /// Waits until there is no file of any claim.
    pub async fn no_claim_files(&self, limit: Limit) -> anyhow::Result<()> {
        wait::for_answer("no file of a claim on the node", limit, async || {
            let left = self.claim_files().await?;
            ensure!(left.is_empty(), "left: {}", left.join(" "));
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the plugin has no record of a GPU whose mode it must restore.
    pub async fn no_gpu_records(&self) -> anyhow::Result<()> {
        wait::for_answer("no record of a GPU", wait::USUAL, async || {
            let records = self.shell(&format!("ls {PLUGIN_DIR}/gpus")).await?;
            ensure!(records.is_empty(), "{records}");
            Ok(Some(()))
        })
        .await
    }

    /// Waits until no GPU has a GPU instance or is in MIG mode, and the plugin has no record of one.
    pub async fn undivided(&self) -> anyhow::Result<()> {
        self.no_gpu_records().await?;
        let query = "nvidia-smi --query-gpu=mig.mode.current --format=csv,noheader";
        wait::for_answer("GPUs without MIG", wait::USUAL, async || {
            let modes = self.shell(query).await?;
            let is_off = modes.lines().all(|mode| mode.trim() == "Disabled");
            ensure!(is_off, "{modes}");
            Ok(Some(()))
        })
        .await
    }

    /// Changes the machine file with the sed expression `edit`, and installs the driver that it describes, while no process uses the
    /// GPUs. Returns the script that restores the machine.
    pub async fn change_machine(&self, edit: &str) -> anyhow::Result<String> {
        // Libraries are replaced and not overwritten, as packages and driver containers do.
        let install = format!(
            "cp {MACHINE} /tmp/machine.toml
            rm -f {LIBRARIES}/libcuda.so* {LIBRARIES}/libnvidia-ml.so* /dev/nvidia[0-9]*
            /opt/simulator/install-root / --machine /tmp/machine.toml
            ldconfig
            systemctl restart nvidia-sim-persistenced.service nvidia-sim-pci.service"
        );
        let kept = format!("{MACHINE}.kept");
        self.shell(&format!(
            "cp {MACHINE} {kept}
            sed -i '{edit}' {MACHINE}
            {install}"
        ))
        .await?;
        Ok(format!(
            "if [ -e {kept} ]; then mv {kept} {MACHINE}
            {install}
            fi"
        ))
    }

    /// Moves a file away; the returned script puts it back.
    pub async fn hide(&self, file: &Path) -> anyhow::Result<String> {
        let file = file.display();
        self.shell(&format!("mv {file} {file}.hidden")).await?;
        Ok(format!(
            "if [ -e {file}.hidden ]; then mv -f {file}.hidden {file}; fi"
        ))
    }

    /// Removes a GPU of the simulated machine from the bus; its device node stays. The returned script brings it back.
    pub async fn lose_gpu(&self, uuid: &str) -> anyhow::Result<String> {
        self.shell(&format!("nvidia-sim-persistenced lose-gpu {uuid}"))
            .await?;
        Ok(format!("nvidia-sim-persistenced restore-gpu {uuid}"))
    }

    /// Makes calls of the simulated driver hang; `which` selects them, as in the simulator's file of faults. After the returned script
    /// they return.
    pub async fn hang(&self, which: &str) -> anyhow::Result<String> {
        self.shell(&format!(
            "printf '[[fault]]\\n{which}\\nhang = true\\n' >{FAULTS}.new; mv {FAULTS}.new {FAULTS}"
        ))
        .await?;
        Ok(format!("rm -f {FAULTS}"))
    }

    /// Makes the driver report an Xid of a GPU.
    pub async fn inject_xid(&self, uuid: &str, xid: u32) -> anyhow::Result<()> {
        let script = format!("nvidia-sim-persistenced inject-xid {uuid} {xid}");
        self.shell(&script).await.map(drop)
    }

    /// Resets a GPU that no program uses.
    pub async fn reset_gpu(&self, uuid: &str) -> anyhow::Result<()> {
        let script = format!("nvidia-sim-persistenced reset-gpu {uuid}");
        self.shell(&script).await.map(drop)
    }

    /// Switches a GPU to MIG mode as an administrator does, while nothing uses it; the returned script
    /// switches it back.
    pub async fn enable_mig_mode(&self, uuid: &str) -> anyhow::Result<String> {
        self.shell(&format!("nvidia-smi -i {uuid} -mig 1")).await?;
        Ok(format!("nvidia-smi -i {uuid} -mig 0"))
    }

    /// Makes nvidia-persistenced close a GPU, as an administrator does. The returned script makes it open the GPU again once no
    /// virtual machine has it.
    pub async fn disable_persistence_mode(&self, uuid: &str) -> anyhow::Result<String> {
        self.shell(&format!("nvidia-smi -pm 0 -i {uuid}")).await?;
        Ok(format!("nvidia-smi -pm 1 -i {uuid}"))
    }

    /// Waits until the driver has a GPU back from a virtual machine.
    pub async fn has_gpu_again(&self, uuid: &str) -> anyhow::Result<()> {
        wait::for_answer("the GPU at NVIDIA's driver", wait::USUAL, async || {
            let listed = self.shell("nvidia-smi -L").await?;
            Ok(listed.contains(uuid).then_some(()))
        })
        .await
    }

    /// Kills the node plugin while it prepares claims of `starting`, one of which `claim` finds: a journal exists and its device in the
    /// CDI spec does not. The plugin is stopped until the claim exists, and writes the spec to a pipe that nobody reads, so no
    /// Prepare can end before it is killed.
    pub async fn kill_plugin_in_a_prepare<T>(
        &self,
        starting: impl Future<Output = anyhow::Result<T>>,
        claim: impl AsyncFnOnce(&T) -> anyhow::Result<ResourceClaim>,
    ) -> anyhow::Result<T> {
        self.shell(&format!("kill -STOP {PLUGIN}")).await?;
        let claiming = async {
            let started = starting.await?;
            claim(&started).await?;
            Ok::<_, anyhow::Error>(started)
        };
        let claimed = claiming.await;
        if claimed.is_err() {
            self.shell(&format!("kill -CONT {PLUGIN}")).await?;
        }
        let started = claimed?;
        let tries = wait::USUAL.ceiling().as_millis() / 10;
        let script = format!(
            "pid={PLUGIN}
             spec=/var/run/cdi/gpu.tranche.dev-claim.json
             in_a_prepare() {{
                 for journal in $(ls {PLUGIN_DIR}/claims); do
                     grep -q ${{journal%.json}} $spec 2>/dev/null || return 0
                 done
                 return 1
             }}
             mkfifo $spec.tmp
             trap 'rm -f '$spec.tmp EXIT
             kill -CONT $pid
             for _ in $(seq {tries}); do
                 if in_a_prepare; then break; fi
                 sleep 0.01
             done
             kill -KILL $pid
             in_a_prepare"
        );
        self.shell(&script)
            .await
            .context("the plugin was not killed in a Prepare")?;
        Ok(started)
    }

    /// The container runtime that the node reports: `containerd://2.4.2`, `cri-o://1.36.1`.
    pub async fn runtime(&self, client: &Client) -> anyhow::Result<String> {
        let nodes: Api<CoreNode> = Api::all(client.clone());
        let info = nodes
            .get(&self.name)
            .await?
            .status
            .and_then(|status| status.node_info)
            .with_context(|| format!("{} reports nothing", self.name))?;
        Ok(info.container_runtime_version)
    }

    /// Kills the processes of a container, by the `containerID` in the pod's status.
    pub async fn kill_container(&self, id: &str) -> anyhow::Result<()> {
        let (_, id) = id
            .split_once("://")
            .with_context(|| format!("not a container's id: {id:?}"))?;
        self.shell(&kill_containers(id)).await?;
        Ok(())
    }

    /// Kills the node plugin with SIGKILL.
    pub async fn kill_plugin(&self) -> anyhow::Result<()> {
        self.shell(&format!("kill -KILL {PLUGIN}")).await?;
        Ok(())
    }
}
