//! Somebody deletes files of a claim whose pod runs.

use anyhow::ensure;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, Request, run_on_a_node};

/// The kubelet does not call Prepare for a container that starts again in its pod's sandbox.
#[test]
fn a_container_starts_again_after_its_cdi_specs_were_deleted() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("deleted").await?;
        let share = Request::capped("4Gi", "10");
        namespace.template("share", &share.spec()).await?;
        let mut object = manifest("pod", &[Source::Template("share")], &IDLE);
        object["spec"]["restartPolicy"] = "Always".into();
        let pod = namespace.pod_from(object).await?;
        pod.started().await?;
        let files = case.node.claim_files().await?;
        for deleted in [
            "rm /var/run/cdi/gpu.tranche.dev-claim.json",
            "rm /var/run/cdi/gpu.tranche.dev-*",
        ] {
            case.node.shell(deleted).await?;
            pod.restart_container(&case.node).await?;
            let shown = pod.nvidia_smi().await?;
            ensure!(shown.len() == 1 && shown[0].1 == 4096, "{shown:?}");
            let restored = case.node.claim_files().await?;
            ensure!(restored == files, "{restored:?} instead of {files:?}");
        }
        Ok(())
    })
}
