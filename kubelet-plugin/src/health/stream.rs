//! Streams the health of the devices that claims hold to the kubelet, which writes it into the status of their pods
//! (KEP-4680).

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status as Refusal};
use tranche_driver::health::Status;

use super::Board;
use crate::kubelet::proto::dra_health::{v1, v1alpha1};
use crate::ledger::Ledger;
use crate::share::usage::unix;

/// How often it is looked for changes.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often the kubelet gets the same report again.
const REPEAT: Duration = Duration::from_secs(10);
/// After this time without a report the kubelet takes the health for unknown.
const TIMEOUT_SECONDS: i64 = 30;
/// The most characters of a message.
const LONGEST: usize = 1024;

/// Answers both versions of the service.
#[derive(Clone, Debug)]
pub struct HealthService {
    pub ledger: Arc<Ledger>,
    pub board: Arc<Board>,
    /// Ends the streams.
    pub stop: CancellationToken,
}

/// The health and the message of each device, by pool and device.
type Report = BTreeMap<(String, String), (Status, String)>;

/// What a stream has sent, and when.
struct Sent {
    service: HealthService,
    ticks: Interval,
    last: Option<(Instant, Report)>,
}

impl HealthService {
    fn report(&self) -> Report {
        let verdicts = self.board.now();
        let held = self.ledger.held();
        let devices = held.iter().flat_map(|record| &record.plan.devices);
        let report = devices.map(|device| {
            let verdict = verdicts.as_ref().and_then(|it| it.get(&device.gpu_uuid));
            let health = match verdict {
                Some(verdict) => (verdict.status, cut(&verdict.message)),
                None => (Status::Unknown, "the GPU is not watched".to_owned()),
            };
            ((device.pool.clone(), device.device.clone()), health)
        });
        report.collect()
    }

    /// Each report, when it is new, and every few seconds.
    fn reports(self) -> impl Stream<Item = Report> {
        let stop = self.stop.clone();
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let start = Sent {
            service: self,
            ticks,
            last: None,
        };
        let reports = stream::unfold(start, async |mut sent| {
            loop {
                sent.ticks.tick().await;
                let (now, report) = (Instant::now(), sent.service.report());
                let is_due = sent.last.as_ref().is_none_or(|(at, last)| {
                    *last != report || !report.is_empty() && now - *at >= REPEAT
                });
                if is_due {
                    sent.last = Some((now, report.clone()));
                    return Some((report, sent));
                }
            }
        });
        futures::StreamExt::take_until(reports, stop.cancelled_owned())
    }
}

fn cut(message: &str) -> String {
    message.chars().take(LONGEST).collect()
}

fn now() -> i64 {
    i64::try_from(unix().as_secs()).unwrap_or(i64::MAX)
}

macro_rules! serve {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for HealthService {
            type NodeWatchResourcesStream = Pin<
                Box<
                    dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Refusal>> + Send,
                >,
            >;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Refusal> {
                let response = |report: Report| {
                    let device = |((pool_name, device_name), (status, message))| {
                        let health = match status {
                            Status::Healthy => $version::HealthStatus::Healthy,
                            Status::Unhealthy => $version::HealthStatus::Unhealthy,
                            Status::Unknown => $version::HealthStatus::Unknown,
                        };
                        $version::DeviceHealth {
                            device: Some($version::DeviceIdentifier {
                                pool_name,
                                device_name,
                            }),
                            health: health.into(),
                            last_updated_time: now(),
                            health_check_timeout_seconds: TIMEOUT_SECONDS,
                            message,
                        }
                    };
                    let devices = report.into_iter().map(device).collect();
                    Ok($version::NodeWatchResourcesResponse { devices })
                };
                let reports = futures::StreamExt::map(self.clone().reports(), response);
                Ok(Response::new(Box::pin(reports)))
            }
        }
    };
}

serve!(v1);
serve!(v1alpha1);
