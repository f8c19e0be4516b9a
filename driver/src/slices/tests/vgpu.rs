//! GPUs that are vGPUs.

use tranche_api::gpu_node::GpuVfio;
use tranche_api::vgpu::{GpuVgpu, VgpuRole};

use super::*;
use crate::mig::tables::h100;

/// A GPU with everything that the other tiers need; only the vGPU is in the way.
#[test]
fn a_vgpu_has_the_tiers_that_work_in_a_virtual_machine() {
    let policies = [policy("p", &json!({"tiers": Tier::ALL}))];
    let mut whole = gpu(0);
    whole.vfio = Some(GpuVfio {
        iommu_group: 7,
        obstacle: None,
    });
    let offered = |gpu: &Gpu| {
        let mut inventory = inventory(vec![gpu.clone()]);
        let mut geometry = h100(&[]);
        geometry.gpus = vec![gpu.uuid.clone()];
        inventory.mig_geometries = vec![geometry];
        let plan = planned(&inventory, &policies);
        let tiers: BTreeSet<_> = names(&plan)
            .iter()
            .map(|name| name.parse::<DeviceName>().unwrap().tier())
            .collect();
        (tiers, plan.withheld)
    };
    assert_eq!(offered(&whole), (Tier::ALL.into(), Vec::new()));
    let mut host = whole.clone();
    host.vgpu = Some(GpuVgpu {
        role: VgpuRole::Host,
        ..GpuVgpu::default()
    });
    assert_eq!(offered(&host), offered(&whole));

    let mut guest = whole;
    guest.vgpu = Some(GpuVgpu {
        role: VgpuRole::Guest,
        ..GpuVgpu::default()
    });
    let (tiers, withheld) = offered(&guest);
    let works = [Tier::Exclusive, Tier::Capped, Tier::Timeshared];
    assert_eq!(tiers, works.into());
    let refused: BTreeSet<_> = withheld.iter().flat_map(|it| it.tiers.clone()).collect();
    let others = Tier::ALL.into_iter().filter(|tier| !works.contains(tier));
    assert_eq!(refused, others.collect());
    for entry in &withheld {
        let tier = entry.tiers[0].as_str();
        assert_eq!(
            (&*entry.reason, entry.policy.as_deref()),
            ("VgpuGuest", Some("p"))
        );
        assert!(
            entry.message.contains("vGPU") && entry.message.contains(tier),
            "{entry:?}"
        );
    }
}
