//! What a pod's status says: whether it has a node, why its containers do not start, whether it is late to end.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// How long after the end of its grace period a pod may still be there: the kubelet stops containers and calls its plugins.
const LATE: SignedDuration = SignedDuration::from_secs(60);
/// How long a pod may take from its node to its first container, without images that are being pulled.
const SLOW: SignedDuration = SignedDuration::from_secs(120);

/// Whether it has a node.
pub(crate) fn is_placed(pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    node.is_some_and(|name| !name.is_empty())
}

/// The scheduler's message on a pod that it did not place.
pub(crate) fn unscheduled(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let unscheduled = conditions
        .iter()
        .find(|it| it.type_ == "PodScheduled" && it.status == "False");
    unscheduled?.message.as_deref()
}

/// A container that does not run, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    pub(crate) container: String,
    /// `CreateContainerError`, `CrashLoopBackOff`.
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl Stopped {
    /// `container main cannot start: CreateContainerError: …`.
    pub(crate) fn text(&self) -> String {
        let Self {
            container,
            reason,
            message,
        } = self;
        match (reason.as_str(), message.as_str()) {
            ("CrashLoopBackOff", "") => format!("container {container} ends again and again"),
            ("CrashLoopBackOff", _) => {
                format!("container {container} ends again and again: {message}")
            }
            (_, "") => format!("container {container} cannot start: {reason}"),
            _ => format!("container {container} cannot start: {reason}: {message}"),
        }
    }

    /// Whether the container's own program is the reason.
    pub(crate) fn is_of_program(&self) -> bool {
        self.reason == "CrashLoopBackOff"
    }

    /// Whether the runtime could not make or start it, which its devices may be the reason of; an image or a ConfigMap is not.
    pub(crate) fn may_be_of_devices(&self) -> bool {
        matches!(
            self.reason.as_str(),
            "CreateContainerError" | "RunContainerError" | "StartError" | "ContainerCannotRun"
        )
    }

    /// What to do, where the reason is one of ours.
    pub(crate) fn way_out(&self) -> Option<&'static str> {
        let is_cdi = self.message.contains("CDI device");
        is_cdi.then_some(
            "the runtime finds no CDI device of the claim: the node's plugin makes a deleted file again within seconds, and its log says why if it \
             cannot; if a new pod has the same, the runtime does not read /var/run/cdi",
        )
    }
}

/// The containers that the kubelet tries to start in vain.
pub(crate) fn stopped(pod: &Pod) -> Vec<Stopped> {
    let Some(status) = &pod.status else {
        return Vec::new();
    };
    let init = status.init_container_statuses.iter().flatten();
    let all = init.chain(status.container_statuses.iter().flatten());
    all.filter_map(self::waiting).collect()
}

fn waiting(status: &ContainerStatus) -> Option<Stopped> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.clone()?;
    if matches!(reason.as_str(), "ContainerCreating" | "PodInitializing") {
        return None;
    }
    let last = status.last_state.as_ref();
    let ended = last.and_then(|it| it.terminated.as_ref());
    let message = match (reason.as_str(), ended) {
        ("CrashLoopBackOff", Some(ended)) => format!("exit code {}", ended.exit_code),
        _ => waiting.message.clone().unwrap_or_default(),
    };
    Some(Stopped {
        container: status.name.clone(),
        reason,
        message: message.split_whitespace().collect::<Vec<_>>().join(" "),
    })
}

/// Since when a pod should have ended; `None` for a pod that is in time.
pub(crate) fn late(pod: &Pod, now: Timestamp) -> Option<Timestamp> {
    // The API server adds the grace period.
    let deadline = pod.metadata.deletion_timestamp.as_ref()?.0;
    (now.duration_since(deadline) > LATE).then_some(deadline)
}

/// Since when a pod has a node without a container that was ever made; `None` for a pod that is in time. A large image may be the
/// reason, too.
pub(crate) fn slow(pod: &Pod, now: Timestamp) -> Option<Timestamp> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Pending") || !is_placed(pod) {
        return None;
    }
    let init = status.init_container_statuses.iter().flatten();
    let mut all = init.chain(status.container_statuses.iter().flatten());
    let is_new = |it: &ContainerStatus| {
        let state = it.state.as_ref();
        state.is_none_or(|it| it.running.is_none() && it.terminated.is_none())
    };
    if !all.all(is_new) {
        return None;
    }
    let since = status.start_time.as_ref()?.0;
    (now.duration_since(since) > SLOW).then_some(since)
}
