//! `kubectl tranche` on the cluster.

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::process::Command;
use tranche_api::tier::Tier;
use tranche_e2e::kubectl::tranche;
use tranche_e2e::workload::text;
use tranche_e2e::{Case, Request, SYSTEM, policy, run, run_on_a_node, wait};

/// The row of `get` for a pod, once the node has written the claim's status.
async fn ready(namespace: &str, pod: &str) -> anyhow::Result<Value> {
    wait::for_answer("the pod's device", wait::USUAL, async || {
        let arguments = [
            "get",
            "pod",
            pod,
            "--namespace",
            namespace,
            "--output",
            "json",
        ];
        let item = tranche(&arguments).await?.json()?["items"][0].take();
        Ok((item["isReady"] == true).then_some(item))
    })
    .await
}

#[test]
fn get_top_and_map_show_the_pods_parts_of_gpus() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition, Tier::Exclusive, Tier::Capped]).await?;
        let namespace = case.namespace("kubectl").await?;
        let name = namespace.name();
        let uuids = [&case.gpus[0].uuid, &case.gpus[1].uuid];
        let share = Request::capped("20Gi", "25").on(uuids[0]);
        let part = Request::profile("1g.10gb").that(&format!(
            r#"device.attributes["gpu.tranche.dev"].parentUUID == "{}""#,
            uuids[1]
        ));
        let shared = namespace.idle("shared", &share).await?;
        let divided = namespace.idle("divided", &part).await?;
        shared.started().await?;
        divided.started().await?;

        let got = ready(name, "shared").await?;
        ensure!(
            got["gpuUUID"] == **uuids[0] && got["tier"] == "capped" && got["cores"] == 25,
            "{got}"
        );
        let got = ready(name, "divided").await?;
        let data = divided.device_data().await?;
        ensure!(
            got["gpuUUID"] == **uuids[1] && got["migUUID"] == data["migUUID"],
            "{got}, and the claim has {data}"
        );
        // The MIG device and the GPU both lead back to the pod.
        for device in [text(&got, "migUUID")?, uuids[1]] {
            let found = tranche(&["get", "gpu", device, "--output", "json"])
                .await?
                .json()?;
            ensure!(found["items"][0]["pods"] == json!(["divided"]), "{found}");
        }

        let top = tranche(&["top", "gpus", "--output", "json"])
            .await?
            .json()?;
        let rows = top["gpus"].as_array().context("rows")?;
        let row = rows
            .iter()
            .find(|row| row["uuid"] == **uuids[0])
            .with_context(|| format!("no row of {}: {top}", uuids[0]))?;
        ensure!(
            row["allocatedMemory"] == 20_u64 << 30 && row["room"]["freeCores"] == 75,
            "{row}"
        );
        let pods = tranche(&["top", "pods", "--namespace", name])
            .await?
            .output()?;
        ensure!(
            pods.contains("shared") && pods.contains("partition 1g.10gb"),
            "{pods}"
        );

        let map = tranche(&["map", "--ascii"]).await?.output()?;
        ensure!(map.is_ascii() && map.contains(&format!("{name}/")), "{map}");
        let yaml = tranche(&["map", "--output", "yaml"]).await?.output()?;
        ensure!(yaml.contains(uuids[0].as_str()), "{yaml}");

        let cost = tranche(&["cost", "--by", "claim", "--output", "json"])
            .await?
            .json()?;
        let total = &cost["total"];
        let number = |field: &str| total[field].as_f64().unwrap_or_default();
        let parts: f64 = ["held", "free", "stranded", "notOffered", "unknown"]
            .map(number)
            .iter()
            .sum();
        ensure!(
            (parts - number("all")).abs() < 1e-5 && number("held") > 0.0,
            "{cost}"
        );
        Ok(())
    })
}

/// One user has no rights, and one may list the claims of one namespace.
#[test]
fn users_see_what_their_rights_allow_and_what_is_missing() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let nobody = case.unique("nobody");
        for command in [
            &["get", "claims"][..],
            &["get", "gpus"],
            &["top"],
            &["map"],
            &["cost"],
        ] {
            let arguments = [command, &["--as", &nobody]].concat();
            let line = tranche(&arguments).await?.error()?;
            ensure!(
                line.contains("you may not list resourceclaims.resource.k8s.io"),
                "{line}"
            );
        }
        let doctor = tranche(&["doctor", "--as", &nobody]).await?;
        ensure!(
            doctor.stdout.contains("you may not list gpunodes"),
            "{doctor:?}"
        );

        let namespace = case.namespace("rights").await?;
        let (name, user) = (namespace.name(), case.unique("user"));
        let role: Role = serde_json::from_value(json!({
            "metadata": {"name": "claims"},
            "rules": [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["list"]}],
        }))?;
        Api::namespaced(case.client.clone(), name)
            .create(&PostParams::default(), &role)
            .await?;
        let binding: RoleBinding = serde_json::from_value(json!({
            "metadata": {"name": "claims"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "claims"},
            "subjects": [{"kind": "User", "name": user}],
        }))?;
        Api::namespaced(case.client.clone(), name)
            .create(&PostParams::default(), &binding)
            .await?;
        let share = Request::capped("1Gi", "10");
        namespace.started("mine", &share).await?;
        let as_user = ["--namespace", name, "--as", &user];
        let got = wait::for_answer("the user's rights", wait::USUAL, async || {
            let got = tranche(&[&["get"][..], &as_user].concat()).await?;
            Ok(got.is_success.then_some(got))
        })
        .await?;
        ensure!(got.stdout.contains("mine"), "{got:?}");
        ensure!(
            got.stderr
                .contains("you may not list gpunodes.gpu.tranche.dev"),
            "{got:?}"
        );
        let top = tranche(&[&["top", "pods"][..], &as_user].concat()).await?;
        ensure!(
            top.stderr
                .contains(&format!("only those of {name} are shown")),
            "{top:?}"
        );
        ensure!(top.is_success && top.stdout.contains("mine"), "{top:?}");
        Ok(())
    })
}

#[test]
fn doctor_finds_nothing_wrong_and_collect_packs_no_secret() -> anyhow::Result<()> {
    // Alone on the cluster: `doctor` examines all nodes, and other tests break nodes.
    run(async |case: &Case| {
        for plugin in case.plugins() {
            plugin.ready(None).await?;
            plugin.settled().await?;
        }
        let doctor = tranche(&["doctor", "--output", "json"]).await?.json()?;
        let findings = doctor["findings"].as_array().context("findings")?;
        for check in [
            "Kubernetes version",
            "API resource.k8s.io/v1",
            "feature gates",
            "your rights",
            "dropped fields",
        ] {
            let found = findings.iter().find(|it| it["check"] == check);
            ensure!(
                found.is_some_and(|it| it["outcome"] == "good"),
                "{check}: {doctor}"
            );
        }

        let (planted, token) = (
            case.unique("planted"),
            "eyJhbGciOiJSUzI1NiJ9.cGxhbnRlZA.c2lnbmF0dXJl",
        );
        let secrets: Api<Secret> = Api::namespaced(case.client.clone(), SYSTEM);
        let secret = serde_json::from_value(
            json!({"metadata": {"name": planted}, "stringData": {"key": planted}}),
        )?;
        secrets.create(&PostParams::default(), &secret).await?;
        let (api, name) = (secrets.clone(), planted.clone());
        case.afterwards("the secret", async move {
            api.delete(&name, &DeleteParams::default()).await?;
            Ok(())
        });
        let namespace = case.namespace("collect").await?;
        namespace
            .claim("claim", &Request::capped("1Gi", "10").spec())
            .await?;
        let annotations = json!({"metadata": {"annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": planted,
            "note": format!("token: {token}"),
        }}});
        let (params, patch) = (PatchParams::default(), Patch::Merge(&annotations));
        namespace.claims().patch("claim", &params, &patch).await?;

        let folder = std::env::temp_dir().join(case.unique("collect"));
        std::fs::create_dir(&folder)?;
        let archive = folder.join("support.tar.gz");
        let file = archive.display().to_string();
        tranche(&["collect", "--file", &file]).await?.output()?;
        let unpacked = Command::new("tar")
            .args(["--extract", "--to-stdout", "--gzip", "--file", &file])
            .output()
            .await?;
        std::fs::remove_dir_all(&folder)?;
        ensure!(unpacked.status.success(), "{unpacked:?}");
        let text = String::from_utf8_lossy(&unpacked.stdout);
        for secret in [planted.as_str(), token] {
            ensure!(!text.contains(secret), "{secret} is in the archive");
        }
        for word in [
            "tranche-node-plugin",
            "inventory",
            namespace.name(),
            "findings",
        ] {
            ensure!(text.contains(word), "{word} is not in the archive");
        }
        Ok(())
    })
}
