//! ResourceClaims as the API server has them now.

use std::fmt;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use crate::api_server::{Silent, within};

/// How long to wait before a connection that broke is tried again. The kubelet itself asks again only
/// after a minute or more.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(800),
];

/// A claim as the kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why a claim could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The API server refused or could not be reached.
    #[error("cannot read it from the API server: {0}")]
    Api(#[source] Box<kube::Error>),
    /// The API server did not answer.
    #[error(transparent)]
    Silent(#[from] Silent),
}

/// Reads claims, one at a time.
#[derive(Clone)]
pub struct Claims {
    client: Client,
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Claims")
    }
}

impl Claims {
    /// Reads with a client that does not retry by itself.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// The claim that has this namespace and name now, whatever its UID; `None` where there is none.
    pub async fn get(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, ReadError> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &claim.namespace);
        let read = async {
            for pause in PAUSES {
                match api.get_opt(&claim.name).await {
                    Err(kube::Error::Service(_) | kube::Error::HyperError(_)) => {
                        tokio::time::sleep(pause).await;
                    }
                    answer => return answer,
                }
            }
            api.get_opt(&claim.name).await
        };
        within(read).await?.map_err(|e| ReadError::Api(Box::new(e)))
    }
}
