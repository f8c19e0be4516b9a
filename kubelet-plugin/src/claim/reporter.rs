//! Reports results to the cluster after the kubelet has its answer: status and events.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tranche_driver::journal::ClaimRecord;

use crate::claim::preparer::{Problem, Reporter};
use crate::cluster::events::Events;
use crate::cluster::status::StatusWriter;

/// Writes to the API server.
#[derive(Debug)]
pub struct ClusterReporter {
    /// `claim.status.devices`.
    pub status: StatusWriter,
    pub events: Events,
}

impl Reporter for ClusterReporter {
    fn prepared(&self, record: &Arc<ClaimRecord>) {
        self.status.publish(record);
    }

    fn failed(&self, claim: &ResourceClaim, problem: &Problem, text: &str) {
        self.events.prepare_failed(claim, problem.outcome(), text);
    }

    fn released(&self, uid: &str) {
        self.status.forget(uid);
    }
}
