//! What the cluster is told once the kubelet has its answer: status and events.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tranche_driver::journal::Record;

use crate::events::Events;
use crate::preparer::{Aftermath, Problem};
use crate::status::StatusWriter;

/// Tells the API server.
#[derive(Debug)]
pub struct ClusterAftermath {
    /// `claim.status.devices`.
    pub status: StatusWriter,
    /// The pods' events.
    pub events: Events,
}

impl Aftermath for ClusterAftermath {
    fn prepared(&self, record: &Arc<Record>) {
        self.status.tell(record);
    }

    fn failed(&self, claim: &ResourceClaim, problem: &Problem, text: &str) {
        self.events.prepare_failed(claim, problem.outcome(), text);
    }

    fn released(&self, uid: &str) {
        self.status.forget(uid);
    }
}
