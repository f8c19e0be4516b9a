//! `nvidia-sim-pci`: the PCI tree of a simulated machine, and the kernel that acts on it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Parser;
use tranche_simulator_machine::wire::{Reply, Request, Setting};
use tranche_simulator_machine::{Access, Attachment, DriverRoot, GpuState, attach};
use tranche_simulator_pci::open_devices::is_open;
use tranche_simulator_pci::{Function, Nodes, Tree, serve};

/// The driver whose GPUs NVML and CUDA show.
const NVIDIA: &str = "nvidia";
/// A GPU without a display.
const GPU_CLASS: u32 = 0x03_0200;
/// A GPU's audio function.
const AUDIO_CLASS: u32 = 0x04_0300;

/// Shows the GPUs of a simulated machine as PCI functions that can be bound to VFIO. No hardware is involved.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The folder in which the tree has its `sys`, and finds `dev`.
    #[arg(long)]
    tree: PathBuf,
    /// The driver root whose machine `nvidia-sim-persistenced` serves.
    #[arg(long, default_value = "/")]
    root: PathBuf,
    /// Each GPU has an audio function beside it, in its IOMMU group.
    #[arg(long)]
    audio: bool,
    /// The machine has no IOMMU.
    #[arg(long)]
    no_iommu: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let machine = DriverRoot::new(&arguments.root);
    let attachment = Attachment::new(&machine, Access::Observe)?;
    let gpus: &'static [GpuState] = attachment.shared().gpus();
    let functions: Vec<Function> = (0..)
        .zip(gpus)
        .flat_map(|(index, gpu)| {
            let group = (!arguments.no_iommu).then_some(group_of(index));
            [
                Some(function(gpu, 0, GPU_CLASS, group)),
                arguments
                    .audio
                    .then(|| function(gpu, 1, AUDIO_CLASS, group)),
            ]
        })
        .flatten()
        .collect();
    let tree = Tree::boot(&arguments.tree, Nodes::Devices, &functions)
        .with_context(|| format!("PCI tree under {}", arguments.tree.display()))?;
    let find = move |address: &str| {
        let mut numbered = (0_u32..).zip(gpus);
        numbered.find(|(_, gpu)| address_of(gpu, 0) == address)
    };
    // As after a boot, NVIDIA's driver has all GPUs.
    for gpu in (0..).zip(gpus).map(|(index, _)| index) {
        set_driver(&machine, gpu, true)?;
    }
    let dev = arguments.tree.join("dev");
    let in_use: serve::InUse = Arc::new(move |address: &str| {
        find(address).is_some_and(|(index, gpu)| {
            let nodes = [
                format!("nvidia{}", gpu.minor),
                format!("vfio/{}", group_of(index)),
            ];
            nodes.iter().any(|node| is_open(&dev.join(node)))
        })
    });
    let changed: serve::Changed = Arc::new(move |address: &str, driver: Option<&str>| {
        println!("{address} {}", driver.unwrap_or("-"));
        let Some((gpu, _)) = find(address) else {
            return;
        };
        if let Err(error) = set_driver(&machine, gpu, driver == Some(NVIDIA)) {
            eprintln!("{address}: {error:#}");
        }
    });
    serve::start(&Arc::new(tree), &in_use, &changed).context("the tree's FIFOs")?;
    loop {
        std::thread::park();
    }
}

/// Each GPU has its own IOMMU group.
fn group_of(gpu: u32) -> u32 {
    gpu + 1
}

fn function(gpu: &GpuState, number: u8, class: u32, group: Option<u32>) -> Function {
    let (device, vendor) = (gpu.pci_device_id >> 16, gpu.pci_device_id & 0xffff);
    Function {
        address: address_of(gpu, number),
        vendor: u16::try_from(vendor).unwrap_or_default(),
        device: u16::try_from(device).unwrap_or_default(),
        class,
        group,
    }
}

fn address_of(gpu: &GpuState, function: u8) -> String {
    let (domain, bus, device) = (gpu.pci_domain, gpu.pci_bus, gpu.pci_device);
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
}

/// Tells the machine whether NVIDIA's driver has a GPU.
fn set_driver(machine: &DriverRoot, gpu: u32, is_bound: bool) -> anyhow::Result<()> {
    let request = Request::Set {
        gpu,
        setting: Setting::Driver,
        value: u32::from(is_bound),
    };
    match attach::request(machine, request)? {
        Reply::Granted { .. } => Ok(()),
        other => bail!("nvidia-sim-persistenced refuses: {other:?}"),
    }
}
