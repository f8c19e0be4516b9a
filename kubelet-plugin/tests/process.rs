//! The real plugin process; this process acts as the kubelet and the API server.
//!
//! Like the real kubelet it uses the sockets that it finds, with the percent-encoded socket path as
//! HTTP/2 authority on the registration socket.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use tonic::transport::Channel;
use tranche_driver::preparation::PAGES;
use tranche_kubelet_plugin::kubelet::proto::dra::dra_plugin_client::DraPluginClient;
use tranche_kubelet_plugin::kubelet::proto::dra::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use tranche_kubelet_plugin::kubelet::proto::pluginregistration::registration_client::RegistrationClient;
use tranche_kubelet_plugin::kubelet::proto::pluginregistration::{InfoRequest, RegistrationStatus};
use tranche_kubelet_plugin::kubelet::sockets::connect;

const PATIENCE: Duration = Duration::from_secs(30);

/// The token of a reader of the metrics.
const TOKEN: &str = "of-a-reader";

/// The folder of the driver, which most nodes here do not have.
const DRIVER: &str = "driver";

/// The number of the next node, counted from one.
static NODES: AtomicU8 = AtomicU8::new(1);

/// A node's folders, and an API server that has nothing.
struct Node {
    dir: tempfile::TempDir,
    http: SocketAddr,
    https: SocketAddr,
}

impl Node {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["plugin", "registry", "image", "cdi", "run"] {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
        }
        for file in [
            "tranche-cdi-hook",
            "ldconfig",
            "libcuda.so.1",
            "libnvidia-ml.so.1",
        ] {
            std::fs::write(dir.path().join("image").join(file), file).unwrap();
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = listener.local_addr().unwrap();
        let created = |answer: serde_json::Value| (StatusCode::CREATED, answer.to_string());
        let review = async move |body: String| {
            let mut review: serde_json::Value = serde_json::from_str(&body).unwrap();
            let known = review["spec"]["token"] == TOKEN;
            review["status"] =
                serde_json::json!({"authenticated": known, "user": {"username": "reader"}});
            created(review)
        };
        let access = async move |body: String| {
            let mut review: serde_json::Value = serde_json::from_str(&body).unwrap();
            let allowed = review["spec"]["user"] == "reader";
            review["status"] = serde_json::json!({"allowed": allowed});
            created(review)
        };
        let nothing = Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review))
            .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(access))
            .fallback(|uri: axum::http::Uri| async move {
            let name = uri.path().rsplit('/').next().unwrap_or_default();
            let body = serde_json::json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
                "details": {"group": "resource.k8s.io", "kind": "resourceclaims", "name": name},
            });
            (StatusCode::NOT_FOUND, body.to_string())
        });
        tokio::spawn(async move { axum::serve(listener, nothing).await });
        let kubeconfig = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'http://{api}'}}}}], users: [{{name: u, user: {{}}}}]}}"
        );
        std::fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let address = Ipv4Addr::new(127, high, low, NODES.fetch_add(1, Ordering::Relaxed));
        // Freed at once: nobody else has this address.
        let ports = [0; 2].map(|_| std::net::TcpListener::bind((address, 0)).unwrap());
        let [http, https] = ports.map(|port| port.local_addr().unwrap());
        Self { dir, http, https }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn registration_socket(&self) -> PathBuf {
        self.at("registry/gpu.tranche.dev@reg.sock")
    }

    fn spawn(&self) -> Process {
        self.spawn_by(Command::new(env!("CARGO_BIN_EXE_tranche-kubelet-plugin")))
    }

    /// Starts it with a command that lacks the arguments.
    fn spawn_by(&self, mut command: Command) -> Process {
        let child = command
            .env("KUBECONFIG", self.at("kubeconfig"))
            .arg("--node-name=node-a")
            .arg(format!("--http-endpoint={}", self.http))
            .arg(format!("--metrics-endpoint={}", self.https))
            .arg("--pod-resources-socket")
            .arg(self.at("no-kubelet.sock"))
            .arg("--driver-root")
            .arg(self.at(DRIVER))
            .arg("--plugin-dir")
            .arg(self.at("plugin"))
            .arg("--hook-dir")
            .arg(self.at("hooks"))
            .arg("--registry-dir")
            .arg(self.at("registry"))
            .arg("--run-dir")
            .arg(self.at("run"))
            .arg("--cdi-dir")
            .arg(self.at("cdi"))
            .arg("--image-lib-dir")
            .arg(self.at("image"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Process(child)
    }

    /// Starts, and waits until its registration socket exists.
    async fn start(&self) -> Process {
        let process = self.spawn();
        until("registration socket", || {
            UnixStream::connect(self.registration_socket()).is_ok()
        })
        .await;
        process
    }

    async fn registration(&self) -> RegistrationClient<Channel> {
        let path = self.registration_socket();
        let authority = encode_authority(path.to_str().unwrap());
        RegistrationClient::new(connect(&path, &authority).await.unwrap())
    }

    async fn dra(&self) -> DraPluginClient<Channel> {
        DraPluginClient::new(
            connect(&self.at("plugin/dra.sock"), "localhost")
                .await
                .unwrap(),
        )
    }

    /// Installs a simulated driver that does not return from its start.
    fn install_hanging_driver(&self) {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        let program = target.join("simulator/nvidia-sim-persistenced");
        assert!(program.exists(), "run `make simulator` first");
        let root = self.at(DRIVER);
        let installed = Command::new(program)
            .arg("install-root")
            .arg(&root)
            .args(["--gpu-model", "T4", "--gpus", "1"])
            .status();
        assert!(installed.unwrap().success());
        let fault = "[[fault]]\ncall = \"nvmlInitWithFlags\"\ndelay_ms = 3600000\n";
        std::fs::write(root.join("etc/nvidia-sim/faults.toml"), fault).unwrap();
    }

    /// Status and body of a GET on the plugin's HTTP endpoint.
    async fn get(&self, path: &str) -> (u16, String) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(self.http).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }
}

impl Node {
    /// Status and body of a GET of the metrics.
    async fn metrics(&self, token: Option<&str>) -> (u16, String) {
        let stream = tokio::net::TcpStream::connect(self.https).await;
        tranche_serving::testing::get(stream.unwrap(), "/metrics", token)
            .await
            .unwrap()
    }
}

/// Killed after the test.
struct Process(Child);

impl Process {
    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    async fn ends(&mut self) -> std::process::ExitStatus {
        let mut status = None;
        until("end of the process", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        })
        .await;
        status.unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "no {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Encodes as grpc-go does in the kubelet: `@` is not encoded, `/` is.
fn encode_authority(path: &str) -> String {
    let escape = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'@' => {
            char::from(b).to_string()
        }
        other => format!("%{other:02X}"),
    };
    path.bytes().map(escape).collect()
}

fn claim(uid: &str) -> Claim {
    Claim {
        namespace: "team".into(),
        uid: uid.into(),
        name: format!("claim-{uid}"),
    }
}

#[tokio::test]
async fn the_hook_is_installed_outside_the_plugins_noexec_folder() {
    let node = Node::new().await;
    {
        let _process = node.start().await;
        assert!(node.at("hooks/tranche-cdi-hook").exists());
        assert!(!node.at("plugin/lib/tranche-cdi-hook").exists());
        let shim = format!("plugin/lib/{PAGES}/libcuda.so.1");
        assert!(node.at(&shim).exists());
    }
    let script = "mount -t tmpfs -o noexec x \"$0\" && exec \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(node.at("hooks"))
        .arg(env!("CARGO_BIN_EXE_tranche-kubelet-plugin"));
    let _process = node.spawn_by(command);
    until("hook in the plugin's folder", || {
        node.at("plugin/lib/tranche-cdi-hook").exists() && node.at("plugin/lib/ldconfig").exists()
    })
    .await;
}

#[tokio::test]
async fn the_kubelet_registers_it_and_every_claim_is_answered() {
    let node = Node::new().await;
    let _process = node.start().await;
    let mut registration = node.registration().await;
    let info = registration
        .get_info(InfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.r#type, "DRAPlugin");
    assert_eq!(info.name, "gpu.tranche.dev");
    assert_eq!(Path::new(&info.endpoint), node.at("plugin/dra.sock"));
    assert_eq!(
        info.supported_versions,
        [
            "v1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth"
        ]
    );

    let (code, why) = node.get("/readyz").await;
    assert_eq!(code, 503, "{why}");
    let status = RegistrationStatus {
        plugin_registered: true,
        error: String::new(),
    };
    registration
        .notify_registration_status(status)
        .await
        .unwrap();
    // There is no driver, and the plugin is still ready.
    assert_eq!(node.get("/readyz").await, (200, "ok\n".into()));
    assert_eq!(node.get("/healthz").await, (200, "ok\n".into()));

    // Every UID is answered, each with its own error; the claims do not exist.
    let claims: Vec<_> = (0..32).map(|n| claim(&format!("u{n}"))).collect();
    let uids: Vec<_> = claims.iter().map(|c| c.uid.clone()).collect();
    let mut dra = node.dra().await;
    let request = NodePrepareResourcesRequest {
        claims: claims.clone(),
    };
    let prepared = dra
        .node_prepare_resources(request)
        .await
        .unwrap()
        .into_inner()
        .claims;
    assert_eq!(prepared.len(), 32);
    for uid in &uids {
        let error = &prepared[uid].error;
        assert!(error.contains(&format!("team/claim-{uid}")), "{error}");
    }
    // Unknown claims are released already, and again.
    for _ in 0..2 {
        let request = NodeUnprepareResourcesRequest {
            claims: claims.clone(),
        };
        let released = dra
            .node_unprepare_resources(request)
            .await
            .unwrap()
            .into_inner()
            .claims;
        let errors: BTreeMap<_, _> = released
            .iter()
            .filter(|(_, r)| !r.error.is_empty())
            .collect();
        assert_eq!((released.len(), errors), (32, BTreeMap::new()));
    }

    assert_eq!(node.get("/metrics").await.0, 404, "not without a token");
    assert_eq!(node.metrics(None).await.0, 401);
    let (code, text) = node.metrics(Some(TOKEN)).await;
    assert_eq!(code, 200);
    for line in [
        "tranche_dra_claims_total{method=\"NodePrepareResources\",outcome=\"claim_gone\"} 32",
        "tranche_dra_claims_total{method=\"NodeUnprepareResources\",outcome=\"ok\"} 64",
        "tranche_dra_claim_duration_seconds_count{method=\"NodePrepareResources\"} 32",
        "tranche_driver_ready 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
    }
}

#[tokio::test]
async fn sigterm_leaves_nothing_and_sigkill_does_not_block_the_next() {
    let node = Node::new().await;
    let mut process = node.start().await;
    process.signal(rustix::process::Signal::KILL);
    process.ends().await;
    assert!(
        node.registration_socket().exists(),
        "a killed process leaves its sockets"
    );

    let mut process = node.start().await;
    node.registration()
        .await
        .get_info(InfoRequest {})
        .await
        .unwrap();
    process.signal(rustix::process::Signal::TERM);
    assert!(process.ends().await.success());
    assert!(!node.registration_socket().exists());
    assert!(!node.at("plugin/dra.sock").exists());
}

/// The kubelet would wait for a minute before it ends the plugin, and no other instance could serve meanwhile.
#[tokio::test]
async fn a_driver_that_hangs_does_not_hinder_its_end() {
    let node = Node::new().await;
    node.install_hanging_driver();
    let mut process = node.start().await;
    let maps = format!("/proc/{}/maps", process.0.id());
    until("a call of the driver", || {
        std::fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("/libnvidia-ml.so"))
    })
    .await;
    process.signal(rustix::process::Signal::TERM);
    assert!(process.ends().await.success());
    assert!(!node.registration_socket().exists());
}

#[tokio::test]
async fn a_second_instance_waits_for_the_first_to_end() {
    let node = Node::new().await;
    let mut first = node.start().await;
    let mut second = node.spawn();
    // A second instance that served would have replaced the first one's socket.
    let identity =
        |path: &Path| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
    let before = identity(&node.registration_socket());
    let lock = node.at("plugin/lock");
    until("a waiter for the lock", || waits_for(&second, &lock)).await;
    assert_eq!(identity(&node.registration_socket()), before);
    first.signal(rustix::process::Signal::TERM);
    assert!(first.ends().await.success());
    until("the second", || {
        UnixStream::connect(node.registration_socket()).is_ok()
    })
    .await;
    second.signal(rustix::process::Signal::TERM);
    assert!(second.ends().await.success());
}

/// Whether the process has the lock's file open, because it holds the lock or waits for it.
fn waits_for(process: &Process, lock: &Path) -> bool {
    let folder = format!("/proc/{}/fd", process.0.id());
    std::fs::read_dir(folder).is_ok_and(|mut entries| {
        entries.any(|entry| {
            entry.is_ok_and(|e| std::fs::read_link(e.path()).is_ok_and(|to| to == lock))
        })
    })
}

#[tokio::test]
async fn a_waiting_instance_ends_when_asked() {
    let node = Node::new().await;
    let _first = node.start().await;
    let mut second = node.spawn();
    until("a waiter for the lock", || {
        waits_for(&second, &node.at("plugin/lock"))
    })
    .await;
    second.signal(rustix::process::Signal::TERM);
    assert!(second.ends().await.success());
    assert!(node.registration_socket().exists());
}
