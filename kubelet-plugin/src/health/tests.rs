//! The monitor over scripted GPUs, and what the kubelet and the claims are told.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tranche_api::WithheldGpu;
use tranche_api::gpu_node::Published;
use tranche_driver::health::{RecoveryAction, Report, Status, Verdict};
use tranche_node::health::{Watch, XidCounts};
use tranche_serving::Clock;

use super::check::Check;
use super::monitor::{Monitor, MonitorParts};
use super::report::HealthReporter;
use super::stream::HealthService;
use super::*;
use crate::cluster::events::Events;
use crate::cluster::node_policy::NodePolicy;
use crate::kubelet::proto::dra_health::{v1, v1alpha1};
use crate::testing::{NODE, Plugin, World, capped, claim, claim_ref, whole};

/// Its results in turn; then it passes.
#[derive(Debug, Default)]
struct ScriptedCheck {
    results: Mutex<VecDeque<Result<(), String>>>,
    checked: Mutex<Vec<String>>,
}

impl ScriptedCheck {
    fn checked(&self) -> usize {
        self.checked.lock().unwrap().len()
    }
}

impl Check for ScriptedCheck {
    fn check(&self, gpu_uuid: &str) -> Result<(), String> {
        self.checked.lock().unwrap().push(gpu_uuid.to_owned());
        self.results.lock().unwrap().pop_front().unwrap_or(Ok(()))
    }
}

/// A node, and a clock that only [`Node::look`] moves.
struct Node {
    world: World,
    plugin: Plugin,
    board: Arc<Board>,
    monitor: Monitor,
    check: Arc<ScriptedCheck>,
    policy: watch::Sender<NodePolicy>,
    cordoned: watch::Sender<bool>,
    now: Instant,
    unix: u64,
}

fn monitor_of(
    world: &World,
    plugin: &Plugin,
    check: &Arc<ScriptedCheck>,
) -> (
    Arc<Board>,
    Monitor,
    watch::Sender<NodePolicy>,
    watch::Sender<bool>,
) {
    let board = Arc::new(Board::default());
    let (policy, policy_rx) = watch::channel(world.no_policy());
    let (cordoned, cordoned_rx) = watch::channel(false);
    let boot = world.layout.plugin.join("boot_id");
    if !boot.exists() {
        std::fs::write(&boot, "first\n").unwrap();
    }
    let parts = MonitorParts {
        fs: Arc::new(crate::host::fs::HostFs),
        faults: world.layout.faults(),
        boot,
        ledger: Arc::clone(plugin.preparer.ledger()),
        state: plugin.driver.subscribe(),
        policy: policy_rx,
        cordoned: cordoned_rx,
        check: Arc::clone(check) as _,
        board: Arc::clone(&board),
    };
    let watch = Watch::new(Box::new(world.driver()), XidCounts::default());
    (board, Monitor::new(parts, watch), policy, cordoned)
}

impl Node {
    fn start() -> Self {
        let world = World::new();
        let plugin = world.start();
        let check = Arc::default();
        let (board, monitor, policy, cordoned) = monitor_of(&world, &plugin, &check);
        Self {
            world,
            plugin,
            board,
            monitor,
            check,
            policy,
            cordoned,
            now: Instant::now(),
            unix: 1_000,
        }
    }

    /// The plugin's next life.
    fn restart(&mut self) {
        (self.board, self.monitor, self.policy, self.cordoned) =
            monitor_of(&self.world, &self.plugin, &self.check);
    }

    fn uuid(&self, nth: usize) -> String {
        self.world.ready.inventory.gpus[nth].uuid.clone()
    }

    /// Looks after so many seconds; returns the verdict on the first GPU.
    fn look_after(&mut self, seconds: u64) -> Verdict {
        self.now += Duration::from_secs(seconds);
        self.unix += seconds;
        self.monitor.look(self.now, self.unix);
        let verdicts = self.board.now().expect("a look");
        assert_eq!(
            verdicts[&self.uuid(1)].status,
            Status::Healthy,
            "the other GPU"
        );
        verdicts[&self.uuid(0)].clone()
    }

    /// Looks until the running check has ended.
    fn look_for(&mut self, status: Status) -> Verdict {
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            let verdict = self.look_after(0);
            if verdict.status == status || Instant::now() > end {
                assert_eq!(verdict.status, status, "{verdict:?}");
                return verdict;
            }
            std::thread::yield_now();
        }
    }
}

#[tokio::test]
async fn a_fault_outlives_the_plugin_and_ends_with_a_check() {
    let mut node = Node::start();
    assert_eq!(node.look_after(0).status, Status::Healthy);
    let first = node.uuid(0);
    let asks = Report {
        recovery_action: Some(RecoveryAction::Reset),
        ..Report::default()
    };
    node.world.mig.report(&first, asks);
    node.world.mig.err(&first, 48);
    let sick = node.look_after(1);
    assert_eq!(
        (sick.status, sick.taint.unwrap().since),
        (Status::Unhealthy, 1_001)
    );
    node.restart();
    let again = node.look_after(10);
    assert_eq!(
        (again.status, again.taint.unwrap().since),
        (Status::Unhealthy, 1_001)
    );
    assert_eq!(node.check.checked(), 0, "the driver still asks for a reset");
    // It was reset. The first check does not pass, and is repeated after a while.
    let results = [Err("cuInit returned error 3".to_owned())];
    node.check.results.lock().unwrap().extend(results);
    let fine = Report {
        recovery_action: Some(RecoveryAction::None),
        ..Report::default()
    };
    node.world.mig.report(&first, fine);
    node.look_after(5);
    let end = Instant::now() + Duration::from_mins(1);
    while !node
        .look_after(0)
        .message
        .contains("cuInit returned error 3")
    {
        assert!(Instant::now() < end, "{:?}", node.look_after(0));
        std::thread::yield_now();
    }
    node.look_after(30);
    assert_eq!(node.check.checked(), 1);
    node.look_after(30);
    node.look_for(Status::Healthy);
    assert_eq!(
        *node.check.checked.lock().unwrap(),
        [first.as_str(), first.as_str()]
    );
    node.restart();
    assert_eq!(node.look_after(0).status, Status::Healthy);
}

#[tokio::test]
async fn a_gpu_is_not_checked_while_a_claim_holds_it() {
    let mut node = Node::start();
    node.world.api.put(claim("a", &[whole("gpu", 0)]));
    node.plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let first = node.uuid(0);
    let fine = Report {
        recovery_action: Some(RecoveryAction::None),
        ..Report::default()
    };
    node.world.mig.report(&first, fine);
    node.look_after(0);
    node.world.mig.err(&first, 95);
    for _ in 0..3 {
        let verdict = node.look_after(10);
        assert!(verdict.message.contains("no claim holds it"), "{verdict:?}");
    }
    assert_eq!(node.check.checked(), 0);
    node.plugin
        .preparer
        .unprepare(&claim_ref("a"))
        .await
        .unwrap();
    node.look_for(Status::Healthy);
}

#[tokio::test]
async fn on_a_cordoned_node_without_claims_nvml_is_closed_and_a_reset_is_believed() {
    let mut node = Node::start();
    let first = node.uuid(0);
    node.look_after(0);
    // A driver that reports no recovery action.
    node.world.mig.err(&first, 48);
    let message = node.look_after(1).message;
    assert!(message.contains("cordon the node"), "{message}");
    node.look_after(100);
    assert_eq!(node.check.checked(), 0);
    node.cordoned.send_replace(true);
    node.now += Duration::from_secs(1);
    node.monitor.look(node.now, node.unix);
    let verdicts = node.board.now().unwrap();
    assert_eq!(verdicts[&node.uuid(1)].status, Status::Unknown);
    assert_eq!(verdicts[&first].status, Status::Unhealthy);
    node.cordoned.send_replace(false);
    node.look_for(Status::Healthy);
    assert_eq!(node.check.checked(), 1);
}

#[tokio::test]
async fn a_look_that_fails_once_changes_nothing_and_a_removed_gpu_is_forgotten() {
    let mut node = Node::start();
    let first = node.uuid(0);
    node.look_after(0);
    node.world.mig.has_left(&first, true);
    assert_eq!(node.look_after(10).status, Status::Healthy);
    assert_eq!(node.look_after(21).status, Status::Unknown);
    node.world.mig.has_left(&first, false);
    node.look_after(10);
    node.world.mig.err(&first, 64);
    assert_eq!(node.look_after(1).status, Status::Unhealthy);
    // The machine boots without it.
    node.world.mig.has_left(&first, true);
    std::fs::write(node.world.layout.plugin.join("boot_id"), "second\n").unwrap();
    let mut ready = crate::gpu::driver_state::Ready::clone(&node.world.ready);
    ready.inventory.gpus.remove(0);
    let state = crate::gpu::driver_state::DriverState::Ready(Arc::new(ready));
    node.plugin.driver.send_replace(state);
    node.restart();
    node.now += Duration::from_mins(1);
    node.monitor.look(node.now, node.unix);
    assert_eq!(node.board.now().unwrap().get(&first), None);
}

#[tokio::test]
async fn a_gpu_that_left_the_inventory_before_the_first_look_is_lost() {
    let mut node = Node::start();
    let first = node.uuid(0);
    node.world.mig.lose(&first, true);
    let mut ready = crate::gpu::driver_state::Ready::clone(&node.world.ready);
    ready.inventory.gpus.remove(0);
    let lost = WithheldGpu::whole(&first, "GpuLost", "the GPU is lost".to_owned());
    ready.withheld.push(lost);
    let state = crate::gpu::driver_state::DriverState::Ready(Arc::new(ready));
    node.plugin.driver.send_replace(state);
    let verdict = node.look_after(0);
    assert_eq!(
        (verdict.status, &*verdict.reason),
        (Status::Unhealthy, "GpuLost")
    );
}

#[tokio::test]
async fn the_policy_of_the_gpu_applies() {
    let mut node = Node::start();
    let first = node.uuid(0);
    let published: Published = serde_json::from_value(json!({
        "epoch": 1, "poolGeneration": 1,
        "gpus": [{"uuid": first, "health": {"effect": "NoExecute", "graceSeconds": 5}}],
    }))
    .unwrap();
    node.policy.send_replace(NodePolicy::of(&published));
    node.look_after(0);
    node.world.mig.err(&first, 79);
    let effect = |verdict: Verdict| verdict.taint.unwrap().effect.as_str();
    assert_eq!(effect(node.look_after(1)), "NoSchedule");
    assert_eq!(effect(node.look_after(5)), "NoExecute");
}

#[tokio::test]
async fn the_kubelet_and_the_claim_and_its_pod_learn_of_a_fault() {
    let mut node = Node::start();
    let mut holder = claim("a", &[capped("gpu", 0, "20Gi", 25)]);
    holder["status"]["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "uid-of-p"}]);
    node.world.api.put(holder);
    let record = node.plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    node.look_after(0);

    let stop = CancellationToken::new();
    let service = HealthService {
        ledger: Arc::clone(node.plugin.preparer.ledger()),
        board: Arc::clone(&node.board),
        stop: stop.clone(),
    };
    let request = || Request::new(v1::NodeWatchResourcesRequest {});
    let watch = v1::dra_resource_health_server::DraResourceHealth::node_watch_resources(
        &service,
        request(),
    );
    let mut reports = watch.await.unwrap().into_inner();
    let mut next = async || {
        let report = futures::StreamExt::next(&mut reports).await?;
        let [device] = &report.unwrap().devices[..] else {
            panic!("one device");
        };
        Some((device.health(), device.clone()))
    };
    let (health, device) = next().await.unwrap();
    assert_eq!(health, v1::HealthStatus::Healthy);
    let name = device.device.unwrap();
    let held = &record.plan.devices[0];
    assert_eq!(
        (&name.pool_name, &name.device_name),
        (&held.pool, &held.device)
    );

    let first = node.uuid(0);
    node.world.mig.err(&first, 79);
    node.look_after(1);
    let (health, device) = next().await.unwrap();
    assert_eq!(health, v1::HealthStatus::Unhealthy);
    assert!(device.message.contains("Xid 79"), "{}", device.message);
    // An older kubelet.
    let request = Request::new(v1alpha1::NodeWatchResourcesRequest {});
    let watch = v1alpha1::dra_resource_health_server::DraResourceHealth::node_watch_resources(
        &service, request,
    );
    let mut old = watch.await.unwrap().into_inner();
    let report = futures::StreamExt::next(&mut old).await.unwrap().unwrap();
    assert_eq!(
        report.devices[0].health(),
        v1alpha1::HealthStatus::Unhealthy
    );

    let client = node.world.api.client();
    let reporter = HealthReporter {
        ledger: Arc::clone(node.plugin.preparer.ledger()),
        board: Arc::clone(&node.board),
        events: Events::new(client.clone(), NODE),
        clock: Clock::system(),
        told: std::collections::BTreeMap::new(),
    };
    let reporting = tokio::spawn(reporter.run(client, stop.clone()));
    let found = async |wanted: &dyn Fn(&(String, String, Value)) -> bool| {
        let wait = async {
            loop {
                if let Some(found) = node.world.api.requests().into_iter().find(wanted) {
                    return found.2;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), wait)
            .await
            .unwrap()
    };
    let of_claim = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/a/status";
    let body = found(&|(method, path, body)| {
        method == "PATCH"
            && path == of_claim
            && body["status"]["devices"][0]["conditions"][0]["type"] == "Healthy"
    })
    .await;
    let written = &body["status"]["devices"][0];
    assert_eq!(written["shareID"], json!(held.share_id));
    assert_eq!(written["data"], Value::Null, "what others write stays");
    assert_eq!(written["conditions"][0]["status"], "False");
    assert_eq!(written["conditions"][0]["reason"], "Xid79");
    let event = found(&|(method, path, body)| {
        method == "POST" && path.ends_with("/events") && body["reason"] == "GpuUnhealthy"
    })
    .await;
    assert_eq!(event["regarding"]["name"], "p");
    assert!(event["note"].as_str().unwrap().contains(&first), "{event}");
    stop.cancel();
    reporting.await.unwrap();
    while next().await.is_some() {}
}
