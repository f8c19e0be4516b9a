//! The API server refuses invalid objects.

use anyhow::{Context, ensure};
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use serde_json::{Value, json};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, Request, run_on_a_hollow_node};

fn parameters(rest: &Value) -> Value {
    let mut all = json!({"apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig"});
    if let (Some(all), Some(rest)) = (all.as_object_mut(), rest.as_object()) {
        all.extend(rest.clone());
    }
    with_parameters(Request::capped("1Gi", "10").spec(), &all)
}

/// Invalid parameters, and what the error message must name.
fn wrong() -> [(&'static str, Value, &'static str); 4] {
    [
        ("field", json!({"compute": {"mod": "strict"}}), "compute"),
        (
            "value",
            json!({"compute": {"mode": "generous"}}),
            "compute.mode",
        ),
        (
            "priority",
            json!({"compute": {"priority": "urgent"}}),
            "compute.priority",
        ),
        ("other", json!({"memory": "2Gi"}), "memory"),
    ]
}

#[test]
fn a_wrong_share_config_is_refused_when_it_is_written() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("admission").await?;
        for (name, rest, _) in wrong() {
            let Err(error) = namespace.claim(name, &parameters(&rest)).await else {
                anyhow::bail!("{name} was let in: {rest}");
            };
            let error = format!("{error:#}");
            ensure!(error.contains("ShareConfig"), "{name}: {error}");
        }
        namespace
            .claim(
                "right",
                &parameters(&json!({"compute": {"mode": "workConserving", "priority": "high"}})),
            )
            .await?;
        Ok(())
    })
}

#[test]
fn an_invalid_size_is_refused_when_it_is_written() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("sizes").await?;
        for (memory, cores, field) in [
            ("0", "10", "memory"),
            ("-1Gi", "10", "memory"),
            ("1500m", "10", "memory"),
            ("1Gi", "0", "cores"),
            ("1Gi", "101", "cores"),
            ("1Gi", "500m", "cores"),
        ] {
            let spec = Request::capped(memory, cores).spec();
            let claim = namespace.claim("wrong", &spec).await.map(drop);
            let template = namespace.template("wrong", &spec).await;
            for (kind, answer) in [("claim", claim), ("template", template)] {
                let Err(error) = answer else {
                    anyhow::bail!("a {kind} for {memory} and {cores} was let in");
                };
                let error = format!("{error:#}");
                ensure!(error.contains(field), "{kind}, {memory}, {cores}: {error}");
            }
        }
        namespace
            .claim("right", &Request::capped("1Mi", "100").spec())
            .await?;
        Ok(())
    })
}

/// The driver's own validation is tested with the same policies.
const POLICIES: &str = include_str!("../../../../api/testdata/sharing-policies.json");

#[test]
fn admission_and_driver_accept_the_same_policies() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let policies: Api<DynamicObject> = Api::all_with(
            case.client.clone(),
            &ApiResource::erase::<SharingPolicy>(&()),
        );
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        for shared in serde_json::from_str::<Vec<Value>>(POLICIES)? {
            let policy = serde_json::from_value(json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
                "metadata": {"name": "judged"}, "spec": shared["spec"],
            }))?;
            match (
                shared["refused"].as_str(),
                policies.create(&dry_run, &policy).await,
            ) {
                (None, answer) => drop(answer.with_context(|| shared.to_string())?),
                (Some(field), Err(error)) => {
                    let error = error.to_string();
                    ensure!(error.contains(field), "{shared}: {error}");
                }
                (Some(_), Ok(_)) => anyhow::bail!("was let in: {shared}"),
            }
        }
        Ok(())
    })
}
