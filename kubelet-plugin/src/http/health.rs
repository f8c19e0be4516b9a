//! `/healthz` and `/readyz`, which are open.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::sync::watch;

use crate::kubelet::proto::dra::NodePrepareResourcesRequest;
use crate::kubelet::proto::dra::dra_plugin_client::DraPluginClient;
use crate::kubelet::proto::pluginregistration::InfoRequest;
use crate::kubelet::proto::pluginregistration::registration_client::RegistrationClient;
use crate::kubelet::registration::Registered;
use crate::kubelet::sockets::connect;

/// The time limit for the plugin's answer to itself; the kubelet allows GetInfo as much.
const DEADLINE: Duration = Duration::from_secs(1);

/// How long all threads for blocking work may be busy. A disk that is slow delays claims; one that does not answer stops them.
pub const STUCK: Duration = Duration::from_secs(20);

/// Whether there are threads for blocking work: a piece of work that does nothing waits for one. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct BlockingThreads(Arc<Mutex<Option<Instant>>>);

impl BlockingThreads {
    /// How long that work has waited. Starts the next one, if the last is done.
    fn waiting(&self) -> Duration {
        let mut since = self.since();
        if let Some(since) = *since {
            return since.elapsed();
        }
        *since = Some(Instant::now());
        let this = self.clone();
        tokio::task::spawn_blocking(move || *this.since() = None);
        Duration::ZERO
    }

    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the health checks need.
#[derive(Clone, Debug)]
pub struct Health {
    pub registration_socket: PathBuf,
    pub dra_socket: PathBuf,
    /// Whether the kubelet has registered the plugin.
    pub registered: watch::Receiver<Registered>,
    pub threads: BlockingThreads,
    /// How long they may be busy: [`STUCK`].
    pub patience: Duration,
}

pub fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(health)
}

/// Alive: both services answer on their sockets, as to the kubelet, and a Prepare would get a thread.
async fn healthz(State(health): State<Health>) -> (StatusCode, String) {
    let waiting = health.threads.waiting();
    if waiting > health.patience {
        let text = format!(
            "no claim can be prepared: no thread for blocking work has been free for {} s; see the kernel log (`dmesg`): a disk \
             or a driver may not answer\n",
            waiting.as_secs()
        );
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    let probe = async {
        let registration = connect(&health.registration_socket, "localhost").await;
        let channel = registration.map_err(|e| format!("registration socket: {e}"))?;
        let info = RegistrationClient::new(channel)
            .get_info(InfoRequest {})
            .await;
        info.map_err(|e| format!("GetInfo: {e}"))?;
        let dra = connect(&health.dra_socket, "localhost").await;
        let channel = dra.map_err(|e| format!("DRA socket: {e}"))?;
        let nothing = NodePrepareResourcesRequest { claims: Vec::new() };
        let prepared = DraPluginClient::new(channel)
            .node_prepare_resources(nothing)
            .await;
        prepared.map_err(|e| format!("NodePrepareResources: {e}"))?;
        Ok::<_, String>(())
    };
    match tokio::time::timeout(DEADLINE, probe).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n".into()),
        Ok(Err(e)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e}\n")),
        Err(_) => {
            let text = format!(
                "no answer on its own sockets within {} s\n",
                DEADLINE.as_secs()
            );
            (StatusCode::SERVICE_UNAVAILABLE, text)
        }
    }
}

/// Ready: the kubelet has registered the plugin. A node without a driver is ready too: its plugin releases
/// claims and reports on the GpuNode what is missing. Otherwise one such node would use up the DaemonSet's
/// `maxUnavailable` and block every rollout.
async fn readyz(State(health): State<Health>) -> (StatusCode, &'static str) {
    if health.registered.borrow().now {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the kubelet has not registered the plugin; see the kubelet's log\n",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sockets are missing, so that a plugin with free threads is not well either, for another reason.
    async fn problem(health: &Health) -> String {
        healthz(State(health.clone())).await.1
    }

    #[test]
    fn a_plugin_whose_threads_are_stuck_is_not_alive_until_one_is_free() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let health = Health {
                registration_socket: "/nowhere".into(),
                dra_socket: "/nowhere".into(),
                registered: watch::channel(Registered::default()).1,
                threads: BlockingThreads::default(),
                patience: Duration::ZERO,
            };
            let (go_on, told) = std::sync::mpsc::channel::<()>();
            let stuck = tokio::task::spawn_blocking(move || told.recv().unwrap_or_default());
            assert!(problem(&health).await.contains("registration socket"));
            assert!(problem(&health).await.contains("no thread"));
            drop(go_on);
            stuck.await.unwrap();
            while problem(&health).await.contains("no thread") {
                tokio::task::yield_now().await;
            }
        });
    }
}
