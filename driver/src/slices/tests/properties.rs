use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::Device;
use proptest::prelude::*;
use serde_json::json;
use tranche_api::gpu_node::{Gpu, GpuVfio};
use tranche_api::names::{attribute, capacity};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;
use tranche_api::withheld::{WithheldGpu, reason};

use super::{all_tiers, devices, input, inventory, limits, objects, planned, policy};
use crate::claim::DeviceName;
use crate::policy::terms;
use crate::slices::{Content, NodeInput, PlannedSlice, Position, SlicePlan, plan};
use crate::testing::gpu;

fn any_gpus() -> impl Strategy<Value = Vec<Gpu>> {
    let vfio = prop::option::of((0..200_u32, any::<bool>()));
    let one = (
        0..200_u32,
        16..200_u64,
        0..2_u64,
        0..3_u8,
        0..1_u64 << 20,
        vfio,
    )
        .prop_map(|(minor, gib, reserved, product, odd, vfio)| {
            let mut gpu = gpu(minor);
            gpu.vfio = vfio.map(|(iommu_group, is_free)| GpuVfio {
                iommu_group,
                obstacle: (!is_free).then(|| "no VFIO".to_owned()),
            });
            gpu.product_name = format!("Product {product}");
            gpu.memory = Quantity::from_bytes((gib << 30) + odd);
            gpu.reserved_memory = Quantity::from_bytes(reserved << 29);
            gpu
        });
    // Mostly the sizes of real nodes, sometimes more than several counter slices hold.
    let count = prop_oneof![8 => 0..=8_usize, 1 => 9..=64_usize];
    count
        .prop_flat_map(move |count| prop::collection::vec(one.clone(), count))
        .prop_map(|mut gpus| {
            let mut seen = BTreeSet::new();
            gpus.retain(|gpu| seen.insert(gpu.minor));
            gpus
        })
}

fn any_policy() -> impl Strategy<Value = SharingPolicy> {
    (
        prop::sample::subsequence(Tier::ALL.to_vec(), 1..=Tier::ALL.len()),
        prop::option::of(0..3_u8),
        0..3_i32,
        (1..=128_u32, 0..=16_u32, 0..1024_u64),
        prop_oneof![Just(1_u64), 1..5000_u64, (10..31_u32).prop_map(|bits| 1 << bits)],
        (prop::option::of(1..4_u64), prop::option::of(1..=100_u32), 1..=128_u32),
        prop::sample::select(vec![1_u32, 2, 4, 5, 10, 20, 25, 50]),
    )
        .prop_map(|(tiers, product, priority, (most, expected, context), step, (steps, cores, time), cores_step)| {
            policy(
                "p",
                &json!({
                    "tiers": tiers,
                    "products": product.map(|product| format!("Product {product}")).into_iter().collect::<Vec<_>>(),
                    "priority": priority,
                    "capped": {
                        "maxSharers": most,
                        "expectedSharers": expected.min(most),
                        "contextMemory": format!("{context}Mi"),
                        "memoryStep": step,
                        "defaultMemory": steps.map(|steps| steps * step),
                        "coresStep": cores_step,
                        "defaultCores": cores.map(|cores| cores.next_multiple_of(cores_step).min(100)),
                    },
                    "timeshared": {"maxSharers": time},
                }),
            )
        })
}

fn any_policies() -> impl Strategy<Value = Vec<SharingPolicy>> {
    prop::collection::vec(any_policy(), 0..4).prop_map(|mut policies| {
        for (index, policy) in policies.iter_mut().enumerate() {
            policy.metadata.name = Some(format!("p{index}"));
        }
        policies
    })
}

proptest! {
    #[test]
    fn every_plan_is_within_the_apis_limits(gpus in any_gpus(), policies in any_policies()) {
        let plan = planned(&inventory(gpus), &policies);
        limits::check(&objects(&plan));
        // If a policy's contexts leave nothing of a small GPU to share, or its node reports no division, the plan says
        // so.
        for entry in &plan.withheld {
            let expected = match &entry.tiers[..] {
                [Tier::Partition] => reason::NOT_DIVIDED,
                [Tier::Capped] => reason::TOO_SMALL,
                [Tier::Passthrough] => reason::NO_VFIO,
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(&*entry.reason, expected);
        }
    }

    #[test]
    fn a_gpu_that_is_withheld_changes_no_other(
        gpus in any_gpus(),
        policies in any_policies(),
        which in any::<prop::sample::Index>(),
        whole: bool,
    ) {
        prop_assume!(!gpus.is_empty());
        let uuid = gpus[which.index(gpus.len())].uuid.clone();
        let tiers = if whole { vec![] } else { vec![Tier::Capped] };
        let mine = WithheldGpu { tiers, ..WithheldGpu::whole(&uuid, reason::MIG_MODE, String::new()) };
        let (inventory, labels) = (inventory(gpus), BTreeMap::new());
        let before = planned(&inventory, &policies);
        let after = plan(&NodeInput {
            withheld: std::slice::from_ref(&mine),
            ..input(&inventory, &policies, &labels)
        }).unwrap();
        limits::check(&objects(&after));
        prop_assert!(after.withheld.contains(&mine));
        let is_withheld = |device: &Device| {
            let attributes = device.attributes.as_ref().unwrap();
            let tier = device.name.parse::<DeviceName>().unwrap().tier();
            mine.covers(attributes[attribute::UUID].string.as_deref().unwrap(), tier)
        };
        let mut expected = devices(&before);
        expected.retain(|device| !is_withheld(device));
        prop_assert_eq!(devices(&after), expected);
    }

    #[test]
    fn shares_never_reach_into_reserve_or_contexts(gpus in any_gpus(), policy in any_policy()) {
        let policies = [SharingPolicy { spec: tranche_api::SharingPolicySpec { products: vec![], ..policy.spec }, ..policy }];
        let inventory = inventory(gpus);
        let plan = planned(&inventory, &policies);
        {
            let terms = terms(&policies, &BTreeMap::new(), &gpu(0)).unwrap().capped;
            let contexts = terms.context_memory * u64::from(terms.expected_sharers);
            for device in devices(&plan).iter().filter(|device| device.name.ends_with("capped")) {
                let uuid = device.attributes.as_ref().unwrap()[attribute::UUID].string.as_ref().unwrap();
                let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid).unwrap();
                let memory = &device.capacity.as_ref().unwrap()[capacity::MEMORY];
                let usable = Quantity::try_from(&memory.value).unwrap().to_count().unwrap();
                let (total, reserved) = (gpu.memory.to_count().unwrap(), gpu.reserved_memory.to_count().unwrap());
                prop_assert!(usable + reserved + contexts <= total);
                // And rounding loses at most one step.
                prop_assert!(usable + reserved + contexts + terms.memory_step > total);
            }
        }
    }

    #[test]
    fn the_order_of_what_comes_in_does_not_matter(
        (gpus, shuffled) in any_gpus().prop_flat_map(|gpus| (Just(gpus.clone()), Just(gpus).prop_shuffle())),
        policies in any_policies(),
    ) {
        let ordered = planned(&inventory(gpus), &policies);
        let mut unordered = inventory(vec![]);
        unordered.gpus = shuffled;
        let reversed: Vec<_> = policies.iter().rev().cloned().collect();
        prop_assert_eq!(planned(&unordered, &reversed), ordered);
    }

    #[test]
    fn a_gpu_that_is_lost_changes_no_other(gpus in any_gpus(), lost in any::<prop::sample::Index>()) {
        prop_assume!(!gpus.is_empty());
        let policies = [all_tiers()];
        let before = planned(&inventory(gpus.clone()), &policies);
        let mut left = gpus;
        let address = left.remove(lost.index(left.len())).pci_bus_id.parse().unwrap();
        let after = planned(&inventory(left), &policies);
        let own = Position::Gpu(address, 0).to_string();
        let others = |plan: &SlicePlan| -> Vec<PlannedSlice> {
            plan.slices
                .iter()
                .filter(|slice| matches!(slice.content, Content::Devices(_)))
                .filter(|slice| !slice.name.starts_with(&own))
                .cloned()
                .collect()
        };
        prop_assert_eq!(others(&before), others(&after));
    }
}
