//! Starts, runs and stops the plugin.
//!
//! ```text
//!  lock ─► install ─► journal ─► sweep ─► DRA socket ─► registration socket ─► SIGTERM
//!                                            │                                   └─► drain, remove sockets
//!                                            └─► concurrently: driver, GpuNode, orphans, HTTP
//! ```

mod node;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kube::{Client, Config};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};
use tranche_serving::stop::on_signal;

use self::node::{Endpoints, Node};
use crate::args::Args;
use crate::claim::dra::DraService;
use crate::health::stream::HealthService;
use crate::host::fs::{Fs, HostFs};
use crate::host::install::{self, is_noexec};
use crate::host::layout::Layout;
use crate::kubelet::proto::dra::dra_plugin_server::DraPluginServer;
use crate::kubelet::proto::dra_health::{v1, v1alpha1};
use crate::kubelet::proto::pluginregistration::registration_server::RegistrationServer;
use crate::kubelet::registration::RegistrationService;
use crate::kubelet::sockets::Socket;

/// Two threads: most of the work is waiting for disk and API server, and every thread takes memory.
const THREADS: usize = 2;

/// More than are ever busy: those for the files of claims ([`crate::claim::preparer`]), one for each GPU whose state is changed, of
/// which a node has 16, and one for each periodic task.
const BLOCKING_THREADS: usize = 64;

/// Shorter than the time in which the periodic tasks use all threads in turn, so that idle threads
/// end.
const IDLE: Duration = Duration::from_secs(1);

/// How long helpers may take to end. Calls of a driver that hangs never return, and the next instance must not wait for them: no
/// claim of the node is prepared until it serves.
const HELPERS_END: Duration = Duration::from_secs(5);

/// How long the end waits for the audit trail's disk.
const AUDIT_END: Duration = Duration::from_secs(2);

/// The runtime of the plugin.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(IDLE)
        .enable_all()
        .build()
}

/// Runs until SIGTERM or SIGINT, or until a server fails.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let layout = with_usable_hooks(Layout::of(&args))?;
    let stop = on_signal().context("cannot wait for SIGTERM and SIGINT")?;
    let fs: Arc<dyn Fs> = Arc::new(HostFs);
    fs.create_dir(&layout.plugin)?;
    let Some(_lock) = lock(layout.lock(), &stop).await? else {
        return Ok(());
    };

    let (node, senders) = Node::new(args, layout, fs, client().await?);
    let claims = node.claims()?;
    // The installation has added a shim and may have removed others.
    let shims = install::shims(&*node.fs, &node.layout.libraries())?;

    // The DRA service first: the kubelet may call as soon as it knows the plugin.
    let (dra_socket, dra_incoming) = Socket::listen(&node.layout.dra_socket())?;
    let (registration_socket, registration_incoming) =
        Socket::listen(&node.layout.registration_socket())?;
    let endpoints = Endpoints::bind(&node.args).await?;
    let dra = DraService::new(Arc::clone(&claims.preparer), Arc::clone(&node.metrics));
    let endpoint = node.layout.dra_socket().to_string_lossy().into_owned();
    // Its streams never end by themselves, and the servers wait for them.
    let health = node.health_service(&claims, &stop);
    let registration = RegistrationService::new(endpoint, senders.registered);

    // Helpers run until the servers have drained, because a last Prepare needs them.
    let helpers_stop = CancellationToken::new();
    let mut helpers = JoinSet::new();
    let audit = Arc::clone(&claims.audit);
    let usage = node.usage(&claims);
    node.serve_http(&claims, &usage, endpoints, &mut helpers, &helpers_stop);
    let unowned = node.watch_shares(&claims, usage, &mut helpers, &helpers_stop);
    let daemons = node.watch_gpus(&claims, shims, senders.driver, &mut helpers, &helpers_stop);
    let sources = node.sources(&claims, unowned, daemons);
    node.watch_cluster(
        sources,
        senders.others,
        senders.policy,
        &mut helpers,
        &helpers_stop,
    );
    node.watch_health(&claims, &mut helpers, &helpers_stop);
    node.look_after_claims(claims, &mut helpers, &helpers_stop);

    info!(
        node = node.args.node_name,
        version = env!("CARGO_PKG_VERSION"),
        "serving"
    );
    let served = serve(
        dra,
        health,
        dra_incoming,
        registration,
        registration_incoming,
        &stop,
    )
    .await;
    drop((dra_socket, registration_socket));
    helpers_stop.cancel();
    if tokio::time::timeout(HELPERS_END, helpers.join_all())
        .await
        .is_err()
    {
        warn!(
            "a call of the driver or of the API server does not return; it ends with the process"
        );
    }
    audit.flush(AUDIT_END);
    served.context("a gRPC server failed")?;
    info!("stopped; prepared claims stay");
    Ok(())
}

/// Serves both until the signal to stop, and finishes open calls. If one fails, the other ends too:
/// half a plugin would look alive to the kubelet.
async fn serve(
    dra: DraService,
    health: HealthService,
    dra_incoming: UnixListenerStream,
    registration: RegistrationService,
    registration_incoming: UnixListenerStream,
    stop: &CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let dra = Server::builder()
        .add_service(DraPluginServer::new(dra))
        .add_service(v1::dra_resource_health_server::DraResourceHealthServer::new(health.clone()))
        .add_service(v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(health))
        .serve_with_incoming_shutdown(dra_incoming, stop.clone().cancelled_owned());
    let registration = Server::builder()
        .add_service(RegistrationServer::new(registration))
        .serve_with_incoming_shutdown(registration_incoming, stop.clone().cancelled_owned());
    tokio::try_join!(dra, registration).map(drop)
}

/// A client without retries: a hidden retry would exceed the kubelet's deadline.
async fn client() -> anyhow::Result<Client> {
    let mut config = Config::infer().await.context(
        "no configuration for the API server: run in a pod with a service account, or set KUBECONFIG",
    )?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Waits for the node's lock, which the previous instance holds until it has drained. `None` if it
/// is told to stop meanwhile.
async fn lock(path: PathBuf, stop: &CancellationToken) -> anyhow::Result<Option<std::fs::File>> {
    let file = std::fs::File::create(&path)
        .with_context(|| format!("cannot open the node's lock {}", path.display()))?;
    let locked = tokio::task::spawn_blocking(move || {
        if file.try_lock().is_err() {
            info!(path = %path.display(), "waiting for the other instance on this node to end");
            file.lock()?;
        }
        Ok::<_, std::io::Error>(file)
    });
    tokio::select! {
        file = locked => Ok(Some(file?.context("cannot lock the node")?)),
        () = stop.cancelled() => Ok(None),
    }
}

/// The layout, with hooks in a folder from which they can be executed.
fn with_usable_hooks(layout: Layout) -> anyhow::Result<Layout> {
    let folder = &layout.hooks;
    let noexec = std::fs::create_dir_all(folder).and_then(|()| is_noexec(folder));
    if !noexec.with_context(|| format!("--hook-dir {}", folder.display()))? {
        return Ok(layout);
    }
    let instead = layout.libraries();
    warn!(
        folder = %folder.display(),
        instead = %instead.display(),
        "nothing can be executed on this file system (noexec), the container hook goes to the plugin's folder instead; \
         pods with `hostUsers: false` cannot reach it: set the chart's value nodePlugin.hookDir to a folder that every \
         user can reach"
    );
    Ok(Layout {
        hooks: instead,
        ..layout
    })
}
