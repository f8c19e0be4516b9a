//! The DRA service, which answers the kubelet's calls claim by claim.
//!
//! The claims of a call are handled concurrently and get separate answers; an error concerns only
//! its claim.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use futures::future::join_all;
use tonic::{Request, Response, Status};
use tracing::{Instrument, info_span};
use tranche_driver::journal::ClaimRecord;

use crate::claim::preparer::Preparer;
use crate::kubelet::proto::dra::dra_plugin_server::DraPlugin;
use crate::kubelet::proto::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::ledger::claim_ref::ClaimRef;
use crate::metrics::{Method, Metrics};

/// Answers on the DRA socket.
#[derive(Debug)]
pub struct DraService {
    preparer: Arc<Preparer>,
    metrics: Arc<Metrics>,
}

impl DraService {
    /// Uses `preparer`.
    #[must_use]
    pub fn new(preparer: Arc<Preparer>, metrics: Arc<Metrics>) -> Self {
        Self { preparer, metrics }
    }

    /// Runs `one` for all claims concurrently, each in its own span.
    async fn each<A, F: Future<Output = (A, &'static str)>>(
        &self,
        method: Method,
        claims: Vec<Claim>,
        one: impl Fn(ClaimRef) -> F,
    ) -> BTreeMap<String, A> {
        let span = info_span!("rpc", method = method.as_str());
        let answers = claims.into_iter().map(|claim| {
            let Claim {
                namespace,
                uid,
                name,
            } = claim;
            let span = info_span!(parent: &span, "claim", uid, namespace, name);
            let answer = one(ClaimRef {
                uid: uid.clone(),
                namespace,
                name,
            });
            async move {
                let start = Instant::now();
                let (answer, outcome) = answer.await;
                self.metrics.observe(method, outcome, start.elapsed());
                (uid, answer)
            }
            .instrument(span)
        });
        join_all(answers).await.into_iter().collect()
    }
}

#[tonic::async_trait]
impl DraPlugin for DraService {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let one = |claim: ClaimRef| async move {
            match self.preparer.prepare(&claim).await {
                Ok(record) => {
                    let devices = devices(&record);
                    let error = String::new();
                    (NodePrepareResourceResponse { devices, error }, "ok")
                }
                Err(e) => {
                    let (devices, error) = (Vec::new(), e.to_string());
                    (
                        NodePrepareResourceResponse { devices, error },
                        e.problem.outcome(),
                    )
                }
            }
        };
        let requested = request.into_inner().claims;
        let claims = self.each(Method::Prepare, requested, one).await;
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let one = |claim: ClaimRef| async move {
            match self.preparer.unprepare(&claim).await {
                Ok(()) => (NodeUnprepareResourceResponse::default(), "ok"),
                Err(e) => {
                    let error = e.to_string();
                    (NodeUnprepareResourceResponse { error }, e.problem.outcome())
                }
            }
        };
        let requested = request.into_inner().claims;
        let claims = self.each(Method::Unprepare, requested, one).await;
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

fn devices(record: &ClaimRecord) -> Vec<Device> {
    record
        .plan
        .devices
        .iter()
        .map(|device| Device {
            request_names: vec![device.request.clone()],
            pool_name: device.pool.clone(),
            device_name: device.device.clone(),
            cdi_device_ids: device.cdi_ids.clone(),
            share_id: device.share_id.clone(),
        })
        .collect()
}
