//! The command line, and how the parts are wired.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use kube::{Client, Config};
use tranche_node_usage::{Plugins, Reader};
use tranche_serving::access::Access;
use tranche_serving::stop::on_signal;
use tranche_serving::{LogFormat, log};

use crate::claims::Claims;
use crate::health::{self, Health};
use crate::nodes::Nodes;
use crate::server::{self, Usage};
use crate::trust;

/// Serves usage.gpu.tranche.dev to the API server: what nodes and claims use of their GPUs.
#[derive(Debug, Parser)]
#[command(name = "tranche-usage-api", version)]
pub struct Args {
    /// Where the API is served over TLS, to the API server only.
    #[arg(long, env = "USAGE_ENDPOINT", default_value = "[::]:10250")]
    endpoint: SocketAddr,

    /// Where /healthz and /readyz are served, without authorization.
    #[arg(long, env = "HTTP_ENDPOINT", default_value = "[::]:8086")]
    http_endpoint: SocketAddr,

    /// The token for the node plugins: a projected ServiceAccount token for the audience metrics.gpu.tranche.dev.
    #[arg(
        long,
        env = "USAGE_TOKEN",
        default_value = "/var/run/secrets/gpu.tranche.dev/metrics/token"
    )]
    usage_token: PathBuf,

    /// The namespace of the node plugins' pods.
    #[arg(long, env = "POD_NAMESPACE", default_value = "tranche-system")]
    namespace: String,

    /// Format of log lines; RUST_LOG sets what is logged (default info).
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

impl Args {
    /// Serves until SIGTERM or SIGINT.
    pub async fn run(self) -> anyhow::Result<()> {
        log::start(self.log_format).context("RUST_LOG")?;
        let config = Config::infer().await.context("find the API server")?;
        let client = Client::try_from(config).context("connect to the API server")?;
        let stop = on_signal().context("wait for SIGTERM and SIGINT")?;

        let plugins = Plugins::follow(client.clone(), &self.namespace);
        let reader =
            Reader::https(plugins, self.usage_token).context("the client of the node plugins")?;
        let nodes = Arc::new(Nodes::new(reader));
        let trust = trust::follow(client.clone());
        let health = Health {
            trust: Arc::clone(&trust),
            nodes: Arc::clone(&nodes),
        };
        let usage = Usage {
            trust,
            access: Access::new(client.clone()),
            claims: Claims::new(client, Arc::clone(&nodes)),
            nodes,
        };
        let served = async {
            server::serve(self.endpoint, usage, stop.clone())
                .await
                .with_context(|| format!("serve {}", self.endpoint))
        };
        let healthy = async {
            health::serve(self.http_endpoint, health, stop.clone())
                .await
                .with_context(|| format!("serve {}", self.http_endpoint))
        };
        tokio::try_join!(served, healthy).map(drop)
    }
}
