//! How much memory a CUDA context takes on this machine, as measured by the node plugin or by the supervisors of the user's
//! shares. The measured sizes are valid until the machine reboots.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tranche_api::Quantity;
use tranche_api::gpu_node::Inventory;
use tranche_driver::preparation::{Cap, PreparedDevice};
use tranche_node::nvml::ProcessMemory;
use tranche_node::page::AccountFile;
use tranche_node::watchdog::compare::{
    Owner, ProcessId, ProcessSample, Sample, ShareSample, SlotSample,
};
use tranche_node::watchdog::contexts::{ContextSizes, Line, Model};

use crate::shares::CONTEXTS;

/// The file with the node plugin's measured sizes, if it runs on this machine and this user may read it.
const NODE_PLUGIN: &str = "/var/lib/kubelet/plugins/gpu.tranche.dev/contexts.json";

/// Writes the known sizes into an inventory. `shares` is the folder of the user's shares.
pub fn describe(inventory: &mut Inventory, shares: &Path) {
    let measured = [read(&shares.join(CONTEXTS)), read(Path::new(NODE_PLUGIN))];
    for gpu in &mut inventory.gpus {
        let model = Model {
            product: gpu.product_name.clone(),
            driver: inventory.driver_version.clone(),
        };
        let least = measured.iter().filter_map(|sizes| sizes.get(&model)).min();
        gpu.context_memory = least.map(Quantity::from_bytes);
    }
}

/// Reads sizes. Sizes that cannot be read are measured again.
fn read(path: &Path) -> ContextSizes {
    let lines = fs::read(path)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Vec<Line>>(&bytes).ok());
    ContextSizes::from_lines(lines.unwrap_or_default())
}

/// Measures the memory of the contexts of one share.
#[derive(Debug)]
pub struct Measuring {
    file: PathBuf,
    model: Model,
    gpu: String,
    key: String,
    limit: u64,
    context: u64,
    sizes: ContextSizes,
}

impl Measuring {
    /// Measures the share with this device; `None` where its contexts are not charged.
    pub fn new(device: &PreparedDevice, inventory: &Inventory, shares: &Path) -> Option<Self> {
        let Cap::Share {
            memory,
            context_memory,
            ..
        } = device.cap
        else {
            return None;
        };
        let gpu = inventory
            .gpus
            .iter()
            .find(|gpu| gpu.uuid == device.gpu_uuid)?;
        let file = shares.join(CONTEXTS);
        Some(Self {
            sizes: read(&file),
            file,
            model: Model {
                product: gpu.product_name.clone(),
                driver: inventory.driver_version.clone(),
            },
            gpu: gpu.uuid.clone(),
            key: device.key.clone(),
            limit: memory.saturating_add(context_memory),
            context: context_memory,
        })
    }

    pub fn gpu(&self) -> &str {
        &self.gpu
    }

    /// Adds the memory of the GPU's processes as NVML reports it, and writes a size that is new.
    pub fn note(&mut self, account: &Path, processes: &[ProcessMemory]) -> io::Result<()> {
        let sample = self.sample(account, processes);
        if !self.sizes.note(&self.model, &self.gpu, &sample) {
            return Ok(());
        }
        // Other supervisors of the user write too: each writes the whole file, and the last one stays.
        let content = serde_json::to_vec(&self.sizes.lines())?;
        let temporary = self.file.with_extension(std::process::id().to_string());
        fs::write(&temporary, content)?;
        fs::rename(&temporary, &self.file)
    }

    /// The share's slots and the processes that have one: a command is in the PID namespace of its
    /// supervisor.
    fn sample(&self, account: &Path, processes: &[ProcessMemory]) -> Sample {
        let copy = AccountFile::open(account).and_then(|account| account.copy());
        let slots: Vec<SlotSample> = copy.map_or_else(
            |_| Vec::new(),
            |copy| {
                let slots = copy.snapshot().processes();
                slots
                    .map(|slot| SlotSample {
                        pid: slot.pid,
                        charged: (slot.begun == slot.ended).then_some(slot.charged),
                    })
                    .collect()
            },
        );
        let of_share =
            |process: &&ProcessMemory| slots.iter().any(|slot| slot.pid == u64::from(process.pid));
        let processes = processes.iter().filter(of_share).filter_map(|process| {
            Some(ProcessSample {
                id: ProcessId {
                    pid: process.pid,
                    started: 0,
                },
                inner_pid: Some(process.pid.into()),
                bytes: process.bytes?,
                owner: Owner::Shares {
                    pod: None,
                    keys: vec![self.key.clone()],
                },
            })
        });
        Sample {
            processes: processes.collect(),
            shares: vec![ShareSample {
                movable: 0,
                key: self.key.clone(),
                limit: self.limit,
                context: self.context,
                slots: Some(slots),
            }],
            ..Sample::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use tranche_node::inventory::{inventory, testing::two_h100};

    use super::*;

    #[test]
    fn measured_sizes_are_read_and_a_broken_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let mut inventory = inventory(&two_h100(), Path::new("/nowhere"));
        describe(&mut inventory, folder.path());
        assert_eq!(inventory.gpus[0].context_memory, None);
        let model = Model {
            product: inventory.gpus[0].product_name.clone(),
            driver: inventory.driver_version.clone(),
        };
        let sizes = ContextSizes::new([(model, 464 << 20)]);
        let file = folder.path().join(CONTEXTS);
        fs::write(&file, serde_json::to_vec(&sizes.lines()).unwrap()).unwrap();
        describe(&mut inventory, folder.path());
        let measured = Some(Quantity::from_bytes(464 << 20));
        assert_eq!(inventory.gpus[0].context_memory, measured);
        // A broken file does not prevent a run.
        fs::write(&file, b"{").unwrap();
        describe(&mut inventory, folder.path());
        assert_eq!(inventory.gpus[0].context_memory, None);
    }
}
