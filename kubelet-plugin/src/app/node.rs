//! The parts of the plugin, and what they share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::error;
use tranche_api::{WithheldGpu, names};
use tranche_driver::cdi::Shim;
use tranche_driver::competing_drivers::Verdict;
use tranche_node::health::{Watch, XidCounts};
use tranche_node::nvml::search::InstalledDriver;
use tranche_node::nvml::{Driver, Gate, Gated, Hangs, OF_SAMPLERS, Patient, Session};
use tranche_node::processes::containers::Containers;
use tranche_node::usage::Reader;
use tranche_node::vfio::{Groups, Vfio};
use tranche_serving::Clock;
use tranche_serving::access::Access;

use crate::args::Args;
use crate::claim::executor::Executor;
use crate::claim::orphans::{OrphanSearch, suspicions};
use crate::claim::preparer::{Preparer, PreparerParts, Reporter};
use crate::claim::reporter::ClusterReporter;
use crate::claim::restorer::Restorer;
use crate::cluster::claims::ClaimReader;
use crate::cluster::competing_drivers::{CompetingDriverSearch, SocketFolders};
use crate::cluster::cordon;
use crate::cluster::events::Events;
use crate::cluster::gpu_node::{GpuNodeWriter, Sources};
use crate::cluster::node_policy::NodePolicy;
use crate::cluster::status::StatusWriter;
use crate::gpu::context_sizes::Contexts;
use crate::gpu::driver_state::{DriverState, Observer, SpecFile};
use crate::gpu::gpus::{Gpus, Hardware, OPEN_PATIENCE};
use crate::gpu::load_pages::LoadPages;
use crate::gpu::records::GpuRecords;
use crate::health::Board;
use crate::health::check::CheckProgram;
use crate::health::monitor::{Monitor, MonitorParts};
use crate::health::report::HealthReporter;
use crate::health::stream::HealthService;
use crate::host::fs::Fs;
use crate::host::install::{self, Installation};
use crate::host::layout::Layout;
use crate::http::health::{self, BlockingThreads, Health};
use crate::http::{self, Scrape};
use crate::kubelet::pod_resources::{Kubelet, PodResources};
use crate::kubelet::registration::Registered;
use crate::ledger::Ledger;
use crate::ledger::audit::{self, Audit};
use crate::ledger::journal::MayHold;
use crate::metrics::Metrics;
use crate::share::compute::ShareSampler;
use crate::share::last_findings::LastFindings;
use crate::share::sweep::ShareSweeper;
use crate::share::usage::{self, Usage};
use crate::share::watchdog::{self, Watchdog};

/// The pause after a failed attempt to write the audit trail.
const AUDIT_RETRY: Duration = Duration::from_secs(10);

/// What several parts use.
pub(super) struct Node {
    pub args: Args,
    pub layout: Layout,
    pub fs: Arc<dyn Fs>,
    pub metrics: Arc<Metrics>,
    client: Client,
    last_findings: Arc<LastFindings>,
    contexts: Arc<Contexts>,
    spec_file: Arc<SpecFile>,
    installed: InstalledDriver,
    /// Which calls of the driver do not return.
    hangs: Hangs,
    /// The NVML that stays open.
    session: Session,
    gate: Gate,
    xids: XidCounts,
    board: Arc<Board>,
    groups: Arc<dyn Groups>,
    pods: Arc<dyn Kubelet>,
    reporter: Arc<dyn Reporter>,
    registered: watch::Receiver<Registered>,
    driver: watch::Receiver<DriverState>,
    others: watch::Receiver<Option<Verdict>>,
    policy: watch::Receiver<NodePolicy>,
}

/// The other ends of a [`Node`]'s receivers.
pub(super) struct Senders {
    pub registered: watch::Sender<Registered>,
    pub driver: watch::Sender<DriverState>,
    pub others: watch::Sender<Option<Verdict>>,
    pub policy: watch::Sender<NodePolicy>,
}

pub(super) struct Claims {
    pub preparer: Arc<Preparer>,
    pub audit: Arc<Audit>,
    ledger: Arc<Ledger>,
    gpus: Arc<Gpus>,
    suspicions: mpsc::Receiver<String>,
}

/// Where HTTP is served.
pub(super) struct Endpoints {
    health: TcpListener,
    metrics: TcpListener,
}

impl Endpoints {
    pub async fn bind(args: &Args) -> anyhow::Result<Self> {
        let (health, metrics) = (args.http_endpoint, args.metrics_endpoint);
        Ok(Self {
            health: tranche_serving::listen(health)
                .await
                .with_context(|| format!("cannot listen on --http-endpoint {health}"))?,
            metrics: tranche_serving::listen(metrics)
                .await
                .with_context(|| format!("cannot listen on --metrics-endpoint {metrics}"))?,
        })
    }
}

impl Node {
    pub fn new(args: Args, layout: Layout, fs: Arc<dyn Fs>, client: Client) -> (Self, Senders) {
        let (registered_tx, registered) = watch::channel(Registered::default());
        let (driver_tx, driver) = watch::channel(DriverState::default());
        let (others_tx, others) = watch::channel(None);
        let (policy_tx, policy) = watch::channel(NodePolicy::default());
        let dev = args.host_root.join("dev");
        let installed = InstalledDriver::new(&args.host_root, args.driver_root.folder());
        let hangs = Hangs::default();
        let node = Self {
            metrics: Arc::default(),
            last_findings: Arc::default(),
            contexts: Arc::new(Contexts::load(Arc::clone(&fs), &layout)),
            spec_file: Arc::new(SpecFile::new(Arc::clone(&fs), &layout)),
            session: Session::new(Arc::new(installed.clone()), &hangs).with_patience(OF_SAMPLERS),
            hangs,
            installed,
            gate: Gate::default(),
            xids: XidCounts::default(),
            board: Arc::default(),
            groups: Arc::new(Vfio::new(&args.sysfs, dev, &args.proc)),
            pods: Arc::new(PodResources::new(args.pod_resources_socket.clone())),
            reporter: Arc::new(ClusterReporter {
                status: StatusWriter::new(client.clone(), Clock::system()),
                events: Events::new(client.clone(), &args.node_name),
            }),
            args,
            layout,
            fs,
            client,
            registered,
            driver,
            others,
            policy,
        };
        let senders = Senders {
            registered: registered_tx,
            driver: driver_tx,
            others: others_tx,
            policy: policy_tx,
        };
        (node, senders)
    }

    /// Reads the journal, installs the files for containers, and makes the preparer of claims.
    pub fn claims(&self) -> anyhow::Result<Claims> {
        let settings = audit::TrailSettings {
            folder: self.layout.audit(),
            node: self.args.node_name.clone(),
            limits: audit::Limits::of(self.args.audit_files),
            retry: AUDIT_RETRY,
            clock: Clock::system(),
        };
        let trail = Audit::start(Arc::clone(&self.fs), settings, Arc::clone(&self.metrics));
        let audit = Arc::new(trail);
        let fs = Arc::clone(&self.fs);
        let executor = Executor::new(fs, self.layout.clone(), Arc::clone(&audit))?;
        let ledger = Arc::new(recover(&*self.fs, &self.layout, &executor)?);
        let boot = self.groups.boot().context("--proc")?;
        let gpus = Arc::new(Gpus::new(
            GpuRecords::open(Arc::clone(&self.fs), self.layout.gpus(), &boot)?,
            LoadPages::open(
                Arc::clone(&self.fs),
                self.layout.load(),
                Arc::clone(&ledger),
            )?,
            Arc::clone(&ledger),
            self.hardware(),
            self.driver.clone(),
        ));
        let (suspect_orphans, suspicions) = suspicions();
        let preparer = Preparer::new(PreparerParts {
            pool: names::pool(&self.args.node_name),
            spec_file: Arc::clone(&self.spec_file),
            executor,
            gpus: Arc::clone(&gpus),
            installation: self.install(),
            driver: self.driver.clone(),
            others: self.others.clone(),
            policy: self.policy.clone(),
            claims: ClaimReader::new(self.client.clone()),
            ledger: Arc::clone(&ledger),
            reporter: Arc::clone(&self.reporter),
            metrics: Arc::clone(&self.metrics),
            last_findings: Arc::clone(&self.last_findings),
            layout: self.layout.clone(),
            containers: Containers::new(self.args.proc.clone()),
            suspect_orphans,
        });
        Ok(Claims {
            preparer,
            audit,
            ledger,
            gpus,
            suspicions,
        })
    }

    fn hardware(&self) -> Hardware {
        Hardware {
            nvml: Box::new(self.new_session()),
            hangs: self.hangs.clone(),
            daemons: Box::new(tranche_mps::client::Client::new(&self.layout.mps())),
            groups: Arc::clone(&self.groups),
            gate: self.gate.clone(),
            open_patience: OPEN_PATIENCE,
            proc: self.args.proc.clone(),
        }
    }

    /// An NVML that is open only while it is used.
    fn new_session(&self) -> Session {
        Session::new(Arc::new(self.installed.clone()), &self.hangs)
    }

    fn install(&self) -> Result<Installation, install::InstallError> {
        let (fs, image) = (Arc::clone(&self.fs), &self.args.image_lib_dir);
        let libraries = self.layout.libraries();
        Installation::install(fs, image, &libraries, &self.layout.hooks).inspect_err(|error| {
            error!(%error, "claims will be refused: files that their containers need are not installed");
        })
    }

    /// An NVML that stays open between questions, except while a GPU changes its kernel driver.
    fn kept_nvml(&self) -> Box<dyn Driver> {
        let session = Box::new(self.session.clone());
        Box::new(Gated::new(session, self.gate.clone()))
    }

    fn events(&self) -> Events {
        Events::new(self.client.clone(), &self.args.node_name)
    }

    pub fn usage(&self, claims: &Claims) -> Arc<Usage> {
        let parts = usage::UsageParts {
            node: self.args.node_name.clone(),
            ledger: Arc::clone(&claims.ledger),
            layout: self.layout.clone(),
            state: self.driver.clone(),
            last_findings: Arc::clone(&self.last_findings),
            kubelet: Arc::clone(&self.pods),
        };
        let reader = Reader::new(self.kept_nvml(), self.xids.clone());
        Arc::new(Usage::new(parts, reader))
    }

    /// Serves health, metrics and usage.
    pub fn serve_http(
        &self,
        claims: &Claims,
        usage: &Arc<Usage>,
        endpoints: Endpoints,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) {
        let health = Health {
            registration_socket: self.layout.registration_socket(),
            dra_socket: self.layout.dra_socket(),
            registered: self.registered.clone(),
            threads: BlockingThreads::default(),
            patience: health::STUCK,
        };
        let scrape = Scrape {
            driver: self.driver.clone(),
            hangs: self.hangs.clone(),
            metrics: Arc::clone(&self.metrics),
            ledger: Arc::clone(&claims.ledger),
            layout: self.layout.clone(),
            last_findings: Arc::clone(&self.last_findings),
            health: Arc::clone(&self.board),
            usage: Arc::clone(usage),
            gpu_sensors: self.args.gpu_sensors,
        };
        let access = Access::new(self.client.clone());
        helpers.spawn(serve_health(endpoints.health, health, stop.clone()));
        helpers.spawn(serve_metrics(
            endpoints.metrics,
            access,
            scrape,
            stop.clone(),
        ));
    }

    /// Starts what watches held shares. Returns the GPUs with memory that has no owner.
    pub fn watch_shares(
        &self,
        claims: &Claims,
        usage: Arc<Usage>,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) -> watch::Receiver<Vec<WithheldGpu>> {
        let (ledger, layout, proc) = (&claims.ledger, &self.layout, &self.args.proc);
        let watched = watchdog::WatchdogParts {
            ledger: Arc::clone(ledger),
            layout: layout.clone(),
            policy: self.policy.clone(),
            state: self.driver.clone(),
            contexts: Arc::clone(&self.contexts),
            events: self.events(),
            metrics: Arc::clone(&self.metrics),
            last_findings: Arc::clone(&self.last_findings),
        };
        let fs = Arc::clone(&self.fs);
        let watchdog = Watchdog::new(watched, fs, self.kept_nvml(), proc.clone());
        let unowned = watchdog.unowned();
        let sampler = ShareSampler::new(
            Arc::clone(ledger),
            layout.clone(),
            self.kept_nvml(),
            proc.clone(),
            Arc::clone(&self.metrics),
        );
        let metrics = Arc::clone(&self.metrics);
        let sweeper = ShareSweeper::new(Arc::clone(ledger), layout.clone(), metrics);
        helpers.spawn(watchdog.run(stop.clone()));
        helpers.spawn(sampler.run(stop.clone()));
        helpers.spawn(usage.run(stop.clone()));
        helpers.spawn(sweeper.run(stop.clone()));
        unowned
    }

    /// Starts what watches the driver and reconciles the GPUs. Returns the GPUs with an MPS daemon that does not answer.
    pub fn watch_gpus(
        &self,
        claims: &Claims,
        shims: Vec<Shim>,
        driver: watch::Sender<DriverState>,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) -> watch::Receiver<Vec<WithheldGpu>> {
        let session = Box::new(self.new_session());
        let observer = Observer {
            driver: Box::new(Patient::new(session, self.gate.clone())),
            hangs: self.hangs.clone(),
            sysfs: self.args.sysfs.clone(),
            groups: Arc::clone(&self.groups),
            spec_file: Arc::clone(&self.spec_file),
            layout: self.layout.clone(),
            shims,
            contexts: Arc::clone(&self.contexts),
            records: claims.gpus.records().clone(),
            known_gpus: Mutex::default(),
            refresh: Duration::from_secs(self.args.describe_seconds),
        };
        helpers.spawn(observer.run(driver, stop.clone()));
        let (daemons_tx, daemons) = watch::channel(Vec::new());
        helpers.spawn(Arc::clone(&claims.gpus).watch_daemons(daemons_tx, stop.clone()));
        helpers.spawn(Arc::clone(&claims.gpus).settle(stop.clone()));
        daemons
    }

    /// The sources of the GpuNode's status.
    pub fn sources(
        &self,
        claims: &Claims,
        unowned: watch::Receiver<Vec<WithheldGpu>>,
        daemons: watch::Receiver<Vec<WithheldGpu>>,
    ) -> Sources {
        Sources {
            driver: self.driver.clone(),
            others: self.others.clone(),
            unowned,
            daemons,
            health: self.board.subscribe(),
            registered: self.registered.clone(),
            refused: claims.ledger.watch_refused(),
        }
    }

    /// Starts the writer of the GpuNode, and the search for other systems that hand out the node's GPUs.
    pub fn watch_cluster(
        &self,
        sources: Sources,
        others: watch::Sender<Option<Verdict>>,
        policy: watch::Sender<NodePolicy>,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) {
        let node = &self.args.node_name;
        let folders = SocketFolders {
            device_plugins: self.args.device_plugins_dir.clone(),
            registry: self.args.registry_dir.clone(),
        };
        let pods = Arc::clone(&self.pods);
        let search = CompetingDriverSearch::new(folders, pods, self.client.clone(), node.clone());
        let gpu_node = GpuNodeWriter::new(
            self.client.clone(),
            node.clone(),
            self.events(),
            Clock::system(),
            Arc::clone(&self.metrics),
        );
        helpers.spawn(search.run(self.driver.clone(), others, stop.clone()));
        helpers.spawn(gpu_node.run(sources, policy, stop.clone()));
    }

    /// Starts what watches the GPUs' health and reports faults.
    pub fn watch_health(
        &self,
        claims: &Claims,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) {
        let (cordoned_tx, cordoned) = watch::channel(false);
        let parts = MonitorParts {
            fs: Arc::clone(&self.fs),
            faults: self.layout.faults(),
            boot: self.args.proc.join("sys/kernel/random/boot_id"),
            ledger: Arc::clone(&claims.ledger),
            state: self.driver.clone(),
            policy: self.policy.clone(),
            cordoned,
            check: Arc::new(CheckProgram {
                program: self.args.gpu_check.clone(),
                driver: self.installed.clone(),
            }),
            board: Arc::clone(&self.board),
        };
        let watch = Watch::new(self.kept_nvml(), self.xids.clone());
        let reporter = HealthReporter {
            ledger: Arc::clone(&claims.ledger),
            board: Arc::clone(&self.board),
            events: self.events(),
            clock: Clock::system(),
            told: BTreeMap::new(),
        };
        let (client, node) = (self.client.clone(), self.args.node_name.clone());
        helpers.spawn(cordon::watch(client, node, cordoned_tx, stop.clone()));
        helpers.spawn(Monitor::new(parts, watch).run(stop.clone()));
        helpers.spawn(reporter.run(self.client.clone(), stop.clone()));
    }

    /// The service by which the kubelet learns of the GPUs' health.
    pub fn health_service(&self, claims: &Claims, stop: &CancellationToken) -> HealthService {
        HealthService {
            ledger: Arc::clone(&claims.ledger),
            board: Arc::clone(&self.board),
            stop: stop.clone(),
        }
    }

    /// Starts the search for claims that the kubelet does not release, and for files of held claims that were deleted.
    pub fn look_after_claims(
        &self,
        claims: Claims,
        helpers: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) {
        let restorer = Restorer {
            preparer: Arc::clone(&claims.preparer),
        };
        helpers.spawn(restorer.run(stop.clone()));
        let orphans = OrphanSearch {
            preparer: claims.preparer,
            claims: ClaimReader::new(self.client.clone()),
            kubelet: Arc::clone(&self.pods),
            reporter: Arc::clone(&self.reporter),
            metrics: Arc::clone(&self.metrics),
        };
        helpers.spawn(orphans.run(claims.suspicions, stop.clone()));
    }
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

async fn serve_health(listener: TcpListener, health: Health, stop: CancellationToken) {
    let server = axum::serve(listener, health::router(health));
    if let Err(error) = server.with_graceful_shutdown(stop.cancelled_owned()).await {
        error!(%error, "HTTP server failed");
    }
}

/// The claims of the journal. Removes what earlier runs left without a journal.
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
