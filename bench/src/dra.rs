//! Calls the plugin on its DRA socket, as the kubelet does.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

#[allow(missing_docs, clippy::pedantic)]
mod proto {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

use proto::dra_plugin_client::DraPluginClient;
use proto::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};

/// A claim as the kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimId {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.name`.
    pub name: String,
}

impl ClaimId {
    fn wire(&self) -> Claim {
        Claim {
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            name: self.name.clone(),
        }
    }
}

/// A connection to the plugin. Clones share it, as all calls of the kubelet share one.
#[derive(Clone, Debug)]
pub struct Plugin {
    client: DraPluginClient<Channel>,
}

impl Plugin {
    /// Connects to the plugin's socket.
    pub async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let path: PathBuf = socket.to_owned();
        let connector = service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The connector ignores the address and uses the socket.
        let channel = Endpoint::from_static("http://plugin")
            .connect_with_connector(connector)
            .await
            .with_context(|| format!("the plugin's socket {}", socket.display()))?;
        Ok(Self {
            client: DraPluginClient::new(channel),
        })
    }

    /// `NodePrepareResources` of one claim; its error is an error.
    pub async fn prepare(&self, claim: &ClaimId) -> anyhow::Result<()> {
        let request = NodePrepareResourcesRequest {
            claims: vec![claim.wire()],
        };
        let mut answer = self
            .client
            .clone()
            .node_prepare_resources(request)
            .await?
            .into_inner();
        match answer.claims.remove(&claim.uid) {
            None => bail!("prepare {}: the answer does not name it", claim.name),
            Some(ready) if !ready.error.is_empty() => {
                bail!("prepare {}: {}", claim.name, ready.error)
            }
            Some(ready) if ready.devices.is_empty() => bail!("prepare {}: no device", claim.name),
            Some(_) => Ok(()),
        }
    }

    /// `NodeUnprepareResources` of one claim; its error is an error.
    pub async fn unprepare(&self, claim: &ClaimId) -> anyhow::Result<()> {
        let request = NodeUnprepareResourcesRequest {
            claims: vec![claim.wire()],
        };
        let mut answer = self
            .client
            .clone()
            .node_unprepare_resources(request)
            .await?
            .into_inner();
        match answer.claims.remove(&claim.uid) {
            None => bail!("unprepare {}: the answer does not name it", claim.name),
            Some(done) if !done.error.is_empty() => {
                bail!("unprepare {}: {}", claim.name, done.error)
            }
            Some(_) => Ok(()),
        }
    }
}
