//! The questions that a running pod answers by itself.

use super::{AnswerError, Answers, Size};
use crate::cost::right_size;
use crate::model::{Gpu, Model, Tenant};
use crate::output::bytes;
use crate::snapshot::Snapshot;

/// What is known of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodAnswers {
    /// The questions that it answers.
    pub answers: Answers,
    pub size: Size,
    /// One line, where it uses much less than it has.
    pub hint: Option<String>,
}

/// Reads the answers from the pod's first device.
pub fn of_pod(
    model: &Model,
    snapshot: &Snapshot,
    namespace: &str,
    pod: &str,
) -> Result<PodAnswers, AnswerError> {
    let mut held = model
        .gpus()
        .flat_map(|(_, gpu)| gpu.tenants().map(move |tenant| (gpu, tenant)));
    let is_its = |tenant: &Tenant| {
        tenant.namespace == namespace && tenant.pods.iter().any(|name| name == pod)
    };
    let found = held.find(|(_, tenant)| is_its(tenant));
    let (gpu, tenant) = found.ok_or_else(|| AnswerError::NoPod {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
    })?;
    let mut answers = Answers::from([("machine", "container")]);
    let memory = tenant.device.memory;
    if let Some(memory) = memory {
        // Two shares of more than half a GPU do not fit on one GPU.
        let is_part = u128::from(memory) * 2 <= u128::from(gpu.memory);
        answers.insert("size", if is_part { "part" } else { "whole" });
    }
    if let Some(is_divided) = can_be_divided(snapshot, gpu) {
        answers.insert("gpu", if is_divided { "mig" } else { "no-mig" });
    }
    let cores = tenant
        .device
        .cores
        .and_then(|cores| u8::try_from(cores).ok());
    Ok(PodAnswers {
        answers,
        size: Size { memory, cores },
        hint: right_size(tenant).map(|it| {
            format!(
                "the pod's claim asked for {} and {} (--memory)",
                bytes(it.requested_memory),
                it.in_words()
            )
        }),
    })
}

/// Whether MIG can divide the GPU, where its node says so.
fn can_be_divided(snapshot: &Snapshot, gpu: &Gpu) -> Option<bool> {
    let statuses = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|it| it.status.as_ref());
    let mut gpus = statuses.flat_map(|it| it.inventory.iter().flat_map(|it| &it.gpus));
    gpus.find(|it| it.uuid == gpu.uuid).map(|it| it.mig_capable)
}
