//! etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::process::{self, free_ports};
use crate::programs;

const TOKEN: &str = "administrator";
/// The interval between two requests whether the API server is ready, and the most requests.
const ASKED: Duration = Duration::from_millis(100);
const ASKED_AT_MOST: u32 = 3000;
/// The controllers that the chart, the examples and the tests need. The controller of nodes' health is not among them: nobody sends
/// heartbeats.
const CONTROLLERS: [&str; 11] = [
    "clusterrole-aggregation-controller",
    "daemonset-controller",
    "deployment-controller",
    "device-taint-eviction-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourceclaim-controller",
    "serviceaccount-controller",
];

#[derive(Clone, Debug)]
pub(crate) struct ControlPlane(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    programs: PathBuf,
    folder: PathBuf,
    port: u16,
    running: Mutex<Vec<(&'static str, Child)>>,
}

impl ControlPlane {
    /// Starts etcd and the API server, and waits until they answer.
    pub(crate) async fn start(kubernetes: &Path, folder: &Path) -> anyhow::Result<Self> {
        let [clients, peers, port] = free_ports()?;
        let control_plane = Self(Arc::new(Parts {
            programs: fs::canonicalize(kubernetes)
                .with_context(|| kubernetes.display().to_string())?,
            folder: folder.to_owned(),
            port,
            running: Mutex::default(),
        }));
        let bin = folder.join("bin");
        fs::create_dir(&bin)?;
        programs::link(&bin)?;
        let etcd = format!("http://127.0.0.1:{clients}");
        let of_peers = format!("http://127.0.0.1:{peers}");
        control_plane.server(
            "etcd",
            &[
                ("data-dir", &control_plane.path("etcd")),
                ("unsafe-no-fsync", "true"),
                ("listen-client-urls", &etcd),
                ("advertise-client-urls", &etcd),
                ("listen-peer-urls", &of_peers),
                ("quota-backend-bytes", &(8_u64 << 30).to_string()),
            ],
        )?;
        control_plane.write_credentials()?;
        control_plane.server(
            "kube-apiserver",
            &[
                ("etcd-servers", &etcd),
                ("bind-address", "127.0.0.1"),
                ("secure-port", &port.to_string()),
                ("endpoint-reconciler-type", "none"),
                ("service-cluster-ip-range", "10.0.0.0/24"),
                ("tls-cert-file", &control_plane.path("server.crt")),
                ("tls-private-key-file", &control_plane.path("server.key")),
                ("client-ca-file", &control_plane.path("server.crt")),
                ("token-auth-file", &control_plane.path("tokens")),
                ("authorization-mode", "RBAC"),
                ("allow-privileged", "true"),
                ("service-account-issuer", "https://kubernetes.default.svc"),
                (
                    "service-account-key-file",
                    &control_plane.path("accounts.pub"),
                ),
                (
                    "service-account-signing-key-file",
                    &control_plane.path("accounts.key"),
                ),
                // The namespace of an example selects its test's node.
                ("enable-admission-plugins", "PodNodeSelector"),
                // Nobody mounts tokens into pods, and no controller removes the taints of new nodes.
                (
                    "disable-admission-plugins",
                    "ServiceAccount,TaintNodesByCondition",
                ),
            ],
        )?;
        control_plane.until_ready().await?;
        Ok(control_plane)
    }

    /// Starts the scheduler and the controllers.
    pub(crate) fn schedule(&self) -> anyhow::Result<()> {
        let kubeconfig = self.path("kubeconfig");
        self.server(
            "kube-controller-manager",
            &[
                ("kubeconfig", &kubeconfig),
                ("controllers", &CONTROLLERS.join(",")),
                ("leader-elect", "false"),
                ("kube-api-qps", "500"),
                ("kube-api-burst", "500"),
                ("secure-port", "0"),
            ],
        )?;
        let config = self.path("scheduler.json");
        // The scheduler tries a pod that did not fit again at once.
        fs::write(&config, json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig, "qps": 500, "burst": 500},
            "leaderElection": {"leaderElect": false},
            "podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1,
        }).to_string())?;
        self.server(
            "kube-scheduler",
            &[("config", &config), ("secure-port", "0")],
        )
    }

    /// A client with the administrator's rights.
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        self.client_with(TOKEN).await
    }

    /// A client with a token.
    pub(crate) async fn client_with(&self, token: &str) -> anyhow::Result<Client> {
        let kubeconfig = Kubeconfig::read_from(self.path("kubeconfig"))?;
        let mut config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.auth_info = serde_json::from_value(json!({"token": token}))?;
        Ok(Client::try_from(config)?)
    }

    /// The environment in which programs find the cluster.
    pub(crate) fn environment(&self) -> [(&'static str, String); 3] {
        let path = std::env::var("PATH").unwrap_or_default();
        let programs = self.0.programs.display();
        [
            ("KUBECONFIG", self.path("kubeconfig")),
            (
                "TRANCHE_KUBECTL",
                self.program("kubectl-tranche").display().to_string(),
            ),
            ("PATH", format!("{}:{programs}:{path}", self.path("bin"))),
        ]
    }

    /// A program of Tranche.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.0.folder.join("bin").join(name)
    }

    /// A file of the folder.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.folder.join(name).display().to_string()
    }

    /// Writes a kubeconfig with a token.
    pub(crate) fn write_kubeconfig(&self, path: &str, token: &str) -> anyhow::Result<()> {
        let server = format!("https://127.0.0.1:{}", self.0.port);
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "hollow",
            "clusters": [{"name": "hollow", "cluster": {"server": server, "certificate-authority": self.path("server.crt")}}],
            "users": [{"name": "hollow", "user": {"token": token}}],
            "contexts": [{"name": "hollow", "context": {"cluster": "hollow", "user": "hollow"}}],
        });
        fs::write(path, kubeconfig.to_string()).with_context(|| path.to_owned())
    }

    fn write_credentials(&self) -> anyhow::Result<()> {
        let server = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
        let accounts = rcgen::KeyPair::generate()?;
        for (name, text) in [
            ("server.crt", server.cert.pem()),
            ("server.key", server.signing_key.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            ("accounts.key", accounts.serialize_pem()),
            (
                "tokens",
                format!("{TOKEN},administrator,1,\"system:masters\"\n"),
            ),
        ] {
            fs::write(self.path(name), text)?;
        }
        self.write_kubeconfig(&self.path("kubeconfig"), TOKEN)
    }

    /// Ends all servers, the last one first.
    pub(crate) async fn stop(&self) -> anyhow::Result<()> {
        let running = std::mem::take(&mut *self.running());
        for (_, mut child) in running.into_iter().rev() {
            child.kill().await?;
        }
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, Vec<(&'static str, Child)>> {
        self.0
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn server(&self, name: &'static str, flags: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut command: Command = process::command(&self.0.programs.join(name));
        command.args(
            flags
                .iter()
                .map(|(flag, value)| format!("--{flag}={value}")),
        );
        // Memory is cheaper than CPU time.
        command.env("GOGC", "400");
        let child = process::start(command, Path::new(&self.path(&format!("{name}.log"))))?;
        self.running().push((name, child));
        Ok(())
    }

    async fn until_ready(&self) -> anyhow::Result<()> {
        let client = self.client().await?;
        let mut last = String::new();
        for _ in 0..ASKED_AT_MOST {
            match client
                .request_text(http::Request::get("/readyz").body(Vec::new())?)
                .await
            {
                Ok(_) => return Ok(()),
                Err(error) => last = error.to_string(),
            }
            for (name, child) in self.running().iter_mut() {
                if let Some(status) = child.try_wait()? {
                    let log = fs::read_to_string(self.path(&format!("{name}.log")))?;
                    let lines: Vec<_> = log.lines().collect();
                    bail!(
                        "{name} ended, {status}:\n{}",
                        lines[lines.len().saturating_sub(20)..].join("\n")
                    );
                }
            }
            tokio::time::sleep(ASKED).await;
        }
        bail!("the API server does not get ready: {last}")
    }
}
