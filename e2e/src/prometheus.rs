//! Debian's Prometheus beside the cluster, which scrapes it as docs/monitoring.md says.
//!
//! Debian builds it without the discovery of Kubernetes, so the tests list what that would find: each port of each pod, with the
//! labels `__meta_kubernetes_…`, from which the relabelling of the page makes the targets. Pods have no address here, so a port of
//! this machine is forwarded to each. The rest of the configuration is unchanged.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{ContainerPort, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tranche_docs::{monitoring, repository};

use crate::{Case, SYSTEM, wait};

/// How often it scrapes, and evaluates the alerts.
const INTERVAL: &str = "1s";

/// A running Prometheus. Dropped, it ends.
#[derive(Debug)]
pub struct Prometheus {
    address: String,
    folder: PathBuf,
    _server: Child,
    _forwards: JoinSet<()>,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A series of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its labels, with `__name__` where it has a name.
    pub labels: BTreeMap<String, String>,
    /// Its value; may be NaN.
    pub value: f64,
}

impl Prometheus {
    /// Starts a Prometheus that reads metrics with `token` and has our alerts. Waits until it has scraped every component.
    pub async fn start(case: &Case, token: &str) -> anyhow::Result<Self> {
        let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
        let mut forwards = JoinSet::new();
        let (mut discovered, mut expected) = (Vec::new(), 0);
        let listed = pods.list(&ListParams::default()).await?;
        let lives = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
        for pod in listed.items.into_iter().filter(lives) {
            for port in ports(&pod) {
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                discovered.push(json!({
                    "targets": [listener.local_addr()?.to_string()],
                    "labels": {
                        "__meta_kubernetes_pod_name": pod.name_any(),
                        "__meta_kubernetes_pod_node_name": pod.spec.as_ref().and_then(|it| it.node_name.clone()),
                        "__meta_kubernetes_pod_container_port_name": port.name,
                        "__meta_kubernetes_pod_label_app_kubernetes_io_component":
                            pod.labels().get("app.kubernetes.io/component"),
                    },
                }));
                expected += usize::from(port.name.as_deref() == Some("metrics"));
                let number = u16::try_from(port.container_port)?;
                forwards.spawn(forward(pods.clone(), pod.name_any(), number, listener));
            }
        }
        let folder = std::env::temp_dir().join(case.unique("prometheus"));
        std::fs::create_dir_all(&folder)?;
        let token_file = folder.join("token");
        std::fs::write(&token_file, token)?;
        let configuration = folder.join("prometheus.json");
        // JSON is YAML.
        let text = configuration_of(&discovered, &token_file)?.to_string();
        std::fs::write(&configuration, text)?;
        // Prometheus does not report a port that it chooses itself, so this takes one that is free at an address that nobody else uses.
        let address = TcpListener::bind("127.0.0.2:0").await?.local_addr()?;
        let log = std::fs::File::create(folder.join("log"))?;
        let server = Command::new("prometheus")
            .arg(format!("--config.file={}", configuration.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("running prometheus: run e2e/kind/tools, and source target/cluster/env")?;
        let prometheus = Self {
            address: address.to_string(),
            folder,
            _server: server,
            _forwards: forwards,
        };
        let up = wait::for_answer(
            "Prometheus to scrape every component",
            wait::USUAL,
            async || {
                let up = prometheus.query("up == 1").await.unwrap_or_default();
                Ok((up.len() == expected).then_some(()))
            },
        );
        up.await.with_context(|| prometheus.log())?;
        Ok(prometheus)
    }

    /// The current series of an expression.
    pub async fn query(&self, expression: &str) -> anyhow::Result<Vec<Series>> {
        let path = format!("/api/v1/query?query={}", encoded(expression));
        let data = self
            .get(&path)
            .await
            .with_context(|| expression.to_owned())?;
        // A scalar has a value and no labels.
        let results = match &data["resultType"] {
            kind if kind == "scalar" => vec![json!({"metric": {}, "value": data["result"]})],
            _ => data["result"].as_array().cloned().unwrap_or_default(),
        };
        results
            .iter()
            .map(|result| {
                let value = result["value"][1].as_str().context("a value")?;
                Ok(Series {
                    labels: serde_json::from_value(result["metric"].clone())?,
                    value: value.parse()?,
                })
            })
            .collect()
    }

    /// Waits until an expression has a series whose value is a number, and returns all such series.
    pub async fn numbers(&self, expression: &str) -> anyhow::Result<Vec<Series>> {
        wait::for_answer(expression, wait::USUAL, async || {
            let mut series = self.query(expression).await?;
            series.retain(|it| it.value.is_finite());
            Ok((!series.is_empty()).then_some(series))
        })
        .await
    }

    /// The loaded alerts, each with the error of its last evaluation, or an empty text.
    pub async fn rules(&self) -> anyhow::Result<BTreeMap<String, String>> {
        wait::for_answer("every rule to be evaluated", wait::USUAL, async || {
            let data = self.get("/api/v1/rules").await?;
            let groups = data["groups"].as_array().into_iter().flatten();
            let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
            let mut found = BTreeMap::new();
            for rule in rules {
                if rule["health"] == "unknown" {
                    return Ok(None);
                }
                let text = |field: &str| rule[field].as_str().unwrap_or_default().to_owned();
                found.insert(text("name"), text("lastError"));
            }
            Ok(Some(found))
        })
        .await
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let mut stream = TcpStream::connect(&self.address).await?;
        // An HTTP/1.0 response is not chunked and ends with the connection.
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("an HTTP answer")?;
        let mut body: Value = serde_json::from_str(body).with_context(|| body.to_owned())?;
        ensure!(body["status"] == "success", "{body}");
        Ok(body["data"].take())
    }

    /// Its log, for an error message.
    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

fn ports(pod: &Pod) -> impl Iterator<Item = &ContainerPort> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.flat_map(|container| container.ports.iter().flatten())
}

/// Copies connections of the listener to the pod's port.
async fn forward(pods: Api<Pod>, name: String, port: u16, listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((mut near, _)) = listener.accept().await {
        let (pods, name) = (pods.clone(), name.clone());
        connections.spawn(async move {
            let Ok(mut forwarded) = pods.portforward(&name, &[port]).await else {
                return;
            };
            if let Some(mut far) = forwarded.take_stream(port) {
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// The configuration of docs/monitoring.md, with our alerts and the discovered targets.
fn configuration_of(discovered: &[Value], token: &Path) -> anyhow::Result<Value> {
    let mut job = monitoring::scrape_job(&repository())?;
    let fields = job.as_object_mut().context("docs/monitoring.md: a job")?;
    fields
        .remove("kubernetes_sd_configs")
        .context("docs/monitoring.md: kubernetes_sd_configs")?;
    fields.insert("static_configs".to_owned(), json!(discovered));
    fields.insert("bearer_token_file".to_owned(), json!(token));
    Ok(json!({
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [repository().join(monitoring::ALERTS)],
        "scrape_configs": [job],
    }))
}

/// The text encoded as a value in a URL's query.
fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            encoded.push(byte.into());
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}
