//! Other systems on the node that hand out its GPUs: device plugins (NVIDIA's, HAMi's) and NVIDIA's
//! DRA driver.
//!
//! ```text
//!  kubelet: what device plugins offer, what pods hold ─┐
//!  sockets of plugins that accept connections ─────────┼─► verdict ─► GPUs to withhold, condition
//!  ResourceSlices of gpu.nvidia.com ───────────────────┘
//! ```
//!
//! If another system hands out a GPU that Tranche offers too, two pods get it without an error. So a GPU that another
//! system offers, or that one of its pods still holds, is withheld. If the affected GPUs are not known, all are
//! withheld.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use tranche_api::WithheldGpu;
use tranche_api::conditions::{SOLE_PROVIDER, State};
use tranche_api::gpu_node::Inventory;
use tranche_api::withheld::reason;

/// The name of NVIDIA's DRA driver for GPUs.
pub const NVIDIA_DRIVER: &str = "gpu.nvidia.com";
/// Where the remedy is documented.
const HOW: &str = "see \"Taking over a node\" in deploy/README.md";

/// What was observed of other systems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observations {
    /// What the kubelet reports about device plugins and pods, or why it does not answer.
    pub kubelet: Option<Result<Kubelet, String>>,
    /// Sockets of NVIDIA's or HAMi's device plugin that accept connections, by file name.
    pub plugin_sockets: BTreeSet<String>,
    /// Registration sockets of NVIDIA's DRA driver that accept connections, by file name.
    pub dra_sockets: BTreeSet<String>,
    /// The devices in the node's ResourceSlices of NVIDIA's DRA driver, with their GPU's UUID, or
    /// why the API server does not answer.
    pub slices: Option<Result<BTreeMap<String, String>, String>>,
}

/// What the kubelet reports on its pod resources socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kubelet {
    /// Devices that device plugins offer (`GetAllocatableResources`).
    pub offered: Vec<PluginDevice>,
    /// Devices of device plugins that pods hold (`List`).
    pub held: Vec<(Pod, PluginDevice)>,
    /// Devices of NVIDIA's DRA driver that pods hold (`List`), by their names in its slices.
    pub claimed: Vec<(Pod, String)>,
}

/// A device of a device plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PluginDevice {
    /// The extended resource, for example `nvidia.com/gpu`.
    pub resource: String,
    /// The plugin's name for the device.
    pub id: String,
}

/// `namespace/name`.
pub type Pod = String;

/// The other system that offers a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CompetingDriver {
    NvidiaDevicePlugin,
    Hami,
    DevicePlugin,
    NvidiaDraDriver,
}

impl CompetingDriver {
    const fn reason(self) -> &'static str {
        match self {
            Self::NvidiaDevicePlugin => "NvidiaDevicePlugin",
            Self::Hami => "Hami",
            Self::DevicePlugin => "DevicePlugin",
            Self::NvidiaDraDriver => "NvidiaDraDriver",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::NvidiaDevicePlugin => "NVIDIA's device plugin",
            Self::Hami => "HAMi's device plugin",
            Self::DevicePlugin => "a device plugin",
            Self::NvidiaDraDriver => "NVIDIA's DRA driver",
        }
    }
}

/// The conclusion from the observations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// GPUs that another system offers or holds, in the inventory's order.
    pub withheld: Vec<WithheldGpu>,
    /// `SoleProvider`.
    pub condition: State,
}

/// Which of the GPUs of `inventory` other systems hand out.
#[must_use]
pub fn verdict(inventory: &Inventory, seen: &Observations) -> Verdict {
    let mut found = Found::default();
    plugins(inventory, seen, &mut found);
    dra_driver(inventory, seen, &mut found);

    let withheld = inventory.gpus.iter().filter_map(|gpu| {
        let findings: Vec<_> = found
            .gpus
            .get(&gpu.uuid)?
            .iter()
            .map(String::as_str)
            .collect();
        let message = format!("{}: {HOW}", findings.join("; "));
        Some(WithheldGpu::whole(
            &gpu.uuid,
            reason::OTHER_PROVIDER,
            message,
        ))
    });
    Verdict {
        withheld: withheld.collect(),
        condition: found.condition(),
    }
}

/// The findings by GPU, and the systems that were found.
#[derive(Debug, Default)]
struct Found {
    gpus: BTreeMap<String, BTreeSet<String>>,
    drivers: BTreeSet<CompetingDriver>,
}

impl Found {
    fn of(&mut self, uuid: &str, driver: CompetingDriver, text: String) {
        self.drivers.insert(driver);
        let findings = self.gpus.entry(uuid.to_owned()).or_default();
        findings.insert(text);
    }

    fn of_all(&mut self, inventory: &Inventory, driver: CompetingDriver, text: &str) {
        for gpu in &inventory.gpus {
            self.of(&gpu.uuid, driver, text.to_owned());
        }
    }

    fn condition(&self) -> State {
        let words: Vec<_> = self.drivers.iter().map(|p| p.words()).collect();
        let reason = match self.drivers.iter().collect::<Vec<_>>()[..] {
            [] => "NoOtherProvider",
            [one] => one.reason(),
            _ => "SeveralProviders",
        };
        State {
            kind: SOLE_PROVIDER,
            holds: self.drivers.is_empty(),
            reason,
            message: if words.is_empty() {
                String::new()
            } else {
                format!(
                    "{} of this node's GPUs are withheld, because they belong to {}: {HOW}",
                    self.gpus.len(),
                    words.join(" and ")
                )
            },
        }
    }
}

fn plugins(inventory: &Inventory, seen: &Observations, found: &mut Found) {
    match &seen.kubelet {
        Some(Ok(kubelet)) => {
            for device in &kubelet.offered {
                if let Some((uuid, driver)) = owner(inventory, device) {
                    let words = driver.words();
                    let text = format!("{words} offers it as {}", device.resource);
                    found.of(uuid, driver, text);
                }
            }
            for (pod, device) in &kubelet.held {
                if let Some((uuid, driver)) = owner(inventory, device) {
                    let text = format!("pod {pod} holds it as {}", device.resource);
                    found.of(uuid, driver, text);
                }
            }
        }
        unknown => {
            let why = match unknown {
                Some(Err(why)) => why,
                _ => "it was not asked yet",
            };
            for socket in &seen.plugin_sockets {
                let text = format!(
                    "a device plugin serves {socket}, and the kubelet does not say which GPUs it offers ({why})"
                );
                found.of_all(inventory, CompetingDriver::NvidiaDevicePlugin, &text);
            }
        }
    }
}

fn dra_driver(inventory: &Inventory, seen: &Observations, found: &mut Found) {
    let driver = CompetingDriver::NvidiaDraDriver;
    let none = BTreeMap::new();
    let devices = match &seen.slices {
        Some(Ok(devices)) => devices,
        _ => &none,
    };
    if !seen.dra_sockets.is_empty() {
        if let Some(Err(why)) = &seen.slices {
            let text = format!(
                "NVIDIA's DRA driver runs, and the API server does not say which GPUs it offers ({why})"
            );
            found.of_all(inventory, driver, &text);
        }
        for uuid in devices.values() {
            if inventory.gpus.iter().any(|gpu| gpu.uuid == *uuid) {
                let text = format!("NVIDIA's DRA driver ({NVIDIA_DRIVER}) offers it");
                found.of(uuid, driver, text);
            }
        }
    }
    if let Some(Ok(kubelet)) = &seen.kubelet {
        for (pod, device) in &kubelet.claimed {
            if let Some(uuid) = devices.get(device) {
                let text = format!("pod {pod} holds it by a claim for {NVIDIA_DRIVER}");
                found.of(uuid, driver, text);
            } else {
                // Its slices were deleted with the driver; nothing else names the GPU.
                let text = format!(
                    "pod {pod} holds {device} by a claim for {NVIDIA_DRIVER}, and nothing says which GPU that is"
                );
                found.of_all(inventory, driver, &text);
            }
        }
    }
}

/// The GPU of a device plugin's device, and the plugin. NVIDIA's plugin names a
/// device by the UUID, a replica of it `UUID::n`; HAMi's names its parts `UUID-n`.
fn owner<'a>(
    inventory: &'a Inventory,
    device: &PluginDevice,
) -> Option<(&'a str, CompetingDriver)> {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    inventory.gpus.iter().find_map(|gpu| {
        let rest = device.id.strip_prefix(gpu.uuid.as_str())?;
        let is_hami = rest.strip_prefix('-').is_some_and(number);
        let is_ours = rest.is_empty() || is_hami || rest.strip_prefix("::").is_some_and(number);
        let driver = if is_hami {
            CompetingDriver::Hami
        } else if device.resource.starts_with("nvidia.com/") {
            CompetingDriver::NvidiaDevicePlugin
        } else {
            CompetingDriver::DevicePlugin
        };
        is_ours.then_some((gpu.uuid.as_str(), driver))
    })
}
