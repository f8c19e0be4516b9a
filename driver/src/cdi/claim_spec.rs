//! The spec of one claim: per device its node, its pages, and variables for people.

use tranche_api::quantity::Quantity;

use super::{
    CLAIM_CLASS, CdiError, ContainerEdits, Device, Spec, absolute, bind, container_path,
    device_node, read_only,
};
use crate::preparation::{Cap, PreparationPlan, PreparedDevice};

/// Bytes in the unit of the variable `CUDA_DEVICE_MEMORY_LIMIT_<n>`.
const MIB: u64 = 1 << 20;

/// Folders on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    /// A folder per claim, in it a folder per device with its pages: `/run/tranche/shares`.
    pub shares: String,
    /// The hook and its ldconfig, in a folder from which runtimes can execute them in user
    /// namespaces.
    pub hooks: String,
    /// The root of the driver's device nodes: `/`, or the driver root if it has its own `dev`.
    pub dev_root: String,
}

/// What the containers of a claim get, device by device.
pub fn claim_spec(plan: &PreparationPlan, paths: &NodePaths) -> Result<Spec, CdiError> {
    absolute("the folder of shares", &paths.shares)?;
    absolute("the root of device nodes", &paths.dev_root)?;
    let devices = plan
        .devices
        .iter()
        .enumerate()
        .map(|(index, device)| Device {
            name: device.key.clone(),
            container_edits: edits(&plan.allocation.uid, index, device, paths),
        })
        .collect();
    Spec::new(CLAIM_CLASS, devices, ContainerEdits::default())
}

fn edits(uid: &str, index: usize, device: &PreparedDevice, paths: &NodePaths) -> ContainerEdits {
    let page = |name: &str| {
        (
            format!("{}/{uid}/{}/{name}", paths.shares, device.key),
            format!("{}/{}/{name}", container_path::SHARES, device.key),
        )
    };
    let (cap_on_host, cap) = page("cap");
    let mut mounts = vec![read_only(cap_on_host, cap)];
    if let Cap::Share { .. } = device.cap {
        let (account_on_host, account) = page("account");
        mounts.push(bind(
            account_on_host,
            account,
            &["rw", "nosuid", "nodev", "noexec"],
        ));
    }
    ContainerEdits {
        env: environment(index, device),
        device_nodes: vec![device_node(
            &format!("/dev/nvidia{}", device.minor),
            &paths.dev_root,
        )],
        mounts,
        hooks: Vec::new(),
    }
}

/// Variables for people and tools; no limit depends on them. Two shares of one GPU in one container
/// have the same variables, and the last one wins.
fn environment(index: usize, device: &PreparedDevice) -> Vec<String> {
    let gpu = format!("TRANCHE_GPU_{}", device.minor);
    let mut env = vec![
        format!("{gpu}_UUID={}", device.gpu_uuid),
        format!("{gpu}_TIER={}", device.tier),
    ];
    if let Cap::Share { memory, cores, .. } = device.cap {
        env.push(format!("{gpu}_MEMORY={}", Quantity::from_bytes(memory)));
        env.push(format!("{gpu}_CORES={cores}"));
        env.push(format!(
            "CUDA_DEVICE_MEMORY_LIMIT_{index}={}m",
            memory / MIB
        ));
        env.push(format!("CUDA_DEVICE_SM_LIMIT={cores}"));
    }
    env
}
