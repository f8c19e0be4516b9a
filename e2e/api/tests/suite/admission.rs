//! The API server refuses invalid objects.

use anyhow::{Context, ensure};
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, PostParams};
use serde_json::{Value, json};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, Request, run_on_a_hollow_node, wait};

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
            ("1Gi", "1k", "cores"),
            ("20", "10", "for example 20Gi"),
            ("4096", "10", "for example 4096Mi"),
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

/// Whoever selects our devices: a class of an administrator, a selector of the claim, an alternative.
#[test]
fn sizes_are_checked_for_all_who_select_the_driver() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("classes").await?;
        let classes: Api<DeviceClass> = Api::all(case.client.clone());
        let (own, foreign) = (case.unique("gpu-small"), case.unique("other"));
        for (name, driver) in [(&own, "gpu.tranche.dev"), (&foreign, "gpu.example.com")] {
            let expression = format!(r#"device.driver == "{driver}""#);
            let class = serde_json::from_value(json!({
                "metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]},
            }))?;
            classes.create(&PostParams::default(), &class).await?;
            let (classes, name) = (classes.clone(), name.clone());
            case.afterwards("the class", async move {
                classes.delete(&name, &DeleteParams::default()).await?;
                Ok(())
            });
        }
        let exactly = |class: &str, memory: &str, selector: Option<&str>| {
            let mut request =
                json!({"deviceClassName": class, "capacity": {"requests": {"memory": memory}}});
            if let Some(expression) = selector {
                request["selectors"] = json!([{"cel": {"expression": expression}}]);
            }
            json!({"devices": {"requests": [{"name": "gpu", "exactly": request}]}})
        };
        let alternative = |class: &str, memory: &str| {
            let request = json!({"name": "a", "deviceClassName": class, "capacity": {"requests": {"memory": memory}}});
            json!({"devices": {"requests": [{"name": "gpu", "firstAvailable": [request]}]}})
        };
        let ours = r#"device.driver == "gpu.tranche.dev""#;
        // The API server learns of the class some milliseconds after it was written.
        wait::for_answer("the class to be known", wait::USUAL, async || {
            let answer = namespace.claim("known", &exactly(&own, "0", None)).await;
            if answer.is_ok() {
                namespace
                    .claims()
                    .delete("known", &DeleteParams::default())
                    .await?;
            }
            Ok(answer.is_err().then_some(()))
        })
        .await?;
        for (number, wrong) in [
            exactly(&own, "0", None),
            exactly(&own, "20", None),
            alternative(&own, "0"),
            exactly(&foreign, "0", Some(ours)),
        ]
        .iter()
        .enumerate()
        {
            let Err(error) = namespace.claim(&format!("wrong-{number}"), wrong).await else {
                anyhow::bail!("was let in: {wrong}");
            };
            let error = format!("{error:#}");
            ensure!(
                error.contains("capacity.requests.memory"),
                "{wrong}: {error}"
            );
        }
        for (number, right) in [
            exactly(&own, "1Gi", None),
            alternative(&own, "1Gi"),
            exactly(&foreign, "20", None),
        ]
        .iter()
        .enumerate()
        {
            namespace.claim(&format!("right-{number}"), right).await?;
        }
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
