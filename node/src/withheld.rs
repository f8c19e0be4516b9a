//! The state of a node's GPUs without Tranche's partitions, and which of them are withheld because of NVML's report:
//! those that it cannot describe, and those in MIG mode.
//!
//! ```text
//!  NVML's description ─┐
//!  the GPUs' records ──┴─► at_rest ─┬─► withheld ──► GpuNode.status.withheld
//!                                   └─► inventory ─► GpuNode.status.inventory
//! ```

use std::collections::BTreeMap;

use tranche_api::WithheldGpu;
use tranche_api::gpu_node::MigMode;
use tranche_api::mig::MigInstance;
use tranche_api::tier::Tier;
use tranche_api::vgpu::VgpuRole;
use tranche_api::withheld::reason;
use tranche_driver::gpu_state::GpuChanges;
use tranche_driver::mig::Placement;

use crate::nvml::{BrokenGpu, Description, GpuDescription, NvmlError};

/// Earlier facts about the GPUs.
#[derive(Clone, Debug, Default)]
pub struct KnownGpus {
    /// The UUIDs of the GPUs when they could be described: NVML does not report the UUID of a lost GPU.
    by_index: BTreeMap<u32, String>,
    count: usize,
    /// By UUID.
    whole: BTreeMap<String, WholeGpu>,
}

/// The values of a GPU when it is not in MIG mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WholeGpu {
    memory_total: u64,
    memory_reserved: u64,
    multiprocessors: Option<u32>,
}

impl KnownGpus {
    /// The GPUs as they would be without Tranche's partitions, so that the inventory does not change with them: `ours`
    /// has the record of each GPU that Tranche has changed, by UUID. Only instances of others remain. MIG mode that
    /// Tranche has switched on is shown as off, unless others have created instances meanwhile. If the GPU was seen
    /// without MIG mode before, its memory and its multiprocessors are those of that time.
    #[must_use]
    pub fn at_rest(
        &mut self,
        mut description: Description,
        ours: &BTreeMap<String, GpuChanges>,
    ) -> Description {
        for gpu in &mut description.gpus {
            if gpu.mig_mode.current {
                if let Some(whole) = self.whole.get(&gpu.uuid) {
                    whole.restore(gpu);
                }
            } else {
                self.whole.insert(gpu.uuid.clone(), WholeGpu::of(gpu));
            }
            let Some(record) = ours.get(&gpu.uuid) else {
                continue;
            };
            gpu.mig_instances.retain(|it| !is_ours(record, it));
            if record.switched_mig_on && gpu.mig_instances.is_empty() {
                gpu.mig_mode = MigMode::default();
            }
        }
        description
    }

    /// The withheld GPUs of `description`, each with its withheld tiers; remembers their UUIDs.
    pub fn withheld(&mut self, description: &Description) -> Vec<WithheldGpu> {
        let count = description.gpus.len() + description.broken.len();
        if count != self.count {
            // With another driver or machine, the indices may mean other GPUs.
            self.by_index.clear();
            self.count = count;
        }
        for gpu in &description.gpus {
            self.by_index.insert(gpu.index, gpu.uuid.clone());
        }
        let broken = description.broken.iter().map(|gpu| self.broken(gpu));
        let partitioned = description.gpus.iter().filter_map(in_mig_mode);
        broken.chain(partitioned).collect()
    }

    fn broken(&self, gpu: &BrokenGpu) -> WithheldGpu {
        let BrokenGpu { index, uuid, error } = gpu;
        let uuid = uuid.as_ref().or_else(|| self.by_index.get(index));
        let name = uuid.cloned().unwrap_or_else(|| format!("index {index}"));
        match error {
            NvmlError::GpuLost { .. } => WithheldGpu::whole(
                &name,
                reason::GPU_LOST,
                format!(
                    "{error}: it fell off the bus or needs a reset; see the kernel log (`dmesg`) for its Xid, then reset it (`nvidia-smi --gpu-reset`) or reboot the node"
                ),
            ),
            NvmlError::Hangs { .. } => {
                WithheldGpu::whole(&name, reason::DRIVER_HANGS, error.to_string())
            }
            error => WithheldGpu::whole(
                &name,
                reason::NOT_DESCRIBED,
                format!("{error}: see `nvidia-smi -q` and the kernel log (`dmesg`) on the node"),
            ),
        }
    }
}

impl WholeGpu {
    fn of(gpu: &GpuDescription) -> Self {
        Self {
            memory_total: gpu.memory_total,
            memory_reserved: gpu.memory_reserved,
            multiprocessors: gpu.multiprocessors,
        }
    }

    fn restore(self, gpu: &mut GpuDescription) {
        gpu.memory_total = self.memory_total;
        gpu.memory_reserved = self.memory_reserved;
        gpu.multiprocessors = self.multiprocessors;
    }
}

/// Whether the record names the instance. An instance that is about to be created has no id there yet.
fn is_ours(record: &GpuChanges, instance: &MigInstance) -> bool {
    let Some(placement) = Placement::of(instance) else {
        return false;
    };
    let mut owned = record.instances.iter();
    owned.any(|it| it.placement == placement && it.id.is_none_or(|id| id == instance.id))
}

fn in_mig_mode(gpu: &GpuDescription) -> Option<WithheldGpu> {
    let uuid = &gpu.uuid;
    let off = format!(
        "switch it off (`nvidia-smi -i {uuid} -mig 0`, and reset the GPU if the command requires it)"
    );
    let withheld = |message| WithheldGpu::whole(uuid, reason::MIG_MODE, message);
    Some(match (gpu.mig_mode.current, gpu.mig_mode.pending) {
        (false, false) => return None,
        _ if gpu.vgpu_role == Some(VgpuRole::Guest) => WithheldGpu::whole(
            uuid,
            reason::VGPU_GUEST,
            "the GPU is a vGPU that is a MIG instance of its host's GPU, and in the virtual machine it can be neither divided nor \
             shared: give the virtual machine a vGPU of a type without MIG"
                .to_owned(),
        ),
        (true, true) if gpu.mig_profiles.is_empty() => withheld(format!(
            "MIG mode is on, and the driver does not report how it divides the GPU: {off}"
        )),
        (true, true) => WithheldGpu {
            tiers: whole_tiers(),
            ..withheld(format!(
                "MIG mode is on: only partitions of the GPU are offered; for the other tiers remove its instances and {off}"
            ))
        },
        (true, false) => withheld(format!(
            "MIG mode is on until the GPU's next reset: reset the GPU, or leave it on (`nvidia-smi -i {uuid} -mig 1`)"
        )),
        (false, true) => withheld(format!(
            "MIG mode will be on after the GPU's next reset: reset the GPU, or {off}"
        )),
    })
}

/// The tiers in which a claim gets the whole GPU, alone or with sharers.
fn whole_tiers() -> Vec<Tier> {
    let mut tiers = Tier::ALL.to_vec();
    tiers.retain(|tier| *tier != Tier::Partition);
    tiers
}

#[cfg(test)]
mod tests {
    use tranche_driver::gpu_state::Owned;
    use tranche_driver::mig::tables;

    use super::*;
    use crate::inventory::testing::two_h100;

    /// The two H100, the one of index 1 broken.
    fn broken(uuid: Option<&str>, error: NvmlError) -> Description {
        let mut description = two_h100();
        description.gpus.retain(|gpu| gpu.index == 0);
        description.broken = vec![BrokenGpu {
            index: 1,
            uuid: uuid.map(str::to_owned),
            error,
        }];
        description
    }

    fn lost() -> NvmlError {
        NvmlError::GpuLost {
            call: "nvmlDeviceGetHandleByIndex_v2",
            object: "index 1".into(),
        }
    }

    #[test]
    fn a_lost_gpu_keeps_its_name_while_the_machine_is_the_same() {
        let uuid = "GPU-00000001-0000-0000-0000-000000000001";
        let mut known = KnownGpus::default();
        assert_eq!(known.withheld(&two_h100()), []);
        let withheld = known.withheld(&broken(None, lost()));
        assert_eq!((&*withheld[0].gpu, &*withheld[0].reason), (uuid, "GpuLost"));
        assert!(withheld[0].message.contains("dmesg"), "{withheld:?}");

        // It was never described, or the machine has another number of GPUs.
        let never = KnownGpus::default().withheld(&broken(None, lost()));
        assert_eq!(never[0].gpu, "index 1");
        let mut fewer = broken(None, lost());
        fewer.gpus.clear();
        assert_eq!(known.withheld(&fewer)[0].gpu, "index 1");
    }

    #[test]
    fn an_undescribable_gpu_is_named_with_the_call_that_failed() {
        let error = NvmlError::Call {
            call: "nvmlDeviceGetMemoryInfo_v2",
            object: "GPU-odd".into(),
            reason: "an internal driver error occurred".into(),
        };
        let withheld = KnownGpus::default().withheld(&broken(Some("GPU-odd"), error));
        assert_eq!(withheld.len(), 1);
        assert_eq!(
            (&*withheld[0].gpu, &*withheld[0].reason),
            ("GPU-odd", "NotDescribed")
        );
        assert!(
            withheld[0].message.contains("nvmlDeviceGetMemoryInfo_v2"),
            "{withheld:?}"
        );
    }

    #[test]
    fn mig_mode_withholds_the_whole_gpu_and_not_its_partitions() {
        let all = Tier::ALL.to_vec();
        let whole = vec![
            Tier::Timeshared,
            Tier::Concurrent,
            Tier::Capped,
            Tier::Exclusive,
            Tier::Passthrough,
        ];
        for (current, pending, is_divided, expected) in [
            (true, true, true, whole),
            (true, true, false, all.clone()),
            (true, false, true, all.clone()),
            (false, true, true, all),
            (false, false, true, Vec::new()),
        ] {
            let mut description = two_h100();
            let gpu = &mut description.gpus[0];
            gpu.mig_mode = MigMode { current, pending };
            if is_divided {
                gpu.mig_profiles = tables::h100(&[]).profiles;
            }
            let uuid = gpu.uuid.clone();
            let withheld = KnownGpus::default().withheld(&description);
            let covers = |tier: &Tier| withheld.iter().any(|it| it.covers(&uuid, *tier));
            let found: Vec<_> = Tier::ALL.into_iter().filter(covers).collect();
            assert_eq!(found, expected, "{withheld:?}");
            assert!(withheld.iter().all(|it| it.reason == "MigMode"));
        }
    }

    #[test]
    fn a_vgpu_in_mig_mode_is_withheld_with_the_host_as_the_way_out() {
        let mut description = two_h100();
        let gpu = &mut description.gpus[0];
        gpu.mig_mode = ON;
        gpu.vgpu_role = Some(VgpuRole::Guest);
        let withheld = KnownGpus::default().withheld(&description);
        assert_eq!(
            (&*withheld[0].reason, &withheld[0].tiers[..]),
            ("VgpuGuest", &[][..])
        );
        assert!(!withheld[0].message.contains("nvidia-smi"), "{withheld:?}");
    }

    const ON: MigMode = MigMode {
        current: true,
        pending: true,
    };

    fn owned(start: u8, id: Option<u32>) -> Owned {
        let profile = "1g.10gb".parse().unwrap();
        Owned {
            placement: Placement { start, profile },
            id,
        }
    }

    fn instance(start: u32, id: u32) -> MigInstance {
        MigInstance {
            profile: "1g.10gb".into(),
            start,
            id,
            uuid: None,
        }
    }

    /// The state at rest of a GPU in MIG mode with these instances, whose record names these.
    fn at_rest(instances: &[MigInstance], switched: bool, owned: &[Owned]) -> GpuDescription {
        let mut description = two_h100();
        let gpu = &mut description.gpus[0];
        gpu.mig_mode = ON;
        gpu.mig_instances = instances.to_vec();
        let record = GpuChanges {
            switched_mig_on: switched,
            instances: owned.to_vec(),
            ..GpuChanges::default()
        };
        let ours = BTreeMap::from([(gpu.uuid.clone(), record)]);
        KnownGpus::default()
            .at_rest(description, &ours)
            .gpus
            .remove(0)
    }

    #[test]
    fn partitions_of_tranche_are_not_in_the_inventory() {
        // The second has just been made, and its id was not written yet.
        let two = [instance(6, 7), instance(5, 8)];
        let ours = [owned(6, Some(7)), owned(5, None)];
        let gpu = at_rest(&two, true, &ours);
        assert_eq!(
            (gpu.mig_instances, gpu.mig_mode),
            (vec![], MigMode::default())
        );
        // MIG mode was on before.
        let gpu = at_rest(&two, false, &ours);
        assert_eq!((gpu.mig_instances, gpu.mig_mode), (vec![], ON));
        // Another instance is in the place of one of ours.
        let gpu = at_rest(&two, true, &[owned(6, Some(9)), owned(5, Some(8))]);
        assert_eq!(
            (gpu.mig_instances, gpu.mig_mode),
            (vec![instance(6, 7)], ON)
        );
        // Others use the mode that Tranche has switched on.
        let gpu = at_rest(&[instance(6, 7), instance(0, 1)], true, &ours);
        assert_eq!(
            (gpu.mig_instances, gpu.mig_mode),
            (vec![instance(0, 1)], ON)
        );
        let gpu = at_rest(&[], true, &[]);
        assert_eq!(gpu.mig_mode, MigMode::default());
    }

    #[test]
    fn a_gpu_has_the_same_memory_with_and_without_mig_mode() {
        let mut known = KnownGpus::default();
        let off = two_h100();
        let none = BTreeMap::new();
        assert_eq!(known.at_rest(off.clone(), &none), off);
        let mut on = off.clone();
        let gpu = &mut on.gpus[0];
        gpu.mig_mode = ON;
        (gpu.memory_total, gpu.memory_reserved, gpu.multiprocessors) = (80_000 << 20, 0, None);
        let mut expected = off.clone();
        expected.gpus[0].mig_mode = ON;
        assert_eq!(known.at_rest(on.clone(), &none), expected);
        // It was never seen without MIG mode, so NVML's values are used.
        assert_eq!(KnownGpus::default().at_rest(on.clone(), &none), on);
    }
}
