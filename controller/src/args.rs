//! The command line, and how the parts are wired.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use kube::{Client, Config};
use tokio_util::sync::CancellationToken;
use tranche_node_usage::{Plugins, Reader};
use tranche_serving::access::Access;
use tranche_serving::stop::on_signal;
use tranche_serving::{Clock, LogFormat, log};

use crate::apply::Executor;
use crate::controller::{Controller, REQUESTS_PER_SECOND};
use crate::feed::Feed;
use crate::http::{self, Health};
use crate::idle::{Allowed, Asked, Idle};
use crate::leader::{self, Election};
use crate::metrics::Metrics;
use crate::pending;

/// Publishes the ResourceSlices of every GPU node from its GpuNode and the cluster's SharingPolicies.
#[derive(Debug, Parser)]
#[command(name = "tranche-controller", version)]
pub struct Args {
    /// Where /healthz and /readyz are served, without authorization.
    #[arg(long, env = "HTTP_ENDPOINT", default_value = "[::]:8086")]
    http_endpoint: SocketAddr,

    /// Where /metrics is served over TLS, to readers whom the API server allows to get that path.
    #[arg(long, env = "METRICS_ENDPOINT", default_value = "[::]:8443")]
    metrics_endpoint: SocketAddr,

    /// The token for the node plugins, which tell which claims are idle: a projected ServiceAccount token for the audience metrics.gpu.tranche.dev.
    #[arg(
        long,
        env = "USAGE_TOKEN",
        default_value = "/var/run/secrets/gpu.tranche.dev/metrics/token"
    )]
    usage_token: PathBuf,

    /// The lease that decides which replica writes.
    #[arg(long, env = "LEASE_NAME", default_value = "tranche-controller")]
    lease_name: String,

    /// Seconds after which another replica writes if the one that leads says nothing.
    #[arg(long, env = "LEASE_DURATION", default_value_t = leader::DURATION.as_secs(), value_parser = clap::value_parser!(u64).range(3..=300))]
    lease_duration: u64,

    /// The namespace of the lease and of the node plugins' pods.
    #[arg(long, env = "POD_NAMESPACE", default_value = "tranche-system")]
    namespace: String,

    /// This replica's unique name in the lease.
    #[arg(long, env = "POD_NAME")]
    identity: String,

    /// Requests a second that changes of many nodes at once, by a SharingPolicy, may make.
    #[arg(long, env = "POLICY_REQUESTS_PER_SECOND", default_value_t = REQUESTS_PER_SECOND)]
    policy_requests_per_second: u32,

    /// Watch the cluster's pending pods, to count those that wait for claims of our classes.
    #[arg(long, env = "WATCH_PENDING_PODS", default_value_t = false)]
    watch_pending_pods: bool,

    /// What is done about idle claims where a SharingPolicy asks for it: they are named, or their pods are evicted, too.
    #[arg(long, env = "IDLE_CLAIMS", value_enum, default_value_t = Allowed::Off)]
    idle_claims: Allowed,

    /// Format of log lines; RUST_LOG sets what is logged (default info).
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

impl Args {
    /// Runs the controller until SIGTERM or SIGINT.
    pub async fn run(self) -> anyhow::Result<()> {
        let Self {
            http_endpoint,
            metrics_endpoint,
            usage_token,
            lease_name,
            lease_duration,
            namespace,
            identity,
            policy_requests_per_second,
            watch_pending_pods,
            idle_claims,
            log_format,
        } = self;
        log::start(log_format).context("RUST_LOG")?;

        let mut config = Config::infer().await.context("find the API server")?;
        // A repeated create looks like one of another writer, and the client's back-off exceeds every
        // deadline here.
        config.default_retry = false;
        let client = Client::try_from(config).context("connect to the API server")?;

        let stop = on_signal().context("wait for SIGTERM and SIGINT")?;
        let (metrics, health) = (Metrics::default(), Health::default());
        let (election, leadership) = Election::new(
            client.clone(),
            &namespace,
            &lease_name,
            &identity,
            Duration::from_secs(lease_duration),
        );
        let executor = Executor::new(
            client.clone(),
            &namespace,
            identity,
            leadership.clone(),
            Clock::system(),
            metrics.clone(),
        );
        let feed = Feed::start(&client, &metrics);
        let asked = Asked::new(idle_claims);
        if idle_claims != Allowed::Off {
            let plugins = Plugins::follow(client.clone(), &namespace);
            let reader = Reader::https(plugins, usage_token);
            let idle = Idle::new(
                client.clone(),
                executor.clone(),
                asked.clone(),
                reader.context("the client of the node plugins")?,
                leadership.clone(),
                metrics.clone(),
            );
            tokio::spawn(idle.run(stop.clone()));
        }
        let controller = Controller::new(
            executor,
            feed,
            leadership,
            metrics.clone(),
            health.clone(),
            policy_requests_per_second,
            asked,
        );

        if watch_pending_pods {
            tokio::spawn(pending::watch(
                client.clone(),
                metrics.clone(),
                stop.clone(),
            ));
        }

        let access = Access::new(client.clone());
        let (health_stop, metrics_stop) = (stop.clone(), stop.clone());
        let served = tokio::spawn(async move {
            let health = async {
                http::serve(http_endpoint, health, health_stop)
                    .await
                    .with_context(|| format!("serve {http_endpoint}"))
            };
            let metrics = async {
                http::serve_metrics(metrics_endpoint, access, metrics, metrics_stop)
                    .await
                    .with_context(|| format!("serve {metrics_endpoint}"))
            };
            tokio::try_join!(health, metrics).map(drop)
        });
        let failed = stop.clone();
        let served = tokio::spawn(async move {
            let result = served.await;
            failed.cancel();
            result
        });
        // The lease is released when no write is in progress.
        let written = CancellationToken::new();
        let elected = tokio::spawn(election.run(written.clone()));
        controller.run(stop).await;
        written.cancel();
        elected.await.context("election")?;
        served.await.context("server")?.context("server")?
    }
}
