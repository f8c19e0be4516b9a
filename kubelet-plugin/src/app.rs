//! Starts, runs and stops the plugin.
//!
//! ```text
//!  lock ─► install ─► journal ─► sweep ─► DRA socket ─► registration socket ─► SIGTERM
//!                                            │                                   └─► drain, remove sockets
//!                                            └─► concurrently: driver, GpuNode, orphans, HTTP
//! ```

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use kube::{Client, Config};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{error, info, warn};
use tranche_api::names;
use tranche_driver::providers::Verdict;
use tranche_node::containers::Containers;
use tranche_node::nvml::search::InstalledDriver;
use tranche_node::nvml::{Gate, Gated, Patient};
use tranche_node::usage::Reader;
use tranche_node::vfio::{Groups, Vfio};
use tranche_serving::Clock;
use tranche_serving::access::Access;
use tranche_serving::stop::on_signal;

use crate::args::Args;
use crate::claim::dra::DraService;
use crate::claim::executor::Executor;
use crate::claim::orphans::{OrphanSearch, suspicions};
use crate::claim::preparer::{Parts, Preparer, Reporter};
use crate::claim::reporter::ClusterReporter;
use crate::cluster::claims::Claims;
use crate::cluster::competing_drivers::{CompetingDriverSearch, Places};
use crate::cluster::events::Events;
use crate::cluster::gpu_node::{GpuNodeWriter, Sources};
use crate::cluster::node_policy::NodePolicy;
use crate::cluster::status::StatusWriter;
use crate::gpu::context_sizes::Contexts;
use crate::gpu::driver_state::{DriverState, Observer, SpecFile};
use crate::gpu::gpus::{Gpus, Hardware, OPEN_PATIENCE};
use crate::gpu::records::GpuRecords;
use crate::host::fs::{Fs, HostFs};
use crate::host::install::{self, Installation, is_noexec};
use crate::host::layout::Layout;
use crate::http::health::{self, Health};
use crate::http::{self, Scrape};
use crate::kubelet::pod_resources::PodResources;
use crate::kubelet::proto::dra::dra_plugin_server::DraPluginServer;
use crate::kubelet::proto::pluginregistration::registration_server::RegistrationServer;
use crate::kubelet::registration::{Registered, RegistrationService};
use crate::kubelet::sockets::Socket;
use crate::ledger::Ledger;
use crate::ledger::audit;
use crate::ledger::journal::MayHold;
use crate::metrics::Metrics;
use crate::share::compute::ShareSampler;
use crate::share::last_findings::LastFindings;
use crate::share::sweep::ShareSweeper;
use crate::share::usage::{self, Usage};
use crate::share::watchdog::{self, Watchdog};

/// How long helpers may take to end. Calls of a driver that hangs never return, and the next instance must not wait for them: no
/// claim of the node is prepared until it serves.
const HELPERS_END: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT, or until a server fails.
#[expect(clippy::too_many_lines, reason = "the one place where the parts meet")]
pub async fn run(args: Args) -> anyhow::Result<()> {
    let layout = with_usable_hooks(Layout::of(&args))?;
    let Args {
        node_name,
        host_root,
        driver_root,
        image_lib_dir,
        registry_dir,
        device_plugins_dir,
        pod_resources_socket,
        http_endpoint,
        metrics_endpoint,
        proc,
        sysfs,
        audit_files,
        describe_seconds,
        // Used for the layout, or by main.
        plugin_dir: _,
        hook_dir: _,
        run_dir: _,
        cdi_dir: _,
        log_format: _,
    } = args;
    let stop = on_signal().context("cannot wait for SIGTERM and SIGINT")?;
    let fs: Arc<dyn Fs> = Arc::new(HostFs);
    fs.create_dir(&layout.plugin)?;
    let Some(_lock) = lock(layout.lock(), &stop).await? else {
        return Ok(());
    };

    let client = client().await?;
    let metrics = Arc::new(Metrics::default());
    let (registered_tx, registered) = watch::channel(Registered::default());
    let (driver_tx, driver) = watch::channel(DriverState::default());
    let (others_tx, others) = watch::channel(None);
    let (policy_tx, policy) = watch::channel(NodePolicy::default());
    let (suspect_orphans, suspicions) = suspicions();
    let last_findings = Arc::new(LastFindings::default());
    let contexts = Arc::new(Contexts::load(Arc::clone(&fs), &layout));
    let spec_file = Arc::new(SpecFile::new(Arc::clone(&fs), &layout));
    let reporter: Arc<dyn Reporter> = Arc::new(ClusterReporter {
        status: StatusWriter::new(client.clone(), Clock::system()),
        events: Events::new(client.clone(), &node_name),
    });
    let installed = InstalledDriver::new(&host_root, driver_root.folder());
    let audit = audit::Place {
        folder: layout.audit(),
        node: node_name.clone(),
        limits: audit::Limits::of(audit_files),
        clock: Clock::system(),
    };
    let executor = Executor::new(Arc::clone(&fs), layout.clone(), audit)?;
    let ledger = Arc::new(recover(&*fs, &layout, &executor)?);
    let gate = Gate::default();
    let groups: Arc<dyn Groups> = Arc::new(Vfio::new(&sysfs, host_root.join("dev"), &proc));
    let gpus = Arc::new(Gpus::new(
        GpuRecords::open(Arc::clone(&fs), layout.gpus())?,
        Arc::clone(&ledger),
        Hardware {
            nvml: Box::new(installed.clone()),
            daemons: Box::new(tranche_mps::client::Client::new(&layout.mps())),
            groups: Arc::clone(&groups),
            gate: gate.clone(),
            open_patience: OPEN_PATIENCE,
            proc: proc.clone(),
        },
        driver.clone(),
    ));
    let preparer = preparer(
        Arc::clone(&fs),
        &layout,
        &proc,
        executor,
        ledger,
        Arc::clone(&gpus),
        Arc::clone(&spec_file),
        &node_name,
        &image_lib_dir,
        client.clone(),
        driver.clone(),
        others.clone(),
        policy.clone(),
        Arc::clone(&metrics),
        suspect_orphans,
        Arc::clone(&last_findings),
        Arc::clone(&reporter),
    );

    // After the installation, which adds one and may remove others.
    let shims = install::shims(&*fs, &layout.libraries())?;

    // The DRA service first: the kubelet may call as soon as it knows the plugin.
    let (dra_socket, dra_incoming) = Socket::listen(&layout.dra_socket())?;
    let (registration_socket, registration_incoming) =
        Socket::listen(&layout.registration_socket())?;
    let http = TcpListener::bind(http_endpoint)
        .await
        .with_context(|| format!("cannot listen on --http-endpoint {http_endpoint}"))?;
    let https = TcpListener::bind(metrics_endpoint)
        .await
        .with_context(|| format!("cannot listen on --metrics-endpoint {metrics_endpoint}"))?;

    let observer = Observer {
        driver: Box::new(Patient::new(Box::new(installed.clone()), gate.clone())),
        sysfs,
        groups,
        spec_file,
        layout: layout.clone(),
        shims,
        contexts: Arc::clone(&contexts),
        records: gpus.records().clone(),
        known_gpus: Mutex::default(),
        refresh: Duration::from_secs(describe_seconds),
    };
    let dra = DraService::new(Arc::clone(&preparer), Arc::clone(&metrics));
    let endpoint = layout.dra_socket().to_string_lossy().into_owned();
    let registration = RegistrationService::new(endpoint, registered_tx);
    let health = Health {
        registration_socket: layout.registration_socket(),
        dra_socket: layout.dra_socket(),
        registered: registered.clone(),
    };
    let kept = || Box::new(Gated::new(Box::new(installed.clone()), gate.clone()));
    let usage = usage::Parts {
        node: node_name.clone(),
        ledger: Arc::clone(preparer.ledger()),
        layout: layout.clone(),
        state: driver.clone(),
        last_findings: Arc::clone(&last_findings),
        kubelet: Box::new(PodResources::new(pod_resources_socket.clone())),
    };
    let usage = Arc::new(Usage::new(usage, Reader::new(kept())));
    let scrape = Scrape {
        driver: driver.clone(),
        metrics: Arc::clone(&metrics),
        ledger: Arc::clone(preparer.ledger()),
        layout: layout.clone(),
        last_findings: Arc::clone(&last_findings),
        usage: Arc::clone(&usage),
    };

    // Helpers run until the servers have drained, because a last Prepare needs them.
    let helpers_stop = CancellationToken::new();
    let mut helpers = JoinSet::new();
    let watched = watchdog::Parts {
        ledger: Arc::clone(preparer.ledger()),
        layout: layout.clone(),
        policy,
        state: driver.clone(),
        contexts,
        events: Events::new(client.clone(), &node_name),
        metrics: Arc::clone(&metrics),
        last_findings,
    };
    let watchdog = Watchdog::new(watched, Arc::clone(&fs), kept(), proc.clone());
    let unowned = watchdog.unowned();
    helpers.spawn(watchdog.run(helpers_stop.clone()));
    let access = Access::new(client.clone());
    let orphans = OrphanSearch {
        preparer: Arc::clone(&preparer),
        claims: Claims::new(client.clone()),
        kubelet: Box::new(PodResources::new(pod_resources_socket.clone())),
        reporter,
        metrics: Arc::clone(&metrics),
    };
    let sampler = ShareSampler::new(
        Arc::clone(preparer.ledger()),
        layout.clone(),
        kept(),
        proc,
        Arc::clone(&metrics),
    );
    helpers.spawn(sampler.run(helpers_stop.clone()));
    helpers.spawn(usage.run(helpers_stop.clone()));
    let sweeper = ShareSweeper::new(Arc::clone(preparer.ledger()), layout, Arc::clone(&metrics));
    helpers.spawn(sweeper.run(helpers_stop.clone()));
    helpers.spawn(observer.run(driver_tx, helpers_stop.clone()));
    let (daemons_tx, daemons) = watch::channel(Vec::new());
    helpers.spawn(Arc::clone(&gpus).watch_daemons(daemons_tx, helpers_stop.clone()));
    helpers.spawn(gpus.settle(helpers_stop.clone()));
    let refused = orphans.preparer.ledger().watch_refused();
    let places = Places {
        device_plugins: device_plugins_dir,
        registry: registry_dir,
        pod_resources: pod_resources_socket,
    };
    let search = CompetingDriverSearch::new(places, client.clone(), node_name.clone());
    let sources = Sources {
        driver: driver.clone(),
        others,
        unowned,
        daemons,
        registered,
        refused,
    };
    let gpu_node = GpuNodeWriter::new(
        client.clone(),
        node_name.clone(),
        Events::new(client, &node_name),
        Clock::system(),
        metrics,
    );
    helpers.spawn(search.run(driver, others_tx, helpers_stop.clone()));
    helpers.spawn(gpu_node.run(sources, policy_tx, helpers_stop.clone()));
    helpers.spawn(orphans.run(suspicions, helpers_stop.clone()));
    helpers.spawn(serve_http(http, health, helpers_stop.clone()));
    helpers.spawn(serve_metrics(https, access, scrape, helpers_stop.clone()));

    info!(
        node = node_name,
        version = env!("CARGO_PKG_VERSION"),
        "serving"
    );
    let served = serve(
        dra,
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
    served.context("a gRPC server failed")?;
    info!("stopped; prepared claims stay");
    Ok(())
}

/// Serves both until the signal to stop, and finishes open calls. If one fails, the other ends too:
/// half a plugin would look alive to the kubelet.
async fn serve(
    dra: DraService,
    dra_incoming: UnixListenerStream,
    registration: RegistrationService,
    registration_incoming: UnixListenerStream,
    stop: &CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let dra = Server::builder()
        .add_service(DraPluginServer::new(dra))
        .serve_with_incoming_shutdown(dra_incoming, stop.clone().cancelled_owned());
    let registration = Server::builder()
        .add_service(RegistrationServer::new(registration))
        .serve_with_incoming_shutdown(registration_incoming, stop.clone().cancelled_owned());
    tokio::try_join!(dra, registration).map(drop)
}

async fn serve_metrics(
    listener: TcpListener,
    access: Access,
    scrape: Scrape,
    stop: CancellationToken,
) {
    if let Err(error) =
        tranche_serving::server::serve(listener, access, http::router(scrape), stop).await
    {
        error!(%error, "metrics are not served");
    }
}

async fn serve_http(listener: TcpListener, health: Health, stop: CancellationToken) {
    let server = axum::serve(listener, health::router(health));
    if let Err(error) = server.with_graceful_shutdown(stop.cancelled_owned()).await {
        error!(%error, "HTTP server failed");
    }
}

/// The claims of the journal. Removes what earlier runs left without one.
fn recover(fs: &dyn Fs, layout: &Layout, executor: &Executor) -> anyhow::Result<Ledger> {
    let loaded = executor.recover()?;
    // A claim whose journal cannot be read may use any of them.
    if loaded.refused.is_empty() {
        let in_use = loaded.records.iter().map(|record| record.plan.pages);
        install::remove_unused(fs, &layout.libraries(), &in_use.collect())?;
    }
    for (uid, error) in &loaded.refused {
        match error.may_hold() {
            MayHold::Gpus(gpus) => {
                error!(%error, uid, ?gpus, "a claim's journal cannot be read; the claim is refused, and its GPUs count as taken, until it can");
            }
            MayHold::Any => {
                error!(%error, uid, "a claim's journal cannot be read; the claim is refused, and all GPUs of the node count as taken, until it can");
            }
        }
    }
    Ok(Ledger::new(loaded))
}

#[expect(
    clippy::too_many_arguments,
    reason = "the one place where the parts meet"
)]
fn preparer(
    fs: Arc<dyn Fs>,
    layout: &Layout,
    proc: &Path,
    executor: Executor,
    ledger: Arc<Ledger>,
    gpus: Arc<Gpus>,
    spec_file: Arc<SpecFile>,
    node: &str,
    image: &Path,
    client: Client,
    driver: watch::Receiver<DriverState>,
    others: watch::Receiver<Option<Verdict>>,
    policy: watch::Receiver<NodePolicy>,
    metrics: Arc<Metrics>,
    suspect_orphans: mpsc::Sender<String>,
    last_findings: Arc<LastFindings>,
    reporter: Arc<dyn Reporter>,
) -> Arc<Preparer> {
    let installation = Installation::install(fs, image, &layout.libraries(), &layout.hooks);
    if let Err(error) = &installation {
        error!(%error, "claims will be refused: files that their containers need are not installed");
    }
    Preparer::new(Parts {
        pool: names::pool(node),
        spec_file,
        executor,
        gpus,
        installation,
        driver,
        others,
        policy,
        claims: Claims::new(client),
        ledger,
        reporter,
        metrics,
        last_findings,
        layout: layout.clone(),
        containers: Containers::new(proc.to_owned()),
        suspect_orphans,
    })
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
