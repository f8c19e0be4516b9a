//! The steps of a pod's start, and their times by the kubelet's metrics.
//!
//! ```text
//!  created ─► scheduler ─► kubelet: claim ─► our Prepare ─► sandbox ─► create ─► start ─► Running
//!             by a watch   ╰──────────────── by the kubelet's own metrics ─────────────╯
//! ```

use anyhow::Context;
use kube::Client;
use tranche_api::names::DRIVER;

/// A step of a pod's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Until the pod has a node: the scheduler allocates and writes.
    Scheduler,
    /// The kubelet's own part of preparing claims: its reads and its checkpoint.
    Claim,
    Prepare,
    Sandbox,
    /// The runtime creates the container and applies CDI's edits.
    Create,
    /// The runtime starts the container: mounts and hooks.
    Start,
    /// The rest of the time until Running.
    Rest,
}

/// All of them, in their order.
pub const STEPS: [Step; 7] = [
    Step::Scheduler,
    Step::Claim,
    Step::Prepare,
    Step::Sandbox,
    Step::Create,
    Step::Start,
    Step::Rest,
];

impl Step {
    /// The name in a promise's ID.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Claim => "claim",
            Self::Prepare => "prepare",
            Self::Sandbox => "sandbox",
            Self::Create => "create",
            Self::Start => "start",
            Self::Rest => "rest",
        }
    }
}

/// The kubelet's counters of each step, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    resources: f64,
    prepare: f64,
    sandbox: f64,
    create: f64,
    start: f64,
}

impl Counted {
    /// Asks the node's kubelet.
    pub async fn read(client: &Client, node: &str) -> anyhow::Result<Self> {
        let request = http::Request::get(format!("/api/v1/nodes/{node}/proxy/metrics"))
            .body(Vec::new())
            .context("the request for the kubelet's metrics")?;
        let text = client
            .request_text(request)
            .await
            .with_context(|| format!("the metrics of the kubelet of node {node}"))?;
        Ok(Self::of(&text))
    }

    /// Reads the text of the kubelet's metrics.
    fn of(text: &str) -> Self {
        let runtime = |operation: &str| {
            let label = format!("operation_type=\"{operation}\"");
            sum(
                text,
                "kubelet_runtime_operations_duration_seconds_sum",
                &[&label],
            )
        };
        let driver = format!("driver_name=\"{DRIVER}\"");
        Self {
            resources: sum(
                text,
                "dra_operations_duration_seconds_sum",
                &["operation_name=\"PrepareResources\""],
            ),
            prepare: sum(
                text,
                "dra_grpc_operations_duration_seconds_sum",
                &[&driver, "NodePrepareResources\""],
            ),
            sandbox: runtime("run_podsandbox"),
            create: runtime("create_container"),
            start: runtime("start_container"),
        }
    }

    /// Milliseconds of each step of a pod that was scheduled after `scheduled` and ran after `running`. `before` was read before the
    /// pod's creation, `self` after its start.
    pub fn steps(&self, before: &Self, scheduled: f64, running: f64) -> [(Step, f64); STEPS.len()] {
        let prepare = self.prepare - before.prepare;
        let claim = self.resources - before.resources - prepare;
        let sandbox = self.sandbox - before.sandbox;
        let create = self.create - before.create;
        let start = self.start - before.start;
        let known = scheduled + claim + prepare + sandbox + create + start;
        STEPS.map(|step| {
            let taken = match step {
                Step::Scheduler => scheduled,
                Step::Claim => claim,
                Step::Prepare => prepare,
                Step::Sandbox => sandbox,
                Step::Create => create,
                Step::Start => start,
                Step::Rest => running - known,
            };
            (step, taken)
        })
    }
}

/// The sum of a metric over the lines that have all labels, converted from seconds to milliseconds.
fn sum(text: &str, name: &str, labels: &[&str]) -> f64 {
    let of_line = |line: &str| {
        let (found, rest) = line.split_once('{')?;
        let (found_labels, value) = rest.rsplit_once('}')?;
        let is_it = found == name && labels.iter().all(|label| found_labels.contains(label));
        is_it.then(|| value.trim().parse::<f64>().ok())?
    };
    text.lines().filter_map(of_line).sum::<f64>() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metrics of a kubelet 1.37.
    const METRICS: &str = r#"
# TYPE dra_grpc_operations_duration_seconds histogram
dra_grpc_operations_duration_seconds_sum{driver_name="gpu.tranche.dev",grpc_status_code="OK",method_name="/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"} 0.004
dra_grpc_operations_duration_seconds_sum{driver_name="gpu.tranche.dev",grpc_status_code="OK",method_name="/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"} 7
dra_operations_duration_seconds_sum{is_error="false",operation_name="PrepareResources"} 0.009
dra_operations_duration_seconds_sum{is_error="true",operation_name="PrepareResources"} 0.001
kubelet_runtime_operations_duration_seconds_sum{operation_type="create_container"} 0.05
kubelet_runtime_operations_duration_seconds_sum{operation_type="run_podsandbox"} 0.2
kubelet_runtime_operations_duration_seconds_sum{operation_type="start_container"} 0.1
kubelet_runtime_operations_duration_seconds_count{operation_type="start_container"} 3
"#;

    #[test]
    fn steps_add_up_to_the_whole() {
        let steps = Counted::of(METRICS).steps(&Counted::default(), 20.0, 500.0);
        let rounded = steps.map(|(step, taken)| (step.as_str(), taken.round()));
        assert_eq!(
            rounded,
            [
                ("scheduler", 20.0),
                ("claim", 6.0),
                ("prepare", 4.0),
                ("sandbox", 200.0),
                ("create", 50.0),
                ("start", 100.0),
                ("rest", 120.0),
            ]
        );
    }
}
