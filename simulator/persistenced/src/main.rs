//! `nvidia-sim-persistenced`: the daemon of a simulated GPU machine.
//!
//! It replaces `nvidia-persistenced` and the kernel driver. It makes the device nodes, keeps the machine's
//! state in a file on tmpfs, passes that file to every libcuda and libnvidia-ml over
//! `<ROOT>/run/nvidia-persistenced/socket`, and frees the memory of processes that have ended.
//!
//! - [`page`] opens the state that an earlier daemon left, or makes a new one.
//! - [`serve`] answers requests, watches processes and samples utilization ([`sampler`]).
//! - [`nodes`] makes the device nodes, [`capabilities`] those of MIG instances.
//! - [`install`] lays out a driver root; [`library_file`] adapts its libraries to the machine file's driver.

mod capabilities;
mod install;
mod library_file;
mod nodes;
mod page;
mod sampler;
mod serve;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand, ValueEnum};
use tranche_simulator_machine::attach;
use tranche_simulator_machine::identity::uuid_text;
use tranche_simulator_machine::layout::NvLinkCounter;
use tranche_simulator_machine::wire::{Reply, Request, Setting};
use tranche_simulator_machine::{Access, Attachment, Description, DriverRoot};

/// The daemon that owns a simulated GPU machine. No GPU is involved.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The driver root: device nodes, socket and state are below it.
    #[arg(long, global = true, default_value = "/")]
    root: PathBuf,
    /// The machine file [default: <ROOT>/etc/nvidia-sim/machine.toml].
    #[arg(long)]
    machine: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lay out a driver root with the simulator in it.
    InstallRoot {
        /// The root's folder; made if it does not exist.
        root: PathBuf,
        /// One of the simulator's machine files, such as H100-80.
        #[arg(long, conflicts_with = "machine")]
        gpu_model: Option<String>,
        /// A machine file.
        #[arg(long, required_unless_present = "gpu_model")]
        machine: Option<PathBuf>,
        /// The number of GPUs, for a machine file with one model.
        #[arg(long)]
        gpus: Option<u32>,
    },
    /// Publish an Xid error of a GPU to NVML's event sets.
    InjectXid {
        /// The GPU, by its index or its UUID.
        gpu: String,
        /// The Xid.
        xid: u32,
    },
    /// Add to what NVML counts of all NVLinks of a GPU together.
    CountNvlink {
        /// The GPU, by its index or its UUID.
        gpu: String,
        /// What is counted; `sent` and `received` are in KiB.
        counter: Counter,
        /// What is added.
        amount: u32,
    },
    /// Let a GPU fall off the bus: NVML returns `NVML_ERROR_GPU_IS_LOST` for it and publishes Xid 79, CUDA fails in
    /// programs that use it, and programs that start later do not see it.
    LoseGpu {
        /// The GPU, by its index or its UUID.
        gpu: String,
        /// Remove its device node too, as after a removal from the PCI bus.
        #[arg(long)]
        remove_node: bool,
    },
    /// Reset a GPU that no process uses: its MIG instances vanish, and a pending MIG mode takes effect.
    ResetGpu {
        /// The GPU, by its index or its UUID.
        gpu: String,
    },
    /// Bring a lost GPU back, with its device node.
    RestoreGpu {
        /// The GPU, by its index or its UUID.
        gpu: String,
    },
}

/// A counter of NVLinks.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Counter {
    Sent,
    Received,
    FlitErrors,
    DataErrors,
    Replays,
    Recoveries,
}

impl From<Counter> for NvLinkCounter {
    fn from(counter: Counter) -> Self {
        match counter {
            Counter::Sent => Self::Sent,
            Counter::Received => Self::Received,
            Counter::FlitErrors => Self::FlitErrors,
            Counter::DataErrors => Self::DataErrors,
            Counter::Replays => Self::Replays,
            Counter::Recoveries => Self::Recoveries,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    match arguments.command {
        None => {
            let file = arguments
                .machine
                .unwrap_or_else(|| arguments.root.join(install::MACHINE_FILE));
            let description = Description::read(&file)?;
            serve::run(&DriverRoot::new(arguments.root), &description)
        }
        Some(Command::InstallRoot {
            root,
            gpu_model,
            machine,
            gpus,
        }) => {
            let parts = own_folder()?;
            let machine = match (gpu_model, machine) {
                (Some(model), _) => install::shipped_machine(&parts, &model)?,
                (None, Some(file)) => file,
                (None, None) => bail!("either --gpu-model or --machine is needed"),
            };
            install::install(&parts, &root, &machine, gpus)
        }
        Some(Command::InjectXid { gpu, xid }) => {
            let root = DriverRoot::new(arguments.root);
            let event = Request::Event {
                gpu: find(&root, &gpu)?.0,
                kind: u32::try_from(serve::XID_EVENT)?,
                data: xid,
            };
            send(&root, event)
        }
        Some(Command::CountNvlink {
            gpu,
            counter,
            amount,
        }) => {
            let root = DriverRoot::new(arguments.root);
            let request = Request::CountNvLink {
                gpu: find(&root, &gpu)?.0,
                counter: counter.into(),
                amount,
            };
            send(&root, request)
        }
        Some(Command::LoseGpu { gpu, remove_node }) => {
            let root = DriverRoot::new(arguments.root);
            let (index, minor) = find(&root, &gpu)?;
            set(&root, index, Setting::Lost, 1)?;
            if remove_node {
                nodes::remove(root.path(), minor)?;
            }
            Ok(())
        }
        Some(Command::RestoreGpu { gpu }) => {
            let root = DriverRoot::new(arguments.root);
            let (index, minor) = find(&root, &gpu)?;
            nodes::make_gpu(root.path(), minor)?;
            set(&root, index, Setting::Lost, 0)
        }
        Some(Command::ResetGpu { gpu }) => {
            let root = DriverRoot::new(arguments.root);
            let (index, _) = find(&root, &gpu)?;
            set(&root, index, Setting::Reset, 1)
        }
    }
}

fn set(root: &DriverRoot, gpu: u32, setting: Setting, value: u32) -> anyhow::Result<()> {
    let request = Request::Set {
        gpu,
        setting,
        value,
    };
    send(root, request)
}

/// The index and minor number of the GPU with the index or UUID `gpu`.
fn find(root: &DriverRoot, gpu: &str) -> anyhow::Result<(u32, u32)> {
    let attachment = Attachment::new(root, Access::Observe)?;
    let gpus = attachment.shared().gpus();
    let found = (0..).zip(gpus).find(|(index, state): &(u32, _)| {
        index.to_string() == gpu || uuid_text(&state.uuid).eq_ignore_ascii_case(gpu)
    });
    let (index, state) =
        found.with_context(|| format!("GPU {gpu}: this machine has no such GPU"))?;
    Ok((index, state.minor))
}

/// Sends a request to the daemon.
fn send(root: &DriverRoot, request: Request) -> anyhow::Result<()> {
    match attach::request(root, request)? {
        Reply::Granted { .. } => Ok(()),
        Reply::Forbidden => {
            bail!("nvidia-sim-persistenced refuses the request: run this command as root")
        }
        other => bail!("nvidia-sim-persistenced refuses the request: {other:?}"),
    }
}

/// The folder of this program, which has the simulator's other parts too.
fn own_folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("the path of this program")?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_owned())
}
