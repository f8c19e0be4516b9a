//! The devices of all claims of a node, which are in one file.

use std::collections::BTreeMap;

use super::{CLAIM_CLASS, ContainerEdits, Device, Spec};

/// The devices of claims. The name of a device begins with the UID of its claim and a dash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimDevices {
    by_name: BTreeMap<String, Device>,
}

impl ClaimDevices {
    /// Reads a file; `None` if it is not one that this release understands.
    #[must_use]
    pub fn decode(content: &[u8]) -> Option<Self> {
        let spec = Spec::decode(content).ok()?;
        let checked = Spec::new(CLAIM_CLASS, spec.devices.clone(), ContainerEdits::default());
        if checked.as_ref() != Ok(&spec) {
            return None;
        }
        let named = |device: Device| (device.name.clone(), device);
        Some(Self {
            by_name: spec.devices.into_iter().map(named).collect(),
        })
    }

    /// The content of the file; `None` without devices, because a runtime refuses a spec that has none.
    ///
    /// # Panics
    ///
    /// Never: all names come from specs, which have checked them.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.by_name.is_empty() {
            return None;
        }
        let devices = self.by_name.values().cloned().collect();
        let spec = Spec::new(CLAIM_CLASS, devices, ContainerEdits::default());
        Some(spec.expect("names of specs are valid").encode())
    }

    /// Whether the claim with this UID has a device. UIDs are UUIDs: none is the beginning of another one.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.by_name.keys().any(|name| is_of(name, uid))
    }

    /// Replaces the devices of a claim by those of its spec. Returns whether that changes anything.
    pub fn put(&mut self, uid: &str, spec: Spec) -> bool {
        let count = self.by_name.keys().filter(|name| is_of(name, uid)).count();
        let is_there = |device: &Device| self.by_name.get(&device.name) == Some(device);
        if count == spec.devices.len() && spec.devices.iter().all(is_there) {
            return false;
        }
        self.remove(uid);
        for device in spec.devices {
            self.by_name.insert(device.name.clone(), device);
        }
        true
    }

    /// Removes the devices of a claim. Returns whether it had any.
    pub fn remove(&mut self, uid: &str) -> bool {
        let before = self.by_name.len();
        self.by_name.retain(|name, _| !is_of(name, uid));
        self.by_name.len() < before
    }

    /// Removes the devices of all other claims than these. Returns whether there were any.
    pub fn keep<'a>(&mut self, uids: impl IntoIterator<Item = &'a str>) -> bool {
        let uids: Vec<_> = uids.into_iter().collect();
        let before = self.by_name.len();
        self.by_name
            .retain(|name, _| uids.iter().any(|uid| is_of(name, uid)));
        self.by_name.len() < before
    }
}

fn is_of(device: &str, uid: &str) -> bool {
    let rest = device.strip_prefix(uid);
    rest.is_some_and(|rest| rest.starts_with('-'))
}
