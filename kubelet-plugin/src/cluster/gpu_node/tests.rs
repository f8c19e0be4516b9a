//! What is written when, against an API server that keeps what is applied.

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use tranche_driver::competing_drivers::{
    Kubelet, Observations, PluginDevice, Verdict as Providers, verdict,
};

use super::*;
use crate::gpu::driver_state::DriverError;
use crate::testing::api::{FakeApi, Mood};
use crate::testing::{NODE, World};
use tranche_serving::Clock;

const GPU_NODE: &str = "/apis/gpu.tranche.dev/v1alpha1/gpunodes/node-a";
const GPU_NODES: &str = "/apis/gpu.tranche.dev/v1alpha1/gpunodes";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";
const HOUR: Duration = Duration::from_hours(1);

/// Nobody else hands out GPUs.
fn no_others() -> Providers {
    verdict(&Inventory::default(), &Observations::default())
}

struct Running {
    world: World,
    refused: watch::Sender<Refused>,
    driver: watch::Sender<DriverState>,
    others: watch::Sender<Option<Providers>>,
    unowned: watch::Sender<Vec<WithheldGpu>>,
    daemons: watch::Sender<Vec<WithheldGpu>>,
    health: watch::Sender<Option<Arc<Verdicts>>>,
    registered: watch::Sender<Registered>,
    policy: watch::Receiver<NodePolicy>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start() -> Self {
        let world = World::new();
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "uid": "node-uid"}});
        world.api.put_at("/api/v1/nodes/node-a", node);
        let no_slices = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": "1"}, "items": []});
        world.api.put_at(SLICES, no_slices);
        let no_gpu_nodes = json!({"kind": "GpuNodeList", "apiVersion": API_VERSION, "metadata": {"resourceVersion": "1"}, "items": []});
        world.api.put_at(GPU_NODES, no_gpu_nodes);
        Self::start_in(world)
    }

    fn start_in(world: World) -> Self {
        let (driver, driver_rx) = watch::channel(DriverState::Unknown);
        let (others, others_rx) = watch::channel(Some(no_others()));
        let (registered, registered_rx) = watch::channel(Registered::default());
        let (policy_tx, policy) = watch::channel(NodePolicy::default());
        let stop = CancellationToken::new();
        let writer = GpuNodeWriter::new(
            world.api.client(),
            NODE.into(),
            Events::new(world.api.client(), NODE),
            Clock::system(),
            Arc::default(),
        );
        let (refused, refused_rx) = watch::channel(Refused::default());
        let (unowned, unowned_rx) = watch::channel(Vec::new());
        let (daemons, daemons_rx) = watch::channel(Vec::new());
        let (health, health_rx) = watch::channel(None);
        let sources = Sources {
            health: health_rx,
            driver: driver_rx,
            others: others_rx,
            unowned: unowned_rx,
            daemons: daemons_rx,
            registered: registered_rx,
            refused: refused_rx,
        };
        let task = tokio::spawn(writer.run(sources, policy_tx, stop.clone()));
        Self {
            world,
            refused,
            driver,
            others,
            unowned,
            daemons,
            health,
            registered,
            policy,
            stop,
            task,
        }
    }

    fn api(&self) -> &FakeApi {
        &self.world.api
    }

    fn driver_comes(&self) {
        let ready = DriverState::Ready(Arc::clone(&self.world.ready));
        self.driver.send_replace(ready);
    }

    fn driver_goes(&self) {
        let why = tranche_node::nvml::NvmlError::NotFound {
            roots: "/driver-root".into(),
            searched: "/usr/lib64".into(),
        };
        let absent = DriverState::Absent(Arc::new(DriverError::Nvml(why)));
        self.driver.send_replace(absent);
    }

    fn kubelet_registers(&self) {
        self.registered.send_modify(|registered| {
            registered.count += 1;
            registered.now = true;
        });
    }

    /// Lets paused time run until the GpuNode says what it should.
    async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let wait = async {
            loop {
                match self.api().at(GPU_NODE) {
                    Some(node) if holds(&node) => return node,
                    _ => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let found = tokio::time::timeout(HOUR, wait).await;
        found.unwrap_or_else(|_| panic!("no {what}: {:?}", self.api().at(GPU_NODE)))
    }

    async fn until_epoch(&self, epoch: i64) -> Value {
        let has = |node: &Value| node["status"]["registration"]["epoch"] == epoch;
        self.until(&format!("epoch {epoch}"), has).await
    }

    async fn end(self) -> World {
        self.stop.cancel();
        self.task.await.unwrap();
        self.world
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_is_described_once_and_owned_by_its_node() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    let node = running.until_epoch(1).await;
    let has_gpus = |node: &Value| {
        node["status"]["inventory"]["gpus"]
            .as_array()
            .is_some_and(|g| g.len() == 2)
    };
    running.until("inventory", has_gpus).await;
    assert_eq!(node["metadata"]["ownerReferences"][0]["uid"], "node-uid");

    // Quiet at steady state: an hour later nothing more was written.
    let written = running.api().paths("PATCH").len();
    tokio::time::sleep(HOUR).await;
    assert_eq!(running.api().paths("PATCH").len(), written);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_registration_is_an_epoch_across_lives() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    running.kubelet_registers();
    running.until_epoch(2).await;
    let running = Running::start_in(running.end().await);
    running.kubelet_registers();
    running.driver_comes();
    running.until_epoch(3).await;
    running.end().await;
}

fn driver_ready(node: &Value) -> &Value {
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|c| c["type"] == "DriverReady");
    ready.unwrap()
}

#[tokio::test(start_paused = true)]
async fn nothing_is_registered_before_the_driver_was_checked() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    let world = running.end().await;
    let written = world.api.paths("PATCH").len();
    // The next life: its kubelet is quicker than its driver, which has gone meanwhile.
    let running = Running::start_in(world);
    running.kubelet_registers();
    tokio::time::sleep(HOUR).await;
    assert_eq!(running.api().paths("PATCH").len(), written);
    running.driver_goes();
    let node = running.until_epoch(2).await;
    assert_eq!(node["status"]["inventory"], Value::Null);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_goes_takes_the_inventory_with_it_and_says_why() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    let node = running.until_epoch(1).await;
    assert_eq!(driver_ready(&node)["status"], "True");
    running.driver_goes();
    let gone = |node: &Value| node["status"]["inventory"] == Value::Null;
    let node = running.until("end of the inventory", gone).await;
    let ready = driver_ready(&node);
    assert_eq!(ready["status"], "False");
    assert_eq!(ready["reason"], "DriverNotFound");
    let message = ready["message"].as_str().unwrap();
    assert!(message.contains("/driver-root"), "{message}");
    // Registered anew, it stays away; the epoch alone changes.
    running.kubelet_registers();
    let node = running.until_epoch(2).await;
    assert!(gone(&node), "{node}");
    assert_eq!(driver_ready(&node), ready);
    running.driver_comes();
    let back = |node: &Value| node["status"]["inventory"]["driverVersion"] == "535.261.03";
    let node = running.until("inventory", back).await;
    assert_eq!(driver_ready(&node)["status"], "True");

    let requests = running.api().requests();
    let events: Vec<_> = requests
        .iter()
        .filter(|(_, path, _)| path.starts_with(EVENTS))
        .map(|(_, _, event)| {
            (
                event["reason"].as_str().unwrap(),
                event["type"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        events,
        [
            ("DriverReady", "Normal"),
            ("DriverNotFound", "Warning"),
            ("DriverReady", "Normal"),
        ]
    );
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_fails_is_tried_until_it_does_not() {
    let running = Running::start();
    running.api().set_mood(Mood::Failing(500));
    running.driver_comes();
    running.kubelet_registers();
    tokio::time::sleep(Duration::from_mins(1)).await;
    let tries = running
        .api()
        .paths("GET")
        .iter()
        .filter(|path| *path == GPU_NODE)
        .count();
    assert!((4..=20).contains(&tries), "{tries} tries in a minute");
    running.api().set_mood(Mood::Well);
    running.until_epoch(1).await;
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_gpu_node_comes_back_at_once_with_a_greater_epoch() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    let object = running.api().at(GPU_NODE).unwrap();
    let deletion = json!({"type": "DELETED", "object": stored(object)});
    let deleted = tokio::time::Instant::now();
    running.api().delete_at(GPU_NODE);
    running.api().watch_delivers(GPU_NODES, [deletion]);
    let node = running.until_epoch(2).await;
    assert_eq!(node["metadata"]["ownerReferences"][0]["name"], NODE);
    assert_eq!(driver_ready(&node)["status"], "True");
    let took = deleted.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_deletion_that_no_watch_saw_is_noticed_later() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    running.api().delete_at(GPU_NODE);
    running.until_epoch(2).await;
    running.end().await;
}

fn slice(name: &str) -> Value {
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": {"name": name, "resourceVersion": "2"},
    })
}

/// A node whose only slice is deleted before or after the controller records `published` for epoch 1.
async fn slice_is_deleted(published: Value, before: bool) -> Running {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    let world = running.end().await;
    let mut node = world.api.at(GPU_NODE).unwrap();
    node["status"]["registration"]["epoch"] = 0.into();
    world.api.put_at(GPU_NODE, node);
    let running = Running::start_in(world);
    running.driver_comes();
    running.kubelet_registers();
    let mut node = running.until_epoch(1).await;
    node["status"]["published"] = published;
    let record = || async {
        running.api().put_at(GPU_NODE, node.clone());
        let event = json!({"type": "MODIFIED", "object": stored(node.clone())});
        running.api().watch_delivers(GPU_NODES, [event]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let happens = |what: &'static str| {
        let event = json!({"type": what, "object": slice("s")});
        running.api().watch_delivers(SLICES, [event]);
        tokio::time::sleep(Duration::from_secs(5))
    };
    happens("ADDED").await;
    if !before {
        record().await;
    }
    happens("DELETED").await;
    if before {
        record().await;
    }
    running
}

#[tokio::test(start_paused = true)]
async fn published_slices_that_vanish_are_asked_for_anew() {
    // A wipe may come before the controller records the slices, since a record needs no write to them.
    for before in [false, true] {
        let published = json!({"epoch": 1, "poolGeneration": 1, "sliceCount": 1, "slices": ["s"]});
        let running = slice_is_deleted(published, before).await;
        running.until_epoch(2).await;
        // The controller has not answered to epoch 2 yet, so there is nothing to miss.
        tokio::time::sleep(HOUR).await;
        running.until_epoch(2).await;
        running.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_the_controller_withdrew_is_not_missed() {
    let running = slice_is_deleted(
        json!({"epoch": 1, "poolGeneration": 1, "sliceCount": 0, "slices": []}),
        false,
    )
    .await;
    tokio::time::sleep(HOUR).await;
    running.until_epoch(1).await;
    running.end().await;
}

/// An object as a watch tells it.
fn stored(mut object: Value) -> Value {
    object["metadata"]["resourceVersion"] = "7".into();
    object
}

#[tokio::test(start_paused = true)]
async fn what_the_policies_ask_is_read_from_the_own_gpu_node() {
    use tranche_api::sharing_policy::OnBypass;
    let mut running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    let mut node = running.until_epoch(1).await;
    let uuid = "GPU-00000001-0000-0000-0000-000000000001";
    let on_bypass = |running: &Running| running.policy.borrow().capped(uuid).on_bypass;
    assert_eq!(on_bypass(&running), OnBypass::Report);
    let writes = running.api().paths("PATCH").len();
    let capped = json!({"onBypass": "Kill"});
    node["status"]["published"] = json!({
        "epoch": 1, "poolGeneration": 1, "gpus": [{"uuid": uuid, "policy": "strict", "capped": capped}],
    });
    let event = |node: &Value| [json!({"type": "MODIFIED", "object": stored(node.clone())})];
    running.api().watch_delivers(GPU_NODES, event(&node));
    running.policy.changed().await.unwrap();
    assert_eq!(on_bypass(&running), OnBypass::Kill);

    // An object without `published`, such as a new one, changes no policy; an empty list of GPUs does.
    node["status"]["published"] = Value::Null;
    running.api().watch_delivers(GPU_NODES, event(&node));
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(!running.policy.has_changed().unwrap());
    node["status"]["published"] = json!({"epoch": 1, "poolGeneration": 1});
    running.api().watch_delivers(GPU_NODES, event(&node));
    running.policy.changed().await.unwrap();
    assert_eq!(on_bypass(&running), OnBypass::Report);
    // Nothing was written for it.
    assert_eq!(running.api().paths("PATCH").len(), writes);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_cannot_be_read_shows_until_it_can() {
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    let claims_known = || {
        let node = running.api().at(GPU_NODE)?;
        let conditions = node["status"]["conditions"].as_array()?.clone();
        conditions.into_iter().find(|c| c["type"] == "ClaimsKnown")
    };
    assert_eq!(claims_known().unwrap()["status"], "True");
    let refused = Refused::from([("uid".to_owned(), "journal /x/uid.json: corrupt".into())]);
    running.refused.send_replace(refused);
    tokio::time::sleep(HOUR).await;
    let condition = claims_known().unwrap();
    assert_eq!(condition["status"], "False");
    assert_eq!(condition["message"], "journal /x/uid.json: corrupt");
    running.refused.send_replace(Refused::default());
    tokio::time::sleep(HOUR).await;
    assert_eq!(claims_known().unwrap()["status"], "True");
    running.end().await;
}

/// A device plugin offers the GPU at this place of the inventory.
fn plugin_offers(world: &World, gpu: usize) -> Providers {
    let inventory = &world.ready.inventory;
    let offered = vec![PluginDevice {
        resource: "nvidia.com/gpu".into(),
        id: inventory.gpus[gpu].uuid.clone(),
    }];
    let kubelet = Kubelet {
        offered,
        ..Kubelet::default()
    };
    let seen = Observations {
        kubelet: Some(Ok(kubelet)),
        ..Observations::default()
    };
    verdict(inventory, &seen)
}

#[tokio::test(start_paused = true)]
async fn what_the_node_withholds_is_written_until_it_is_released() {
    let running = Running::start();
    let uuids: Vec<_> = running
        .world
        .ready
        .inventory
        .gpus
        .iter()
        .map(|g| g.uuid.clone())
        .collect();
    let mut ready = (*running.world.ready).clone();
    ready.withheld = vec![WithheldGpu::whole(
        &uuids[0],
        "MigMode",
        "MIG mode is on".into(),
    )];
    running
        .driver
        .send_replace(DriverState::Ready(Arc::new(ready)));
    running
        .others
        .send_replace(Some(plugin_offers(&running.world, 1)));
    running.kubelet_registers();
    let node = running.until_epoch(1).await;
    let withheld = node["status"]["withheld"].as_array().unwrap();
    let found: Vec<_> = withheld
        .iter()
        .map(|w| (w["gpu"].as_str().unwrap(), w["reason"].as_str().unwrap()))
        .collect();
    assert_eq!(
        found,
        [(&*uuids[0], "MigMode"), (&*uuids[1], "OtherProvider")]
    );
    let sole = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().unwrap();
        let sole = conditions
            .iter()
            .find(|c| c["type"] == "SoleProvider")
            .unwrap();
        (sole["status"].clone(), sole["reason"].clone())
    };
    assert_eq!(sole(&node), (json!("False"), json!("NvidiaDevicePlugin")));

    let written = running.api().paths("PATCH").len();
    tokio::time::sleep(HOUR).await;
    assert_eq!(
        running.api().paths("PATCH").len(),
        written,
        "quiet while nothing changes"
    );

    // Memory without an owner is one reason more.
    let unowned = WithheldGpu::whole(&uuids[0], "UnownedMemory", "in use by no process".into());
    running.unowned.send_replace(vec![unowned]);
    let third = |node: &Value| node["status"]["withheld"][2]["reason"] == "UnownedMemory";
    running.until("unowned memory", third).await;
    running.unowned.send_replace(Vec::new());
    let daemon = WithheldGpu::whole(&uuids[0], "MpsDaemon", "it is dead".into());
    running.daemons.send_replace(vec![daemon]);
    let third = |node: &Value| node["status"]["withheld"][2]["reason"] == "MpsDaemon";
    running.until("a dead MPS daemon", third).await;
    running.daemons.send_replace(Vec::new());

    running.others.send_replace(Some(no_others()));
    running.driver_comes();
    let healed = |node: &Value| node["status"]["withheld"].is_null() && sole(node).0 == "True";
    running.until("sole provider", healed).await;
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_competing_drivers_were_searched() {
    let running = Running::start();
    running.others.send_replace(None);
    running.driver_comes();
    running.kubelet_registers();
    tokio::time::sleep(HOUR).await;
    assert_eq!(running.api().paths("PATCH"), [""; 0]);
    running.others.send_replace(Some(no_others()));
    running.until_epoch(1).await;
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_is_written_with_its_time_and_survives_the_plugin() {
    use tranche_api::gpu_node::TaintEffect;
    use tranche_driver::health::{Status, Taint};

    let verdict = |status, reason: &str, taint| Verdict {
        status,
        reason: reason.to_owned(),
        message: format!("{reason}: what to do"),
        taint,
    };
    let taint = |effect| Taint {
        value: "Xid79".to_owned(),
        effect,
        since: 1_000,
    };
    let running = Running::start();
    running.driver_comes();
    running.kubelet_registers();
    running.until_epoch(1).await;
    let board = |running: &Running, verdict| {
        let verdicts = Verdicts::from([("GPU-a".to_owned(), verdict)]);
        running.health.send_replace(Some(Arc::new(verdicts)));
    };
    board(&running, verdict(Status::Healthy, "NoFault", None));
    let healthy = |node: &Value| node["status"]["gpus"][0]["conditions"][0]["status"] == "True";
    running.until("a healthy GPU", healthy).await;
    let sick = verdict(
        Status::Unhealthy,
        "Xid79",
        Some(taint(TaintEffect::NoSchedule)),
    );
    board(&running, sick);
    let is_sick = |node: &Value| node["status"]["unhealthyCount"] == 1;
    let node = running.until("a GPU with a fault", is_sick).await;
    let gpu = &node["status"]["gpus"][0];
    assert_eq!(gpu["conditions"][0]["reason"], "Xid79");
    assert_eq!(
        gpu["taint"],
        json!({"value": "Xid79", "effect": "NoSchedule", "timeAdded": "1970-01-01T00:16:40Z"})
    );
    let changed = gpu["conditions"][0]["lastTransitionTime"].clone();
    // A new process writes before it has looked at the GPUs.
    let running = Running::start_in(running.end().await);
    running.driver_comes();
    running.kubelet_registers();
    let node = running.until_epoch(2).await;
    assert_eq!(node["status"]["gpus"][0]["taint"]["value"], "Xid79");
    let executes = verdict(
        Status::Unhealthy,
        "Xid79",
        Some(taint(TaintEffect::NoExecute)),
    );
    board(&running, executes);
    let is_executed = |node: &Value| node["status"]["gpus"][0]["taint"]["effect"] == "NoExecute";
    let node = running.until("NoExecute", is_executed).await;
    let condition = &node["status"]["gpus"][0]["conditions"][0];
    assert_eq!(
        condition["lastTransitionTime"], changed,
        "the status is the same"
    );
    board(&running, verdict(Status::Healthy, "NoFault", None));
    let node = running.until("a healthy GPU", healthy).await;
    assert_eq!(node["status"]["gpus"][0]["taint"], Value::Null);
    let world = running.end().await;
    let reasons: Vec<Value> = world
        .api
        .requests()
        .into_iter()
        .filter(|(method, path, _)| method == "POST" && path == EVENTS)
        .map(|(_, _, event)| event["reason"].clone())
        .filter(|reason| reason.as_str().is_some_and(|it| it.starts_with("Gpu")))
        .collect();
    assert_eq!(reasons, ["GpuUnhealthy", "GpuHealthy"]);
}
