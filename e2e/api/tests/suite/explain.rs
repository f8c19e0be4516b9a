//! `kubectl tranche explain` against the live scheduler.

use anyhow::{Context, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kubectl_tranche::cluster::Cluster;
use kubectl_tranche::explain::{self, Conclusion, Explanation};
use kubectl_tranche::model::Model;
use kubectl_tranche::output::{self, Format};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tranche_api::names::DRIVER;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, Namespace, Request, account, run_on_a_hollow_node, wait};

use crate::support::read_controller;

/// Nodes that are judged at the same time, because most of a state's time is waiting.
const LANES: usize = 3;
/// The most pods with devices: with more, hardly any other pod fits.
const MOST_HOLDERS: usize = 24;

/// The number of states of a node in which a pod is judged: `TRANCHE_STATES`, or as many as take a few seconds.
fn states() -> anyhow::Result<usize> {
    let asked = std::env::var("TRANCHE_STATES");
    asked.map_or(Ok(60), |states| states.parse().context("TRANCHE_STATES"))
}

async fn explain(case: &Case, namespace: &Namespace, name: &str) -> anyhow::Result<Explanation> {
    let cluster = Cluster::new(case.client.clone(), namespace.name(), "tranche-system");
    let (kind, name) = match name.strip_prefix("claim/") {
        Some(name) => (Some("claim"), name),
        None => (None, name),
    };
    let (facts, snapshot) = explain::read(&cluster, kind, name).await?;
    let model = Model::new(&snapshot, &Err("not asked for".to_owned()));
    Ok(explain::explain(&facts, &model))
}

/// The explanation in words, with all nodes, because other tests have nodes too.
fn shown(explanation: &Explanation) -> anyhow::Result<String> {
    let text = output::text(explanation, Format::Wide)?;
    let mut plain = String::new();
    let mut is_style = false;
    for character in text.chars() {
        match (is_style, character) {
            (false, '\u{1b}') => is_style = true,
            (true, 'm') => is_style = false,
            (false, other) => plain.push(other),
            (true, _) => {}
        }
    }
    Ok(plain)
}

/// Random numbers, the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        // Knuth's MMIX.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or_default() % count
    }

    fn of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }
}

/// A pod for a node, with the claim that has the pod's name.
fn pod(name: &str, node: &str) -> Value {
    let mut pod = manifest(name, &[Source::Claim(name)], &["true"]);
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod
}

/// Creates an object that is deleted after the test.
async fn create<K>(case: &Case, api: &Api<K>, object: Value) -> anyhow::Result<()>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::Serialize
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let object: K = serde_json::from_value(object)?;
    let name = object.meta().name.clone().unwrap_or_default();
    api.create(&PostParams::default(), &object)
        .await
        .with_context(|| format!("creating {name}"))?;
    let (api, what) = (api.clone(), name.clone());
    case.afterwards(&what, async move {
        api.delete(&name, &DeleteParams::default()).await?;
        Ok(())
    });
    Ok(())
}

/// A request with a random kind and size.
fn any_request(random: &mut Random) -> Value {
    let class = random.of(&[
        "capped",
        "capped",
        "capped",
        "concurrent",
        "timeshared",
        "exclusive",
        "partition",
        "hard",
        "any",
    ]);
    let mut exactly = json!({"deviceClassName": format!("{class}.{DRIVER}")});
    let mut amounts = serde_json::Map::new();
    let sized = matches!(class, "capped" | "concurrent" | "any");
    if sized && random.below(4) > 0 {
        let memory = random.of(&[
            "1Gi", "5Gi", "10Gi", "17Gi", "20Gi", "33Gi", "40Gi", "70Gi", "90Gi",
        ]);
        amounts.insert("memory".to_owned(), json!(memory));
    }
    if sized && random.below(2) > 0 {
        amounts.insert(
            "cores".to_owned(),
            json!(random.of(&["1", "10", "25", "40", "60", "100"])),
        );
    }
    if !amounts.is_empty() {
        exactly["capacity"] = json!({"requests": amounts});
    }
    match random.below(8) {
        0 => exactly["count"] = json!(2),
        1 => {
            let size = random.of(&["5Gi", "20Gi", "40Gi", "81Gi"]);
            let expression = format!(
                "device.capacity[\"{DRIVER}\"].?memory.orValue(quantity(\"0\")).compareTo(quantity(\"{size}\")) >= 0"
            );
            exactly["selectors"] = json!([{"cel": {"expression": expression}}]);
        }
        _ => {}
    }
    exactly
}

fn any_claim(random: &mut Random) -> Value {
    let mut requests = vec![json!({"name": "one", "exactly": any_request(random)})];
    let mut constraints = json!([]);
    match random.below(8) {
        0 => {
            requests.push(json!({"name": "two", "exactly": any_request(random)}));
            let kind = random.of(&["matchAttribute", "distinctAttribute"]);
            constraints = json!([{kind: format!("{DRIVER}/uuid")}]);
        }
        1 => {
            let alternatives = (0..2).map(|number| {
                let mut fields = any_request(random);
                fields["name"] = json!(format!("choice-{number}"));
                fields
            });
            requests =
                vec![json!({"name": "one", "firstAvailable": alternatives.collect::<Vec<_>>()})];
        }
        _ => {}
    }
    json!({"devices": {"requests": requests, "constraints": constraints}})
}

/// Whether the scheduler placed the pod; `None` while it has not looked at it.
fn placed(pod: &Pod) -> Option<bool> {
    if pod
        .spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some())
    {
        return Some(true);
    }
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let scheduled = conditions.find(|condition| condition.type_ == "PodScheduled")?;
    (scheduled.reason.as_deref() == Some("Unschedulable")).then_some(false)
}

/// Removes a pod and its claim, and waits until the claim is gone.
async fn remove(namespace: &Namespace, name: &str) -> anyhow::Result<()> {
    let now = DeleteParams::default().grace_period(0);
    namespace.pods().delete(name, &now).await?;
    namespace
        .claims()
        .delete(name, &DeleteParams::default())
        .await?;
    wait::for_one(
        namespace.claims(),
        name,
        "no claim",
        wait::USUAL,
        |claim: Option<&ResourceClaim>| claim.is_none().then_some(()),
    )
    .await
}

#[test]
fn it_agrees_with_the_scheduler_in_random_states() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let states = states()?;
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        println!("states by seed {seed:#x}");
        let lanes = (0..LANES).map(|lane| it_agrees(case, lane, states, seed));
        let mut counts: BTreeMap<bool, usize> = BTreeMap::new();
        for (placed, count) in try_join_all(lanes).await?.into_iter().flatten() {
            *counts.entry(placed).or_default() += count;
        }
        println!("placed or not: {counts:?}");
        ensure!(
            counts.values().all(|count| *count > states / 10) && counts.len() == 2,
            "{counts:?}"
        );
        Ok(())
    })
}

/// Judges random states of its own node. Returns how often the scheduler placed a pod, and how often it did not.
async fn it_agrees(
    case: &Case,
    lane: usize,
    states: usize,
    seed: u64,
) -> anyhow::Result<BTreeMap<bool, usize>> {
    let node = case.unique(&format!("explain-{lane}"));
    case.hollow_node(&node).await?;
    let namespace = case.namespace(&format!("explain-{lane}")).await?;
    let mut random = Random(seed.wrapping_add(lane as u64));
    let mut holders: Vec<String> = Vec::new();
    let mut counts = BTreeMap::new();
    for number in 0..states / LANES {
        if !holders.is_empty() && (holders.len() >= MOST_HOLDERS || random.below(4) == 0) {
            let index = random.below(holders.len());
            remove(&namespace, &holders.swap_remove(index)).await?;
        }
        let name = format!("state-{number}");
        let state = format!("lane {lane}, state {number}");
        let spec = any_claim(&mut random);
        namespace.claim(&name, &spec).await?;
        let before = explain(case, &namespace, &format!("claim/{name}")).await?;
        let judged = before
            .nodes
            .iter()
            .find(|it| it.node == node)
            .with_context(|| format!("{state}: {node} is not judged"))?;
        let problem = &judged.problem;
        ensure!(problem.is_none(), "{state}: {problem:?} of {spec}");
        let fits = judged.has_devices;
        let pod: Pod = serde_json::from_value(self::pod(&name, &node))?;
        namespace
            .pods()
            .create(&PostParams::default(), &pod)
            .await?;
        // The scheduler may see the pod before a recent release; it then tries again.
        let decided = wait::for_one(
            namespace.pods(),
            &name,
            "the scheduler's decision",
            wait::USUAL,
            |pod: Option<&Pod>| pod.and_then(placed).filter(|placed| *placed || !fits),
        )
        .await;
        let Ok(decided) = decided else {
            bail!(
                "{state}: explained as fitting, but it waits: {spec}\n{}",
                shown(&before)?
            );
        };
        ensure!(
            decided == fits,
            "{state}: the scheduler placed it: {decided}; {spec}\n{}",
            shown(&before)?
        );
        // Not each time, because the search for releases takes longer.
        if number % 20 == 0 {
            let after = explain(case, &namespace, &name).await?;
            let expected = if decided {
                Conclusion::Allocated
            } else {
                Conclusion::Waits
            };
            let agrees = after.verdict == expected;
            ensure!(agrees, "{state}: {}", shown(&after)?);
        }
        *counts.entry(decided).or_default() += 1;
        if decided {
            holders.push(name);
        } else {
            remove(&namespace, &name).await?;
        }
    }
    Ok(counts)
}

#[test]
fn what_it_says_of_waiting_and_running_pods() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("why").await?;
        let [one, two] = [case.gpus[0].uuid.as_str(), case.gpus[1].uuid.as_str()];
        let first = namespace
            .idle("first", &Request::capped("40Gi", "40").on(one))
            .await?;
        let whole = namespace
            .idle("whole", &Request::exclusive().on(two))
            .await?;
        first.started().await?;
        whole.started().await?;
        let waiting = namespace
            .idle("waiting", &Request::capped("50Gi", "10"))
            .await?;
        waiting.has_no_room().await?;
        let explanation = explain(case, &namespace, "waiting").await?;
        ensure!(explanation.verdict == Conclusion::Waits, "{explanation:?}");
        let text = shown(&explanation)?;
        let gpu = |uuid: &str| format!("gpu-{}", &uuid["GPU-".len()..][..8]);
        let claim = async |pod: &str| {
            anyhow::Ok(explain(case, &namespace, pod).await?.has[0].claim.clone())
        };
        let (first_claim, whole_claim) = (claim("first").await?, claim("whole").await?);
        let namespace_name = namespace.name();
        for part in [
            format!("pod {namespace_name}/waiting waits"),
            "needs 10 of cores and 50Gi of memory, class capped.gpu.tranche.dev".to_owned(),
            format!("{} has ", gpu(one)),
            format!(" of memory left, 50Gi needed; held by {namespace_name}/{first_claim} (40Gi)"),
            format!(
                "{} serves exclusive to {namespace_name}/{whole_claim}",
                gpu(two)
            ),
            format!(
                "would fit on node {} after the release of {namespace_name}/",
                case.node.name()
            ),
            "the scheduler says: ".to_owned(),
        ] {
            ensure!(text.contains(&part), "{part:?} is not in\n{text}");
        }
        // The suggested release is enough.
        let release = explanation
            .would_fit_after
            .context("whose release helps")?
            .release;
        let released = if release.claims == [format!("{namespace_name}/{first_claim}")] {
            first
        } else {
            whole
        };
        released.delete().await?;
        waiting.started().await?;
        let text = shown(&explain(case, &namespace, "waiting").await?)?;
        for part in ["has its devices", "capped, 50Gi, 10 % of the cores of GPU-"] {
            ensure!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let missing = explain(case, &namespace, "wating")
            .await
            .map(|it| it.verdict);
        let message = missing.unwrap_err().to_string();
        ensure!(message.contains("there is waiting"), "{message}");
        Ok(())
    })
}

/// Such a pod has no claim before it has a node.
#[test]
fn a_waiting_pod_with_a_resource_is_counted_and_explained() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("resource").await?;
        let (class, resource) = (
            case.unique("asks"),
            format!("{}.example.com/gpu", case.unique("r")),
        );
        let expression = format!(
            "device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].isolation == 'exclusive'"
        );
        let classes: Api<DeviceClass> = Api::all(case.client.clone());
        let spec = json!({"extendedResourceName": resource, "selectors": [{"cel": {"expression": expression}}]});
        create(
            case,
            &classes,
            json!({"metadata": {"name": class}, "spec": spec}),
        )
        .await?;
        let asking = async |name: &str, count: usize| {
            let mut pod = manifest(name, &[], &IDLE);
            pod["spec"]["containers"][0]["resources"] = json!({"limits": {&resource: count}});
            namespace.pod_from(pod).await
        };
        let count = case.gpus.len();
        let greedy = asking("greedy", count + 1).await?;
        greedy.unschedulable().await?;
        let explanation = explain(case, &namespace, "greedy").await?;
        ensure!(explanation.verdict == Conclusion::Waits, "{explanation:?}");
        let text = shown(&explanation)?;
        for part in [&class, &resource] {
            ensure!(text.contains(part), "{part} is not in\n{text}");
        }
        let reader = (namespace.name(), "reader");
        account::bind(case, reader.0, reader.1, "tranche-metrics-reader").await?;
        let token = account::create(&case.client, reader.0, reader.1).await?;
        let series = format!("tranche_pods_pending{{namespace=\"{}\"", namespace.name());
        let counted = async |expected: bool| {
            wait::for_answer("the pending pod", wait::USUAL, async || {
                let text = read_controller(case, "/metrics", &token).await?;
                let is_there = text.lines().any(|line| line.starts_with(&series));
                Ok((is_there == expected).then_some(()))
            })
            .await
        };
        counted(true).await?;
        greedy.delete().await?;
        counted(false).await?;

        let modest = asking("modest", 1).await?;
        modest.started().await?;
        let explanation = explain(case, &namespace, "modest").await?;
        ensure!(explanation.has.len() == 1, "{explanation:?}");
        Ok(())
    })
}
