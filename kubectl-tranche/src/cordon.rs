//! `cordon`, `uncordon`, `drain`: keeps new claims off a GPU or a node's GPUs, and evicts the pods that have them.
//!
//! ```text
//!  name ─► Target ─► wanted ─► DeviceTaintRules, effect NoSchedule      (cordon; uncordon deletes them)
//!                 └► holders ─► evictions, which respect budgets ─► who is left    (drain)
//! ```
//!
//! A DeviceTaintRule selects a driver's pool or one device of it. A GPU has a device for each way to use it, so a cordoned GPU
//! has a rule for each of its devices.

mod drain;
mod rules;

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{DeviceTaintRule, DeviceTaintSelector};
use serde::Serialize;
use tranche_api::names::{DRIVER, own_node, pool, taint};

use crate::model::{Devices, Model};
use crate::output::{Block, Tone, View};
use crate::snapshot::{Gap, Snapshot};

pub use drain::{Drain, Drained, Left, drain, holders};
pub use rules::{apply, existing};

/// The beginning of the names of the rules.
const NAMES: &str = "tranche-cordon-";

/// A GPU, or all GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its node.
    pub node: String,
    /// The GPU's UUID; `None` for all GPUs of the node.
    pub gpu: Option<String>,
    /// The GPU's devices, by name.
    devices: BTreeSet<String>,
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No object has the name.
    #[error(
        "there is no node and no GPU {0}: name a node, a GPU's UUID or its beginning, or gpu-<first 8 digits>; list them with `kubectl tranche top gpus`"
    )]
    NotFound(String),
    /// Several GPUs have the name.
    #[error("{name} is the beginning of several UUIDs: {found}; write more of it")]
    Ambiguous {
        /// What was given.
        name: String,
        /// The UUIDs.
        found: String,
    },
    /// Nothing of it could be tainted.
    #[error(
        "{0} has no devices in a ResourceSlice, so that no claim gets any of it now; `kubectl tranche doctor` says why"
    )]
    NotOffered(String),
    /// The holders are not known.
    #[error(
        "you may not list resourceclaims.resource.k8s.io in all namespaces, so that it is not known who has GPUs of {0}: ask an administrator for the right"
    )]
    Unknown(String),
    /// Something could not be read.
    #[error("{}", .0.message)]
    Gap(Gap),
    /// A rule could not be written.
    #[error("cannot {verb} the DeviceTaintRule{name}: {why}")]
    Write {
        /// `create` or `delete`.
        verb: &'static str,
        /// A space and its name, where it has one.
        name: String,
        /// What the API server answered.
        why: String,
    },
}

impl Target {
    /// The node or GPU of this name. A node has precedence.
    pub fn find(name: &str, snapshot: &Snapshot, model: &Model) -> Result<Self, Error> {
        let is_node = |object: &Option<String>| object.as_deref() == Some(name);
        let is_known = model.nodes.iter().any(|node| node.name == name)
            || snapshot.nodes.iter().any(|it| is_node(&it.metadata.name));
        if is_known {
            return Ok(Self {
                node: name.to_owned(),
                gpu: None,
                devices: BTreeSet::new(),
            });
        }
        let digits = name
            .strip_prefix("gpu-")
            .or_else(|| name.strip_prefix("GPU-"))
            .map(str::to_ascii_lowercase);
        let is_gpu = |uuid: &str| {
            let digits = digits.as_deref().filter(|it| !it.is_empty());
            digits.is_some_and(|digits| {
                uuid.strip_prefix("GPU-")
                    .is_some_and(|uuid| uuid.starts_with(digits))
            })
        };
        let found: Vec<_> = model.gpus().filter(|(_, gpu)| is_gpu(&gpu.uuid)).collect();
        let (node, gpu) = match found[..] {
            [] => return Err(Error::NotFound(name.to_owned())),
            [one] => one,
            _ => {
                let uuids: Vec<_> = found.iter().map(|(_, gpu)| gpu.uuid.as_str()).collect();
                return Err(Error::Ambiguous {
                    name: name.to_owned(),
                    found: uuids.join(", "),
                });
            }
        };
        let offered = Devices::read(&snapshot.slices);
        let offered = offered
            .of_gpu(&gpu.uuid)
            .iter()
            .map(|(_, it)| it.name.clone());
        let held = gpu.held.iter().map(|it| it.device.clone());
        Ok(Self {
            node: node.name.clone(),
            gpu: Some(gpu.uuid.clone()),
            devices: offered.chain(held).collect(),
        })
    }

    /// Refuses a GPU without devices, which no rule could select.
    pub fn check(&self) -> Result<(), Error> {
        if self.gpu.is_some() && self.devices.is_empty() {
            return Err(Error::NotOffered(self.text()));
        }
        Ok(())
    }

    /// In words.
    #[must_use]
    pub fn text(&self) -> String {
        match &self.gpu {
            Some(uuid) => format!("{uuid} of node {}", self.node),
            None => format!("node {}", self.node),
        }
    }

    /// What the rules of a cordoned target select.
    fn selectors(&self) -> Vec<DeviceTaintSelector> {
        let selector = |device: Option<String>| DeviceTaintSelector {
            driver: Some(DRIVER.to_owned()),
            pool: Some(pool(&self.node)),
            device,
        };
        if self.gpu.is_none() {
            return vec![selector(None)];
        }
        let devices = self.devices.iter();
        devices.map(|it| selector(Some(it.clone()))).collect()
    }

    /// The selectors for which there is no rule.
    #[must_use]
    pub fn missing(&self, rules: &[DeviceTaintRule]) -> Vec<DeviceTaintSelector> {
        let whole = DeviceTaintSelector {
            driver: Some(DRIVER.to_owned()),
            pool: Some(pool(&self.node)),
            device: None,
        };
        let exists = |wanted: &DeviceTaintSelector| {
            let selectors = rules.iter().filter(|it| is_cordon(it));
            let mut selectors = selectors.filter_map(|it| it.spec.device_selector.as_ref());
            selectors.any(|it| it == wanted || *it == whole)
        };
        let mut wanted = self.selectors();
        wanted.retain(|it| !exists(it));
        wanted
    }

    /// The names of the rules that `uncordon` deletes. Devices that are not offered any more may have rules, too.
    #[must_use]
    pub fn own_rules(&self, rules: &[DeviceTaintRule]) -> Vec<String> {
        let pool = pool(&self.node);
        let short = self.gpu.as_deref().map(device_prefix);
        let is_own = |rule: &&DeviceTaintRule| {
            let Some(selector) = &rule.spec.device_selector else {
                return false;
            };
            let is_here = selector.pool.as_ref() == Some(&pool);
            let is_same = match (&short, &selector.device) {
                (None, None) => true,
                (Some(short), Some(device)) => is_of_gpu(device, short),
                _ => false,
            };
            is_cordon(rule) && is_here && is_same
        };
        let own = rules.iter().filter(is_own);
        own.filter_map(|it| it.metadata.name.clone()).collect()
    }

    /// What stays cordoned of the target: its node, or GPUs of the node.
    #[must_use]
    pub fn still_cordoned(&self, rules: &[DeviceTaintRule]) -> BTreeSet<String> {
        let pool = pool(&self.node);
        let own = self.own_rules(rules);
        let others = rules.iter().filter(|rule| {
            let selector = rule.spec.device_selector.as_ref();
            let is_here = selector.is_some_and(|it| it.pool.as_ref() == Some(&pool));
            let name = rule.metadata.name.as_ref();
            let is_own = name.is_some_and(|name| own.contains(name));
            let is_whole = selector.is_some_and(|it| it.device.is_none());
            is_cordon(rule) && is_here && !is_own && (self.gpu.is_none() || is_whole)
        });
        others.filter_map(target_of).collect()
    }
}

/// `gpu-a0000000` of a UUID.
fn device_prefix(uuid: &str) -> String {
    crate::model::short(uuid).to_ascii_lowercase()
}

fn is_of_gpu(device: &str, prefix: &str) -> bool {
    device
        .strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Whether a rule is one of this command's.
fn is_cordon(rule: &DeviceTaintRule) -> bool {
    let selector = rule.spec.device_selector.as_ref();
    let is_ours = selector.is_some_and(|it| it.driver.as_deref() == Some(DRIVER));
    is_ours && rule.spec.taint.key == taint::CORDONED
}

/// What a rule of this command cordons: a node, or `gpu-<first digits>`.
#[must_use]
pub fn target_of(rule: &DeviceTaintRule) -> Option<String> {
    let selector = rule
        .spec
        .device_selector
        .as_ref()
        .filter(|_| is_cordon(rule))?;
    match &selector.device {
        Some(device) => Some(device.splitn(3, '-').take(2).collect::<Vec<_>>().join("-")),
        None => own_node(selector.pool.as_deref()?).map(str::to_owned),
    }
}

/// What `cordon` or `uncordon` did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cordoned {
    pub node: String,
    #[serde(rename = "gpuUUID", skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// Whether it is cordoned now.
    pub is_cordoned: bool,
    /// How many rules were made or deleted.
    pub changed: usize,
    /// What stays cordoned.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub still_cordoned: BTreeSet<String>,
}

impl Cordoned {
    pub(crate) fn new(target: &Target, is_cordoned: bool, changed: usize) -> Self {
        Self {
            node: target.node.clone(),
            gpu_uuid: target.gpu.clone(),
            is_cordoned,
            changed,
            still_cordoned: BTreeSet::new(),
        }
    }
}

impl View for Cordoned {
    fn blocks(&self, _: bool) -> Vec<Block> {
        let what = match &self.gpu_uuid {
            Some(uuid) => format!("{uuid} of node {}", self.node),
            None => format!("all GPUs of node {}", self.node),
        };
        let state = if self.is_cordoned {
            "cordoned: no new claim gets any of it"
        } else {
            "not cordoned"
        };
        let already = if self.changed == 0 { " already" } else { "" };
        let mut blocks = vec![Block::Line(
            Tone::Heading,
            format!("{what}:{already} {state}"),
        )];
        blocks.extend(self.still_cordoned.iter().map(|it| {
            let line = format!("{it} stays cordoned: kubectl tranche uncordon {it}");
            Block::Line(Tone::Warning, line)
        }));
        blocks
    }
}

#[cfg(test)]
mod tests;
