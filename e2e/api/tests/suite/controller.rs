//! Two replicas of the controller; only the leader writes.

use anyhow::Context;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams};
use tranche_e2e::{Case, SYSTEM, run_on_a_hollow_node, system, wait};

use crate::support::LEADER;

fn holder(lease: Option<&Lease>) -> Option<String> {
    lease?
        .spec
        .as_ref()?
        .holder_identity
        .clone()
        .filter(|holder| !holder.is_empty())
}

#[test]
fn another_replica_takes_over_and_heals() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let _held = LEADER.lock().await;
        let before = case.plugin().published().await?;
        let leases: Api<Lease> = Api::namespaced(case.client.clone(), SYSTEM);
        let leader = holder(Some(&leases.get("tranche-controller").await?)).context("a leader")?;
        // Its pod and a slice are deleted together, so that another replica repairs the slice.
        let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
        pods.delete(&leader, &DeleteParams::default().grace_period(0))
            .await?;
        let slices: Api<ResourceSlice> = Api::all(case.client.clone());
        let (name, old) = before.first_key_value().context("a slice")?;
        slices.delete(name, &DeleteParams::default()).await?;
        wait::for_one(
            leases,
            "tranche-controller",
            "another leader",
            wait::USUAL,
            |lease| (holder(lease)? != leader).then_some(()),
        )
        .await?;
        case.plugin()
            .slices("the slice back", wait::USUAL, |slices| {
                let slices = system::complete(slices)?;
                (slices.len() == before.len() && slices.get(name)?.uid() != old.uid()).then_some(())
            })
            .await
    })
}
