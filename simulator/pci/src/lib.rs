//! A PCI tree as Linux shows it for VFIO, made of files under a root folder, and a daemon that acts on writes to it.
//!
//! ```text
//!  <ROOT>/sys/bus/pci/devices/<address>/{vendor,device,class,driver_override,driver,iommu_group,vfio-dev/vfioN}
//!  <ROOT>/sys/bus/pci/drivers/<driver>/{bind,unbind,<address>}    <ROOT>/sys/bus/pci/drivers_probe
//!  <ROOT>/sys/kernel/iommu_groups/<group>/devices/<address>
//!  <ROOT>/dev/vfio/{vfio,<group>,devices/vfioN}                   <ROOT>/dev/iommu
//! ```
//!
//! [`Tree`] behaves like the kernel; [`serve`] reads what programs write. `bind`, `unbind` and `drivers_probe` are FIFOs, because a
//! daemon cannot notice writes to a regular file. A write that Linux refuses changes nothing, and the daemon reports it, but the
//! writer does not get the error number: clients have to check the device's state, as they must after `drivers_probe` anyway.
#![allow(missing_docs, reason = "only the simulator and tests use it")]

pub mod open_devices;
pub mod serve;
mod tree;

pub use tree::{Function, Nodes, Refusal, Tree};
