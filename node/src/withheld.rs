//! GPUs that are withheld because of what NVML reports: those that it cannot describe, and those in
//! MIG mode.

use std::collections::BTreeMap;

use tranche_api::WithheldGpu;
use tranche_api::withheld::reason;

use crate::nvml::{BrokenGpu, Description, GpuDescription, NvmlError};

/// The UUIDs of the GPUs when all of them could be described: NVML does not report the UUID of a lost
/// GPU.
#[derive(Clone, Debug, Default)]
pub struct KnownGpus {
    by_index: BTreeMap<u32, String>,
    count: usize,
}

impl KnownGpus {
    /// The GPUs of `description` that are withheld; remembers their UUIDs.
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
            error => WithheldGpu::whole(
                &name,
                reason::NOT_DESCRIBED,
                format!("{error}: see `nvidia-smi -q` and the kernel log (`dmesg`) on the node"),
            ),
        }
    }
}

fn in_mig_mode(gpu: &GpuDescription) -> Option<WithheldGpu> {
    let when = match (gpu.mig_mode.current, gpu.mig_mode.pending) {
        (false, false) => return None,
        (true, true) => "MIG mode is on",
        (true, false) => "MIG mode is on until the GPU's next reset",
        (false, true) => "MIG mode will be on after the GPU's next reset",
    };
    Some(WithheldGpu::whole(
        &gpu.uuid,
        reason::MIG_MODE,
        format!(
            "{when}: this release offers whole GPUs only; switch it off (`nvidia-smi -i {} -mig 0`, and reset the GPU if the command requires it)",
            gpu.uuid
        ),
    ))
}

#[cfg(test)]
mod tests {
    use tranche_api::gpu_node::MigMode;

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
    fn a_gpu_that_cannot_be_described_is_named_with_the_call_that_failed() {
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
    fn mig_mode_now_or_after_the_next_reset_withholds_the_gpu() {
        for (current, pending) in [(true, true), (true, false), (false, true), (false, false)] {
            let mut description = two_h100();
            description.gpus[0].mig_mode = MigMode { current, pending };
            let uuid = description.gpus[0].uuid.clone();
            let withheld = KnownGpus::default().withheld(&description);
            let found: Vec<_> = withheld.iter().map(|w| (&*w.gpu, &*w.reason)).collect();
            let expected = [(&*uuid, "MigMode")];
            assert_eq!(found, expected[..usize::from(current || pending)]);
        }
    }
}
