//! Reads ResourceClaims from the API server.

use std::fmt;
use std::time::Duration;

use k8s_openapi::Resource as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::core::Status;
use kube::core::response::StatusDetails;
use kube::{Api, Client};

use crate::cluster::api_server::{NoAnswer, within};
use crate::ledger::claim_ref::ClaimRef;

/// The pauses before a broken connection is retried. The kubelet itself repeats a call only after a
/// minute or more.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(800),
];

/// Why a claim could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The API server refused or could not be reached.
    #[error("cannot read it from the API server: {0}")]
    Api(#[source] Box<kube::Error>),
    /// The API server did not answer.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
}

/// Reads claims, one at a time.
#[derive(Clone)]
pub struct ClaimReader {
    client: Client,
}

impl fmt::Debug for ClaimReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClaimReader")
    }
}

impl ClaimReader {
    /// Uses a client that does not retry by itself.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// The claim that has this namespace and name now, whatever its UID; `None` if the API server itself
    /// says that there is none. A 404 of a proxy, or without a Status, is an error.
    pub async fn get(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, ReadError> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &claim.namespace);
        let read = async {
            for pause in PAUSES {
                match api.get(&claim.name).await {
                    Err(kube::Error::Service(_) | kube::Error::HyperError(_)) => {
                        tokio::time::sleep(pause).await;
                    }
                    answer => return answer,
                }
            }
            api.get(&claim.name).await
        };
        match within(read).await? {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(status)) if says_gone(&status, &claim.name) => Ok(None),
            Err(error) => Err(ReadError::Api(Box::new(error))),
        }
    }
}

/// Whether a Status comes from the API server itself and says that there is no claim of this name.
fn says_gone(status: &Status, name: &str) -> bool {
    let kind = |details: &StatusDetails| {
        details.group == ResourceClaim::GROUP && details.kind == ResourceClaim::URL_PATH_SEGMENT
    };
    status.code == 404
        && status.reason == "NotFound"
        && (status.details.as_ref()).is_some_and(|details| kind(details) && details.name == name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn gone(status: Value) -> bool {
        says_gone(&serde_json::from_value(status).unwrap(), "a")
    }

    #[test]
    fn a_claim_is_gone_only_by_the_api_servers_own_word() {
        let word = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound",
            "details": {"group": "resource.k8s.io", "kind": "resourceclaims", "name": "a"},
        });
        assert!(gone(word.clone()));
        for (field, other) in [
            ("/code", json!(410)),
            ("/reason", json!("Failed to parse error data")),
            ("/details/kind", json!("namespaces")),
            ("/details/group", json!("")),
            ("/details/name", json!("b")),
            ("/details", Value::Null),
        ] {
            let mut status = word.clone();
            *status.pointer_mut(field).unwrap() = other;
            assert!(!gone(status), "{field}");
        }
    }
}
