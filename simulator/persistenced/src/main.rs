//! `nvidia-sim-persistenced`: the daemon that owns a simulated GPU machine.
//!
//! It stands where `nvidia-persistenced` and the kernel driver stand on a real
//! machine: it makes the device nodes, keeps the machine's state in a file on
//! tmpfs, hands that file to every libcuda and libnvidia-ml that asks over
//! `<ROOT>/run/nvidia-persistenced/socket`, and gives back what dead processes held.
//!
//! - [`page`] opens the state and decides what a restarted daemon keeps of it.
//! - [`serve`] answers, watches processes and samples how busy the GPUs are.
//! - [`nodes`] makes the device nodes, [`install`] lays out a driver root.

mod install;
mod nodes;
mod page;
mod sampler;
mod serve;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use tranche_simulator_machine::attach;
use tranche_simulator_machine::wire::{Reply, Request};
use tranche_simulator_machine::{Description, DriverRoot};

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
        /// Where; made if it does not exist.
        root: PathBuf,
        /// One of the machine files that came with the simulator, such as H100-80.
        #[arg(long, conflicts_with = "machine")]
        gpu_model: Option<String>,
        /// A machine file.
        #[arg(long, required_unless_present = "gpu_model")]
        machine: Option<PathBuf>,
        /// How many GPUs of the machine file's only model.
        #[arg(long)]
        gpus: Option<u32>,
    },
    /// Publish an Xid error of a GPU to NVML's event sets.
    InjectXid {
        /// Minor number of the GPU.
        gpu: u32,
        /// The Xid.
        xid: u32,
    },
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
        Some(Command::InjectXid { gpu, xid }) => inject(&DriverRoot::new(arguments.root), gpu, xid),
    }
}

/// NVML's `nvmlEventTypeXidCriticalError`.
const XID_EVENT: u32 = 0x8;

fn inject(root: &DriverRoot, gpu: u32, xid: u32) -> anyhow::Result<()> {
    let event = Request::Event {
        gpu,
        kind: XID_EVENT,
        data: xid,
    };
    match attach::request(root, event)? {
        Reply::Granted { .. } => Ok(()),
        Reply::Invalid => bail!("GPU {gpu}: this machine has no such GPU"),
        other => bail!("the daemon refuses: {other:?}"),
    }
}

/// The folder this program was started from: the simulator's other parts are beside it.
fn own_folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("the path of this program")?;
    Ok(program.parent().unwrap_or(Path::new("/")).to_owned())
}
