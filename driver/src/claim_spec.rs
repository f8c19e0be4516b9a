//! The CDI spec of one claim: for each device its node, its pages, and variables for people.

use tranche_api::quantity::Quantity;

use crate::cdi::{
    CLAIM_CLASS, CdiError, ContainerEdits, Device, Mount, NodePaths, Spec, absolute, bind,
    container_path, device_node, mps_path, read_only,
};
use crate::metadata;
use crate::preparation::{Cap, PreparationPlan, PreparedDevice, Priority};

/// Bytes in the unit of the variable `CUDA_DEVICE_MEMORY_LIMIT_<n>`.
const MIB: u64 = 1 << 20;

/// What the containers of a claim get, device by device.
pub fn claim_spec(plan: &PreparationPlan, paths: &NodePaths) -> Result<Spec, CdiError> {
    absolute("the folder of shares", &paths.shares)?;
    absolute("the root of device nodes", &paths.dev_root)?;
    absolute("the folder of MPS daemons", &paths.mps)?;
    absolute("the folder of load pages", &paths.load)?;
    let devices = plan
        .devices
        .iter()
        .enumerate()
        .map(|(index, device)| {
            Ok(Device {
                name: device.key.clone(),
                container_edits: edits(plan, index, device, paths)?,
            })
        })
        .collect::<Result<_, CdiError>>()?;
    Spec::new(CLAIM_CLASS, devices, ContainerEdits::default())
}

fn edits(
    plan: &PreparationPlan,
    index: usize,
    device: &PreparedDevice,
    paths: &NodePaths,
) -> Result<ContainerEdits, CdiError> {
    let uid = &plan.allocation.uid;
    let page = |name: &str| {
        (
            format!("{}/{uid}/{}/{name}", paths.shares, device.key),
            format!("{}/{}/{name}", container_path::SHARES, device.key),
        )
    };
    let mut mounts = Vec::new();
    if device.vfio.is_none() {
        let (cap_on_host, cap) = page("cap");
        mounts.push(read_only(cap_on_host, cap));
    }
    for account in device.cap.accounts() {
        let (on_host, in_container) = page(account.file());
        mounts.push(bind(on_host, in_container, &WRITABLE));
    }
    mounts.extend(load_mount(device, paths));
    if device.cap.is_mps() {
        mounts.extend(mps_mounts(device, paths));
    }
    let is_of_request = |it: &PreparedDevice| it.request == device.request;
    let is_first = plan.devices.iter().position(is_of_request) == Some(index);
    if let Some(folder) = paths.metadata.as_ref().filter(|_| is_first) {
        let request = &device.request;
        mounts.push(read_only(
            format!("{folder}/{uid}/{request}.json"),
            metadata::container_path(plan, request),
        ));
    }
    if let Some(held) = &device.vfio {
        let group = held
            .group
            .as_ref()
            .ok_or_else(|| CdiError::NoVfioGroup(device.key.clone()))?;
        // VFIO's nodes are the kernel's, wherever the driver has its own.
        let nodes = group.nodes.iter().map(|node| device_node(node, "/"));
        return Ok(ContainerEdits {
            env: vfio_environment(device),
            device_nodes: nodes.collect(),
            mounts,
            hooks: Vec::new(),
        });
    }
    let mut nodes = vec![format!("/dev/nvidia{}", device.minor)];
    if let Some(partition) = &device.partition {
        let mig = partition
            .mig
            .as_ref()
            .ok_or_else(|| CdiError::NoMigDevice(device.key.clone()))?;
        nodes.extend(
            mig.capabilities
                .map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}")),
        );
    }
    let nodes = nodes.iter().map(|node| device_node(node, &paths.dev_root));
    Ok(ContainerEdits {
        env: environment(index, device),
        device_nodes: nodes.collect(),
        mounts,
        hooks: Vec::new(),
    })
}

const WRITABLE: [&str; 4] = ["rw", "nosuid", "nodev", "noexec"];

/// The load page of the GPU, or of its partition: shares of high priority write it, those of low priority read it.
fn load_mount(device: &PreparedDevice, paths: &NodePaths) -> Option<Mount> {
    let on_host = format!("{}/{}/load", paths.load, device.uuid());
    let in_container = format!("{}/{}/load", container_path::SHARES, device.key);
    match device.cap.priority() {
        Priority::Normal => None,
        Priority::High => Some(bind(on_host, in_container, &WRITABLE)),
        Priority::Low { .. } => Some(read_only(on_host, in_container)),
    }
}

/// The sockets of the MPS daemon of the GPU, or of its partition, and the memory that its clients share with it.
fn mps_mounts(device: &PreparedDevice, paths: &NodePaths) -> [Mount; 2] {
    let served = device.uuid();
    let mount = |name: &str, at: &str| {
        let on_host = format!("{}/{served}/{name}", paths.mps);
        bind(on_host, at.to_owned(), &WRITABLE)
    };
    [
        mount(mps_path::PIPES, container_path::MPS_PIPES),
        mount(mps_path::SHM, container_path::MPS_SHM),
    ]
}

/// Variables for people and tools. A GPU at VFIO has no minor number: its address names it.
fn vfio_environment(device: &PreparedDevice) -> Vec<String> {
    let address = device.pci_bus_id.replace([':', '.'], "_").to_uppercase();
    let gpu = format!("TRANCHE_GPU_{address}");
    vec![
        format!("{gpu}_UUID={}", device.gpu_uuid),
        format!("{gpu}_TIER={}", device.tier),
        format!("{gpu}_PCI_BUS_ID={}", device.pci_bus_id),
    ]
}

/// Variables for people and tools; no limit depends on them. Two shares of one GPU in one container set the same
/// variables, and the last one wins.
fn environment(index: usize, device: &PreparedDevice) -> Vec<String> {
    let gpu = format!("TRANCHE_GPU_{}", device.minor);
    let mut env = vec![
        format!("{gpu}_UUID={}", device.gpu_uuid),
        format!("{gpu}_TIER={}", device.tier),
    ];
    if let Some(partition) = &device.partition {
        env.push(format!("{gpu}_PROFILE={}", partition.placement.profile));
        env.extend(
            partition
                .mig
                .iter()
                .map(|mig| format!("{gpu}_MIG_UUID={}", mig.uuid)),
        );
    }
    if let Cap::Share { memory, cores, .. } = device.cap {
        env.push(format!("{gpu}_MEMORY={}", Quantity::from_bytes(memory)));
        if device.cap.on_gpu() < memory {
            let resident = Quantity::from_bytes(device.cap.on_gpu());
            env.push(format!("{gpu}_RESIDENT_MEMORY={resident}"));
        }
        env.push(format!("{gpu}_CORES={cores}"));
        env.push(format!(
            "CUDA_DEVICE_MEMORY_LIMIT_{index}={}m",
            memory / MIB
        ));
        env.push(format!("CUDA_DEVICE_SM_LIMIT={cores}"));
    }
    match device.cap.priority() {
        Priority::Normal => {}
        Priority::High => env.push(format!("{gpu}_PRIORITY=high")),
        Priority::Low { .. } => env.push(format!("{gpu}_PRIORITY=low")),
    }
    if let Cap::Share {
        memory,
        cores,
        context_memory,
        mps: true,
        ..
    } = device.cap
    {
        // The shim sets the same values in each process, from the cap page.
        let mib = (memory.saturating_add(context_memory) / MIB).max(1);
        env.push(format!(
            "CUDA_MPS_PIPE_DIRECTORY={}",
            container_path::MPS_PIPES
        ));
        env.push(format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={cores}"));
        env.push(format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M"));
    }
    env
}
