//! `nvidia-sim-pci`: a PCI tree with GPUs under a root folder, and the kernel that acts on it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use tranche_api::pci_address::PciAddress;
use tranche_simulator_pci::open_devices::is_open;
use tranche_simulator_pci::{Function, Nodes, Tree, serve};

const NVIDIA: u16 = 0x10de;

/// Shows GPUs as PCI functions that can be bound to VFIO. No GPU is involved.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The folder that has `sys` and `dev`.
    #[arg(long)]
    root: PathBuf,
    /// The address of a GPU, such as 0000:1b:00.0, in the order of their nodes `<ROOT>/dev/nvidia<N>`; each GPU has an IOMMU
    /// group of its own.
    #[arg(long = "gpu", required = true)]
    gpus: Vec<PciAddress>,
    /// The GPUs' PCI device id, in hexadecimal.
    #[arg(long, default_value = "2330", value_parser = |text: &str| u16::from_str_radix(text, 16))]
    device_id: u16,
    /// Each GPU has an audio function beside it, in its IOMMU group.
    #[arg(long)]
    audio: bool,
    /// The machine has no IOMMU.
    #[arg(long)]
    no_iommu: bool,
    /// The program `nvidia-sim-persistenced` of the root's machine, through which a GPU leaves NVML and comes back.
    #[arg(long)]
    machine_program: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let mut functions = Vec::new();
    for (group, address) in (1_u32..).zip(&arguments.gpus) {
        let gpu = Function {
            address: *address,
            vendor: NVIDIA,
            device: arguments.device_id,
            class: 0x03_0200,
            group: (!arguments.no_iommu).then_some(group),
        };
        functions.push(gpu);
        if arguments.audio {
            let address = PciAddress {
                function: address.function + 1,
                ..*address
            };
            functions.push(Function {
                address,
                class: 0x04_0300,
                ..gpu
            });
        }
    }
    let tree = Tree::boot(&arguments.root, Nodes::Devices, &functions)
        .with_context(|| format!("PCI tree under {}", arguments.root.display()))?;
    let index = {
        let addresses: Vec<_> = arguments.gpus.iter().map(PciAddress::to_string).collect();
        move |address: &str| addresses.iter().position(|it| it == address)
    };
    let (nodes, index_of) = (arguments.root.join("dev"), index.clone());
    let in_use: serve::InUse = Arc::new(move |address: &str| {
        index_of(address).is_some_and(|n| is_open(&nodes.join(format!("nvidia{n}"))))
    });
    let (root, program) = (arguments.root.clone(), arguments.machine_program);
    let changed: serve::Changed = Arc::new(move |address: &str, driver: Option<&str>| {
        println!("{address} {}", driver.unwrap_or("-"));
        let (Some(gpu), Some(program)) = (index(address), &program) else {
            return;
        };
        let mut command = Command::new(program);
        command.arg("--root").arg(&root);
        match driver {
            Some("nvidia") => command.args(["restore-gpu", &gpu.to_string()]),
            _ => command.args(["lose-gpu", "--remove-node", &gpu.to_string()]),
        };
        match command.status() {
            Ok(status) if status.success() => {}
            failed => eprintln!("{address}: {command:?}: {failed:?}"),
        }
    });
    serve::start(&Arc::new(tree), &in_use, &changed).context("the tree's FIFOs")?;
    loop {
        std::thread::park();
    }
}
