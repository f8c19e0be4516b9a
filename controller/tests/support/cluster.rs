//! A cluster in virtual time: nodes with their plugins, and replicas of the controller.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tranche_controller::apply::Executor;
use tranche_controller::controller::{Controller, REQUESTS_PER_SECOND};
use tranche_controller::feed::Feed;
use tranche_controller::http::Health;
use tranche_controller::leader::{DURATION, Election};
use tranche_controller::metrics::Metrics;
use tranche_serving::Clock;

use super::Api;

pub struct Cluster {
    pub api: Api,
    clock: Clock,
}

/// A running replica of the controller.
pub struct Replica {
    pub metrics: Metrics,
    stop: CancellationToken,
    cut: CancellationToken,
    task: JoinHandle<()>,
}

impl Replica {
    /// SIGTERM.
    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("no panic");
    }

    /// Its machine loses the network; the replica continues with what it knew.
    pub fn cut_off(&self) {
        self.cut.cancel();
    }
}

impl Cluster {
    /// A cluster that offers everything, by the policy `default`. Needs a runtime whose time is paused.
    pub fn new() -> Self {
        let (start, begun) = (Timestamp::now(), Instant::now());
        let clock = Clock::new(move || {
            start + SignedDuration::try_from(begun.elapsed()).expect("a test's time is short")
        });
        let cluster = Self {
            api: Api::new(clock.clone()),
            clock,
        };
        cluster.policy(
            "default",
            &json!({"tiers": ["exclusive", "capped", "timeshared"]}),
        );
        cluster
    }

    /// Starts a replica.
    pub fn replica(&self, name: &str) -> Replica {
        self.replica_at(name, REQUESTS_PER_SECOND)
    }

    /// Starts a replica that makes so many requests a second for changes that concern many nodes.
    pub fn replica_at(&self, name: &str, per_second: u32) -> Replica {
        let (stop, cut) = (CancellationToken::new(), CancellationToken::new());
        let client = self.api.client(Some(cut.clone()));
        let metrics = Metrics::default();
        let (election, leadership) =
            Election::new(client.clone(), "tranche-system", "lease", name, DURATION);
        let executor = Executor::new(
            client.clone(),
            "tranche-system",
            name.to_owned(),
            leadership.clone(),
            self.clock.clone(),
            metrics.clone(),
        );
        let feed = Feed::start(&client, &metrics);
        let controller = Controller::new(
            executor,
            feed,
            leadership,
            metrics.clone(),
            Health::default(),
            per_second,
            tranche_controller::idle::Asked::default(),
        );
        let token = stop.clone();
        let task = tokio::spawn(async move {
            let written = CancellationToken::new();
            let elected = tokio::spawn(election.run(written.clone()));
            controller.run(token).await;
            written.cancel();
            elected.await.expect("no panic");
        });
        Replica {
            metrics,
            stop,
            cut,
            task,
        }
    }

    /// Writes a policy.
    pub fn policy(&self, name: &str, spec: &Value) {
        self.api.put(
            "sharingpolicies",
            json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
                "metadata": {"name": name}, "spec": spec,
            }),
        );
    }

    /// A node joins, without a plugin.
    pub fn node(&self, name: &str) {
        self.api.put(
            "nodes",
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {}}}),
        );
    }

    /// The plugin describes the node and registers for the first time.
    pub fn register(&self, name: &str, gpus: u32) {
        self.describe(name, gpus);
        self.bump(name);
    }

    /// The plugin describes the node; the kubelet has not registered it yet.
    pub fn describe(&self, name: &str, gpus: u32) {
        self.api.put(
            "gpunodes",
            json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode",
                "metadata": {"name": name}, "spec": {},
                "status": {
                    "inventory": inventory(&(0..gpus).collect::<Vec<_>>()),
                    "registration": {"epoch": 0, "pluginVersion": "0.1.0"},
                },
            }),
        );
    }

    /// The plugin registers anew, or asks for its slices.
    pub fn bump(&self, name: &str) {
        let now = self.clock.now();
        self.api.edit("gpunodes", name, |object| {
            let epoch = object["status"]["registration"]["epoch"]
                .as_i64()
                .expect("an epoch");
            object["status"]["registration"]["epoch"] = json!(epoch + 1);
            object["metadata"]["managedFields"] = json!([
                {"manager": "tranche-kubelet-plugin", "operation": "Apply", "time": format!("{now:.0}")},
            ]);
        });
    }

    /// The plugin finds these GPUs, by minor number.
    pub fn gpus(&self, name: &str, minors: &[u32]) {
        self.api.edit("gpunodes", name, |object| {
            object["status"]["inventory"] = inventory(minors);
        });
    }

    /// The plugin finds no driver.
    pub fn no_driver(&self, name: &str) {
        self.api.edit("gpunodes", name, |object| {
            let status = object["status"].as_object_mut().expect("a status");
            status.remove("inventory");
        });
    }

    /// The plugin finds that these GPUs must not be offered.
    pub fn withhold(&self, name: &str, withheld: &Value) {
        self.api.edit("gpunodes", name, |object| {
            object["status"]["withheld"] = withheld.clone();
        });
    }

    /// The node plugin's pod, ready or not.
    pub fn plugin_pod(&self, node: &str, ready: bool) {
        let ready = if ready { "True" } else { "False" };
        self.api.put(
            "pods",
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("plugin-{node}")},
                "spec": {"nodeName": node, "containers": []},
                "status": {"conditions": [{"type": "Ready", "status": ready}]},
            }),
        );
    }

    /// The kubelet wipes the node's slices.
    pub fn wipe(&self, node: &str) {
        for slice in self.slices(node) {
            self.api.remove("resourceslices", name_of(&slice));
        }
    }

    /// A running plugin sees that slices of its epoch vanished, and asks for them again.
    pub fn plugin(&self, node: &'static str, looks_every: Duration) -> JoinHandle<()> {
        let api = self.api.clone();
        let clock = self.clock.clone();
        tokio::spawn(async move {
            let cluster = Self { api, clock };
            loop {
                sleep(looks_every).await;
                let status = cluster.api.one("gpunodes", node)["status"].clone();
                let present: BTreeSet<String> = cluster.names(node).into_iter().collect();
                let published = &status["published"];
                let vanished = published["slices"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|name| !present.contains(name.as_str().expect("a name")));
                if published["epoch"] == status["registration"]["epoch"] && vanished {
                    cluster.bump(node);
                }
            }
        })
    }

    /// The slices of a node, by name.
    pub fn slices(&self, node: &str) -> Vec<Value> {
        let mut slices = self.api.all("resourceslices");
        slices.retain(|slice| slice["spec"]["nodeName"] == node);
        slices
    }

    pub fn names(&self, node: &str) -> Vec<String> {
        self.slices(node)
            .iter()
            .map(|s| name_of(s).to_owned())
            .collect()
    }

    pub fn devices(&self, node: &str) -> Vec<String> {
        self.slices(node)
            .iter()
            .flat_map(|s| s["spec"]["devices"].as_array().cloned().unwrap_or_default())
            .map(|d| d["name"].as_str().expect("a name").to_owned())
            .collect()
    }

    /// `status.published` of a node.
    pub fn published(&self, node: &str) -> Value {
        self.api.one("gpunodes", node)["status"]["published"].clone()
    }

    /// Asserts that consumers see a whole pool.
    pub fn assert_whole(&self, node: &str) {
        if let Err(flaw) = self.whole(node) {
            panic!("{flaw}");
        }
    }

    /// Whether consumers see a whole pool: one generation, as many slices as each says, and the record naming
    /// exactly them. Says what is wrong.
    pub fn whole(&self, node: &str) -> Result<usize, String> {
        let slices = self.slices(node);
        let published = self.published(node);
        let same = |what: &str, is: &Value, wanted: Value| {
            if *is == wanted {
                Ok(())
            } else {
                Err(format!("{what} is {is}, must be {wanted}"))
            }
        };
        let registration = &self.api.one("gpunodes", node)["status"]["registration"];
        same("the record", &published["slices"], json!(self.names(node)))?;
        same(
            "the epoch",
            &published["epoch"],
            registration["epoch"].clone(),
        )?;
        for slice in &slices {
            let (pool, metadata) = (&slice["spec"]["pool"], &slice["metadata"]);
            same("the pool", &pool["name"], json!(format!("{node}/gpu")))?;
            same(
                "the count",
                &pool["resourceSliceCount"],
                json!(slices.len()),
            )?;
            same(
                "the generation",
                &pool["generation"],
                published["poolGeneration"].clone(),
            )?;
            same(
                "the owner",
                &metadata["ownerReferences"][0]["kind"],
                json!("Node"),
            )?;
        }
        Ok(slices.len())
    }

    /// Whether the node's pool becomes whole with that many slices.
    pub async fn converges(&self, node: &str, slices: usize, limit: Duration) -> bool {
        let begun = Instant::now();
        while self.whole(node) != Ok(slices) {
            if begun.elapsed() > limit {
                return false;
            }
            sleep(Duration::from_millis(200)).await;
        }
        true
    }

    /// Waits until nothing was written for some seconds; fails if that takes longer than `limit`.
    pub async fn settle(&self, limit: Duration) -> Duration {
        const QUIET: Duration = Duration::from_secs(3);
        let begun = Instant::now();
        let mut last = (self.api.write_count(), Instant::now());
        loop {
            sleep(Duration::from_millis(10)).await;
            let writes = self.api.write_count();
            if writes != last.0 {
                last = (writes, Instant::now());
            }
            if last.1.elapsed() >= QUIET {
                return last.1 - begun;
            }
            assert!(
                begun.elapsed() < limit + QUIET,
                "still writing after {limit:?}: {:?}",
                self.api.writes()
            );
        }
    }
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"]
        .as_str()
        .expect("objects have names")
}

fn inventory(minors: &[u32]) -> Value {
    let gpus: Vec<_> = minors
        .iter()
        .map(|minor| {
            json!({
                "uuid": format!("GPU-{minor:08x}-0000-0000-0000-{minor:012x}"), "minor": minor,
                "productName": "NVIDIA H100 80GB HBM3", "brand": "Nvidia", "architecture": "Hopper",
                "cudaComputeCapability": "9.0", "pciBusID": format!("0000:{minor:02x}:00.0"),
                "memory": "81559Mi", "reservedMemory": "551Mi", "migCapable": true,
            })
        })
        .collect();
    json!({
        "driverVersion": "535.261.03", "cudaDriverVersion": "12.2",
        "gpus": gpus, "gpuCount": minors.len(),
    })
}
