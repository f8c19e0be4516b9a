//! A GPU's way to VFIO and back, one step at a time.
//!
//! ```text
//!  whether a claim holds the GPU ─► wanted ─┐
//!  the GPU's record ────────────────────────┼─► next ─► write the record, change one function, wait, or done
//!  its IOMMU group as sysfs shows it ───────┘     ▲                              │
//!                                                 └──────── read again ◄─────────┘
//! ```
//!
//! [`next`] is called again after each step, with the new state of the functions. So a crash, a reboot or an
//! administrator may interrupt at any step: the state alone decides the next one.
//!
//! **The group.** The IOMMU isolates groups and not functions, and VFIO gives a group to a program only if all of its functions are
//! bound to VFIO, or to no driver, or are bridges. A GPU's own other functions (audio, USB) are bound with it. Where the group has a
//! function of another device, the GPU is refused: its owner did not give that device away.
//!
//! **The way back.** The [`VfioRecord`] names the driver of each function before the first one is unbound. A function is
//! given back only from `vfio-pci`, and only if Tranche recorded it: what an administrator has bound to VFIO stays
//! there. A record is valid for one boot: after a reboot the kernel has bound every function to its own driver, and the
//! record is dropped.
//!
//! **Open GPUs.** No function is unbound while a program has the GPU open. NVIDIA's driver would wait in the kernel for the program's
//! end, and nothing could interrupt it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use tranche_api::PciAddress;

/// The driver that gives functions to programs.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// A PCI function, as sysfs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Where it is.
    pub address: PciAddress,
    /// Its class, 24 bits.
    pub class: u32,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The only driver that may take it, if one is named.
    pub driver_override: Option<String>,
}

/// A GPU's IOMMU group, as sysfs and the processes show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actual {
    /// The GPU's function.
    pub gpu: PciAddress,
    /// The group's number; `None` if the machine has no IOMMU, or it is switched off.
    pub group: Option<u32>,
    /// The functions of the group, the GPU's among them.
    pub functions: Vec<Function>,
    /// Whether the driver `vfio-pci` is loaded.
    pub has_vfio: bool,
    /// Whether the machine has NVSwitches: their Fabric Manager must know which GPUs belong to a virtual machine.
    pub has_nvswitch: bool,
    /// A process that has the GPU open with its own driver, or its VFIO nodes.
    pub user: Option<User>,
    /// The kernel's boot id.
    pub boot: String,
}

/// A process that has a GPU open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its PID on the host.
    pub pid: u32,
    /// Its name in `/proc/<pid>/comm`: at most 15 bytes, which it chooses itself.
    pub name: String,
}

impl User {
    /// The name of nvidia-persistenced, cut to the kernel's limit.
    pub const PERSISTENCE_DAEMON: &str = "nvidia-persiste";

    /// Whether it keeps the GPU open until an administrator switches persistence mode off.
    #[must_use]
    pub fn is_persistence_daemon(&self) -> bool {
        self.name == Self::PERSISTENCE_DAEMON
    }

    fn way_out(&self, gpu: PciAddress) -> String {
        if self.is_persistence_daemon() {
            format!("switch persistence mode off (`nvidia-smi -pm 0 -i {gpu}`)")
        } else {
            "end it first".to_owned()
        }
    }
}

/// The name without control characters: the process chooses it.
impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.pid, self.name)
    }
}

/// What Tranche has changed, or is about to change. Durable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VfioRecord {
    /// The boot in which it was written.
    pub boot: String,
    /// The functions that are bound to VFIO, by their addresses.
    pub functions: BTreeMap<String, Former>,
}

/// The state of a function before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Former {
    /// Its driver; absent if it had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its driver override; absent if it had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_override: Option<String>,
}

/// One write to sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Name the only driver that may take a function, or none.
    Override(PciAddress, Option<String>),
    /// Take a function from its driver.
    Unbind(PciAddress, String),
    /// Let a function's driver take it.
    Probe(PciAddress),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write this record, durably; `None` removes it.
    Write(Option<VfioRecord>),
    /// Write to sysfs.
    Change(Change),
    /// The group is as wanted.
    Done,
}

/// Why a GPU cannot be given to a virtual machine, or not be taken back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// No IOMMU.
    #[error(
        "the GPU {0} has no IOMMU group: switch the IOMMU on in the firmware and in the kernel's command line (`intel_iommu=on` or `amd_iommu=on`)"
    )]
    NoIommu(PciAddress),
    /// The module is missing.
    #[error("the kernel has no driver vfio-pci: load it (`modprobe vfio-pci`)")]
    NoVfio,
    /// The GPU is gone.
    #[error("the kernel has no PCI device {0}")]
    Missing(PciAddress),
    /// The group has functions of other devices.
    #[error(
        "the IOMMU group {group} of the GPU {gpu} has the device {other} too, which would be taken from this machine with it: use a GPU that has a group of its own"
    )]
    Shared {
        /// The GPU.
        gpu: PciAddress,
        /// The group.
        group: u32,
        /// The other device.
        other: PciAddress,
    },
    /// The GPUs are connected by NVSwitch.
    #[error(
        "the machine's GPUs are connected by NVSwitch: a GPU of a virtual machine needs a partition of the Fabric Manager, which Tranche does not make: use another tier here"
    )]
    NvSwitch,
    /// A program has the GPU open.
    #[error(
        "the process {user} has the GPU {gpu} open: {}", user.way_out(*gpu)
    )]
    InUse {
        /// The GPU.
        gpu: PciAddress,
        /// The process.
        user: User,
    },
    /// Somebody else has bound it to VFIO.
    #[error(
        "the function {0} is bound to vfio-pci, which Tranche did not do: give it back to its own driver"
    )]
    Foreign(PciAddress),
}

/// The next step that reconciles a GPU's group: to VFIO, or, if it is not wanted there, back to its earlier drivers.
pub fn next(wanted: bool, record: Option<&VfioRecord>, actual: &Actual) -> Result<Next, Obstacle> {
    if record.is_some_and(|record| record.boot != actual.boot) {
        return Ok(Next::Write(None));
    }
    match (wanted, record) {
        (true, record) => towards(record, actual),
        (false, Some(record)) => back(record, actual),
        (false, None) => Ok(Next::Done),
    }
}

fn towards(record: Option<&VfioRecord>, actual: &Actual) -> Result<Next, Obstacle> {
    let members = members(actual)?;
    let Some(record) = record else {
        // Checked before anything is recorded, so that a refusal leaves nothing.
        if let Some(other) = members.iter().find(|it| it.is_vfio()) {
            return Err(Obstacle::Foreign(other.address));
        }
        unused(actual)?;
        let former = |it: &&Function| (it.address.to_string(), it.former());
        return Ok(Next::Write(Some(VfioRecord {
            boot: actual.boot.clone(),
            functions: members.iter().map(former).collect(),
        })));
    };
    for function in members {
        if !record.functions.contains_key(&function.address.to_string()) {
            // It has appeared meanwhile.
            let mut record = record.clone();
            let former = function.former();
            record
                .functions
                .insert(function.address.to_string(), former);
            return Ok(Next::Write(Some(record)));
        }
        if function.driver_override.as_deref() != Some(VFIO_DRIVER) {
            // Set before it is unbound, so that no other driver takes it then.
            let vfio = Some(VFIO_DRIVER.to_owned());
            return Ok(Next::Change(Change::Override(function.address, vfio)));
        }
        match &function.driver {
            Some(_) if function.is_vfio() => {}
            Some(driver) => {
                unused(actual)?;
                return Ok(Next::Change(Change::Unbind(
                    function.address,
                    driver.clone(),
                )));
            }
            None => return Ok(Next::Change(Change::Probe(function.address))),
        }
    }
    Ok(Next::Done)
}

fn back(record: &VfioRecord, actual: &Actual) -> Result<Next, Obstacle> {
    for function in &actual.functions {
        let Some(former) = record.functions.get(&function.address.to_string()) else {
            continue;
        };
        if function.is_vfio() {
            unused(actual)?;
            let vfio = VFIO_DRIVER.to_owned();
            return Ok(Next::Change(Change::Unbind(function.address, vfio)));
        }
        let wanted = match (&function.driver, &former.driver) {
            // With its name, so that no other driver takes the function.
            (None, Some(driver)) if function.driver_override.as_ref() == Some(driver) => {
                return Ok(Next::Change(Change::Probe(function.address)));
            }
            (None, Some(driver)) => Some(driver.clone()),
            _ => former.driver_override.clone(),
        };
        // Any other override was set by somebody else.
        let ours = [Some(VFIO_DRIVER), former.driver.as_deref()];
        let is_ours = ours.contains(&function.driver_override.as_deref());
        if function.driver_override != wanted && (is_ours || function.driver.is_none()) {
            return Ok(Next::Change(Change::Override(function.address, wanted)));
        }
    }
    Ok(Next::Write(None))
}

/// The reason, if there is one, why the GPU cannot be given to a virtual machine, whatever uses it now.
#[must_use]
pub fn obstacle(actual: &Actual) -> Option<Obstacle> {
    members(actual).err()
}

/// The functions that are bound with the GPU.
fn members(actual: &Actual) -> Result<Vec<&Function>, Obstacle> {
    if !actual.functions.iter().any(|it| it.address == actual.gpu) {
        return Err(Obstacle::Missing(actual.gpu));
    }
    let group = actual.group.ok_or(Obstacle::NoIommu(actual.gpu))?;
    if !actual.has_vfio {
        return Err(Obstacle::NoVfio);
    }
    if actual.has_nvswitch {
        return Err(Obstacle::NvSwitch);
    }
    let members: Vec<_> = actual
        .functions
        .iter()
        .filter(|it| !it.is_bridge())
        .collect();
    let is_own = |it: &Function| {
        PciAddress {
            function: actual.gpu.function,
            ..it.address
        } == actual.gpu
    };
    match members.iter().find(|it| !is_own(it)) {
        Some(other) => Err(Obstacle::Shared {
            gpu: actual.gpu,
            group,
            other: other.address,
        }),
        None => Ok(members),
    }
}

fn unused(actual: &Actual) -> Result<(), Obstacle> {
    match &actual.user {
        Some(user) => Err(Obstacle::InUse {
            gpu: actual.gpu,
            user: user.clone(),
        }),
        None => Ok(()),
    }
}

impl Function {
    fn is_vfio(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_DRIVER)
    }

    /// PCI bridges stay with their driver: VFIO allows them in a group.
    fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// Without an override that names VFIO, because it would keep the function from its driver.
    fn former(&self) -> Former {
        let own = |driver: &String| driver != VFIO_DRIVER;
        Former {
            driver: self.driver.clone(),
            driver_override: self.driver_override.clone().filter(own),
        }
    }
}

#[cfg(test)]
mod tests;
