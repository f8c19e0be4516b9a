//! A PCI tree as Linux shows it for VFIO, made of files under a root folder, and a daemon that acts on what is written to it.
//!
//! ```text
//!  <ROOT>/sys/bus/pci/devices/<address>/{vendor,device,class,driver_override,driver,iommu_group,vfio-dev/vfioN}
//!  <ROOT>/sys/bus/pci/drivers/<driver>/{bind,unbind,<address>}    <ROOT>/sys/bus/pci/drivers_probe
//!  <ROOT>/sys/kernel/iommu_groups/<group>/devices/<address>
//!  <ROOT>/dev/vfio/{vfio,<group>,devices/vfioN}                   <ROOT>/dev/iommu
//! ```
//!
//! [`Tree`] has the kernel's habits; [`serve`] reads what programs write. `bind`, `unbind` and `drivers_probe` are FIFOs, because a
//! program cannot answer for a regular file. So a write that Linux refuses changes nothing and is reported by the daemon, but the
//! writer does not get the error number: clients have to look at the device's state, as they must after `drivers_probe`
//! anyway.
#![allow(missing_docs, reason = "only the simulator and tests use it")]

pub mod open_devices;
pub mod serve;
mod tree;

pub use tree::{Function, Nodes, Refusal, Tree};
