//! `kubectl tranche ui` in a real browser.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, ensure};
use fantoccini::key::Key;
use k8s_openapi::api::rbac::v1::Role;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Config;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tranche_e2e::browser::View;
use tranche_e2e::{
    Browser, Case, Namespace, PodHandle, Request, account, kubectl, run_on_a_node, wait,
};

const DESK: View = View {
    width: 1280,
    height: 800,
    is_dark: false,
};
/// Returns a line for each accessibility problem of the page.
const CHECKS: &str = include_str!("../../browser/checks.js");
/// The focused element: the UUID of a GPU, or an id.
const FOCUSED: &str = "document.activeElement.dataset.uuid ?? document.activeElement.id";

/// The running command, and its page in a browser.
struct Page {
    browser: Browser,
    command: Child,
}

impl Page {
    /// Starts the command with these options, opens the address that it prints, and waits until the page shows the cluster.
    async fn open(options: &[&str]) -> anyhow::Result<Self> {
        let mut command = Command::new(kubectl::binary()?)
            .arg("ui")
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("running kubectl-tranche")?;
        let output = command.stdout.take().context("the command's output")?;
        let url = BufReader::new(output)
            .lines()
            .next_line()
            .await?
            .context("the command ended")?;
        let browser = Browser::start().await?;
        browser.look(DESK).await?;
        browser.open(&url).await?;
        let _: bool = browser
            .wait_for(
                "the cluster's GPUs",
                wait::USUAL,
                "return document.querySelector('#summary .value') !== null",
            )
            .await?;
        Ok(Self { browser, command })
    }

    /// Ends both. The page and the browser must not have written warnings or errors.
    async fn close(mut self) -> anyhow::Result<()> {
        let complaints = self.browser.complaints().await?;
        self.browser.close().await?;
        self.command.kill().await?;
        ensure!(complaints.is_empty(), "{complaints:#?}");
        Ok(())
    }

    /// Waits until the page has the scheduler's message on a pod, which may change with other objects of the cluster.
    async fn has_reason(&self, pod: &PodHandle) -> anyhow::Result<()> {
        loop {
            let message = pod.unschedulable().await?;
            let find = format!(
                "return document.getElementById('waiting').innerText.includes({})",
                json!(message)
            );
            let shown = self
                .browser
                .wait_for::<bool>("the waiting pod's reason", wait::LIVE, &find)
                .await;
            if shown.is_ok() || pod.unschedulable().await? == message {
                return shown.map(drop).context(message);
            }
        }
    }

    async fn checked(&self, view: View) -> anyhow::Result<()> {
        self.browser.look(view).await?;
        let problems: Vec<String> = self.browser.evaluate(CHECKS).await?;
        ensure!(problems.is_empty(), "{view:?}: {problems:#?}");
        Ok(())
    }

    /// Gives each GPU of the node a pod of this namespace, and searches for the namespace, so that tests on other nodes change nothing in
    /// the map. Returns the pods, and the GPUs' UUIDs in the order of the map, at least two.
    async fn with_own_gpus(
        &self,
        case: &Case,
        namespace: &Namespace,
    ) -> anyhow::Result<(Vec<PodHandle>, Vec<String>)> {
        let mut pods = Vec::new();
        for (nth, gpu) in case.gpus.iter().enumerate() {
            let request = Request::capped("10Gi", "25").on(&gpu.uuid);
            let name = format!("notebook-{nth}");
            pods.push(namespace.started(&name, &request).await?);
        }
        self.search_for(namespace).await?;
        let script = format!(
            "const tiles = [...document.querySelectorAll('section:not([hidden]) li:not([hidden]) > .tile')];
             return tiles.length === {} && tiles.map((it) => it.dataset.uuid)",
            pods.len()
        );
        let tiles: Vec<String> = self
            .browser
            .wait_for("the GPUs", wait::USUAL, &script)
            .await?;
        ensure!(tiles.len() >= 2, "{tiles:?}");
        Ok((pods, tiles))
    }

    async fn search_for(&self, namespace: &Namespace) -> anyhow::Result<()> {
        self.search(&format!("{}/", namespace.name())).await
    }

    /// Puts words into the search field, and the focus on it.
    async fn search(&self, words: &str) -> anyhow::Result<()> {
        let script = format!(
            "const search = document.getElementById('search');
             search.value = {};
             search.dispatchEvent(new Event('input'));
             search.focus();
             return true",
            json!(words)
        );
        self.browser.evaluate::<bool>(&script).await.map(drop)
    }

    /// Puts the focus on a GPU.
    async fn focus(&self, uuid: &str) -> anyhow::Result<()> {
        let script = format!(
            "document.querySelector('.tile[data-uuid={}]').focus(); return true",
            json!(uuid)
        );
        self.browser.evaluate::<bool>(&script).await.map(drop)
    }

    /// The keys that move the focus from its node to another node, and back.
    async fn way_to_others(&self) -> anyhow::Result<(Key, Key)> {
        let script = "const own = document.activeElement.closest('section');
             return own.nextElementSibling ? 'below' : own.previousElementSibling && 'above'";
        let others: String = self
            .browser
            .wait_for("a second node, as `make e2e` has", wait::USUAL, script)
            .await?;
        Ok(if others == "below" {
            (Key::Down, Key::Up)
        } else {
            (Key::Up, Key::Down)
        })
    }

    /// The UUID of the focused GPU, or the id of the focused element.
    async fn focused(&self) -> anyhow::Result<String> {
        self.browser.evaluate(&format!("return {FOCUSED}")).await
    }

    async fn focus_comes_to(&self, expected: &str) -> anyhow::Result<()> {
        let script = format!("return ({FOCUSED}) === {}", json!(expected));
        let come = self
            .browser
            .wait_for::<bool>("the focus", wait::USUAL, &script);
        come.await.map(drop)
    }

    /// Presses a key until the focus is on a GPU of the node, or of another node. The focus must stay in the first column.
    async fn comes_to(&self, key: Key, node: &str, is_its: bool) -> anyhow::Result<()> {
        let script = format!(
            "const tile = document.activeElement, left = (it) => it.getBoundingClientRect().left;
             return (tile.dataset.node === {}) === {is_its} && left(tile) === left(document.querySelector('.tile'))",
            json!(node)
        );
        let what = format!("the focus by {key:?}");
        wait::for_answer(&what, wait::USUAL, async || {
            self.browser.press(key).await?;
            let is_there: bool = self.browser.evaluate(&script).await?;
            Ok(is_there.then_some(()))
        })
        .await
    }

    /// Presses a key that must move the focus to `expected`.
    async fn goes(&self, key: Key, expected: &str) -> anyhow::Result<()> {
        self.browser.press(key).await?;
        let focused = self.focused().await?;
        ensure!(
            focused == expected,
            "{key:?} goes to {focused} instead of {expected}"
        );
        Ok(())
    }
}

/// A claim's allocation, as soon as the API server has it.
async fn allocated(namespace: &Namespace, claim: &str) -> anyhow::Result<Value> {
    let found = wait::for_one(
        namespace.claims(),
        claim,
        "an allocation",
        wait::USUAL,
        |claim: Option<&ResourceClaim>| {
            let allocation = claim?.status.as_ref()?.allocation.as_ref()?;
            let results = allocation.devices.as_ref()?.results.as_ref()?;
            results.first().map(|it| json!(it))
        },
    );
    found.await
}

#[test]
fn the_page_shows_a_share_in_two_seconds_as_the_api_server_does() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("ui").await?;
        let page = Page::open(&[]).await?;
        let uuid = &case.gpus[1].uuid;
        let request = Request::capped("10Gi", "25").on(uuid);
        let pod = namespace.idle("notebook", &request).await?;
        let claim = pod.claim().await?.name_any();
        let result = allocated(&namespace, &claim).await?;
        let who = format!("{}/notebook", namespace.name());
        let tile = format!("document.querySelector('.tile[data-uuid=\"{uuid}\"]')");
        let find = format!("return {tile}?.innerText.includes('{who}') && {tile}.innerText");
        let text: String = page
            .browser
            .wait_for("the share in the map", wait::LIVE, &find)
            .await?;
        let memory = result["consumedCapacity"]["memory"]
            .as_str()
            .context("memory")?;
        let cores = result["consumedCapacity"]["cores"]
            .as_str()
            .context("cores")?;
        ensure!(
            text.contains("capped") && text.contains(&format!("{memory} · {cores} %")),
            "{text}"
        );

        let details = "return document.getElementById('details').innerText";
        let _: bool = page
            .browser
            .evaluate(&format!("{tile}.click(); return true"))
            .await?;
        let text: String = page.browser.evaluate(details).await?;
        let device = result["device"].as_str().context("device")?;
        for expected in [
            &**uuid,
            device,
            &claim,
            memory,
            case.node.name(),
            &case.gpus[1].pci_bus_id,
        ] {
            ensure!(text.contains(expected), "{expected} is not in:\n{text}");
        }

        // A pod that does not fit waits, with the scheduler's own words.
        let too_big = Request::capped("75Gi", "90").on(uuid);
        let big = namespace.idle("big", &too_big).await?;
        page.has_reason(&big).await?;
        big.delete().await?;

        pod.delete().await?;
        wait::for_none(
            namespace.claims(),
            kube::runtime::watcher::Config::default(),
            "no claim",
            wait::USUAL,
        )
        .await?;
        let gone = format!("return !{tile}.innerText.includes('{who}')");
        let _: bool = page
            .browser
            .wait_for("the share gone from the map", wait::LIVE, &gone)
            .await?;
        page.close().await
    })
}

#[test]
fn the_page_works_by_keyboard_on_a_phone_and_in_both_themes() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("ui").await?;
        let page = Page::open(&[]).await?;
        let (_pods, tiles) = page.with_own_gpus(case, &namespace).await?;

        // Up and Down go from node to node.
        page.search("").await?;
        page.focus(&tiles[0]).await?;
        let (away, back) = page.way_to_others().await?;
        page.comes_to(away, case.node.name(), false).await?;
        page.comes_to(back, case.node.name(), true).await?;
        page.search_for(&namespace).await?;

        // Tab reaches the map once, and arrows move within it.
        let in_tiers = "return document.activeElement.closest('#tiers') !== null";
        page.browser.press(Key::Tab).await?;
        while page.browser.evaluate::<bool>(in_tiers).await? {
            page.browser.press(Key::Tab).await?;
        }
        ensure!(
            page.focused().await? == tiles[0],
            "Tab does not reach the first GPU"
        );
        let visible = "return getComputedStyle(document.activeElement).outlineStyle !== 'none'";
        ensure!(
            page.browser.evaluate::<bool>(visible).await?,
            "the focus is not visible"
        );
        for (key, expected) in [
            (Key::Right, &tiles[1]),
            (Key::Left, &tiles[0]),
            (Key::End, tiles.last().context("tiles")?),
            (Key::Home, &tiles[0]),
        ] {
            page.goes(key, expected).await?;
        }
        page.browser.press(Key::Enter).await?;
        let details = "return document.getElementById('details').innerText";
        let shown: String = page.browser.evaluate(details).await?;
        ensure!(shown.contains(&tiles[0]), "{shown}");
        // Screen readers skip the bar, because words have the same facts.
        let hidden =
            "return [...document.querySelectorAll('.bar')].every((it) => it.ariaHidden === 'true')";
        ensure!(
            page.browser.evaluate::<bool>(hidden).await?,
            "a bar is read aloud"
        );

        for is_dark in [false, true] {
            page.checked(View { is_dark, ..DESK }).await?;
            page.checked(View {
                width: 360,
                height: 740,
                is_dark,
            })
            .await?;
        }
        // On a phone each GPU has a row.
        page.goes(Key::Down, &tiles[1]).await?;
        page.goes(Key::Up, &tiles[0]).await?;
        page.browser.press(Key::Escape).await?;
        let closed = "return document.getElementById('details').hidden";
        ensure!(
            page.browser.evaluate::<bool>(closed).await?,
            "Escape does not close the details"
        );
        ensure!(page.focused().await? == tiles[0], "the focus is lost");
        page.checked(View {
            width: 360,
            height: 740,
            is_dark: false,
        })
        .await?;
        page.close().await
    })
}

#[test]
fn the_focus_and_a_pressed_tier_stay_when_gpus_leave_the_map() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("ui").await?;
        let page = Page::open(&[]).await?;
        let (pods, tiles) = page.with_own_gpus(case, &namespace).await?;
        let press = "window.tier = document.querySelector('#tiers [data-tier=capped]'); tier.click(); return true";
        let _: bool = page.browser.evaluate(press).await?;
        page.focus(&tiles[0]).await?;
        let (last, others) = pods.split_last().context("pods")?;
        for (pod, next) in others.iter().zip(&tiles[1..]) {
            pod.delete().await?;
            page.focus_comes_to(next).await?;
        }
        last.delete().await?;
        page.focus_comes_to("map").await?;

        // The button stays the same element, so that a press is not lost. Without GPUs it stays until it is pressed again.
        let pressed = "return tier.isConnected && tier.ariaPressed === 'true'";
        ensure!(
            page.browser.evaluate::<bool>(pressed).await?,
            "the pressed tier has no button, or another one"
        );
        let released = "tier.click(); return !tier.isConnected || tier.ariaPressed === 'false'";
        ensure!(
            page.browser.evaluate::<bool>(released).await?,
            "the tier stays pressed"
        );
        page.close().await
    })
}

/// A kubeconfig of a user who may read claims and pods of one namespace and nothing else.
async fn narrow_kubeconfig(
    case: &Case,
    namespace: &Namespace,
) -> anyhow::Result<(TempDir, PathBuf)> {
    let (name, here) = ("reader", namespace.name());
    let post = PostParams::default();
    let token = account::create(&case.client, here, name).await?;
    let verbs = ["get", "list", "watch"];
    let role: Role = serde_json::from_value(json!({
        "metadata": {"name": name},
        "rules": [
            {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": verbs},
            {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        ],
    }))?;
    Api::<Role>::namespaced(case.client.clone(), here)
        .create(&post, &role)
        .await?;
    account::bind_here(case, here, name, ("Role", name)).await?;
    let server = Config::infer().await?.cluster_url.to_string();
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server, "insecure-skip-tls-verify": true}}],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": here}}],
    });
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("kubeconfig");
    std::fs::write(&file, config.to_string())?;
    Ok((folder, file))
}

#[test]
fn a_user_of_one_namespace_sees_its_shares_and_what_is_missing() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("ui").await?;
        let other = case.namespace("ui-other").await?;
        let request = Request::capped("10Gi", "25").on(&case.gpus[0].uuid);
        let pod = namespace.idle("mine", &request).await?;
        other.started("theirs", &request).await?;
        pod.started().await?;
        // The user knows the GPU from what its node wrote into the claim.
        pod.device_data().await?;
        let (_folder, kubeconfig) = narrow_kubeconfig(case, &namespace).await?;
        let kubeconfig = kubeconfig.to_str().context("the path is not UTF-8")?;
        let page = Page::open(&["--kubeconfig", kubeconfig]).await?;
        let mine = format!("{}/mine", namespace.name());
        let find = format!("return document.getElementById('map').innerText.includes('{mine}')");
        let _: bool = page
            .browser
            .wait_for("the user's share", wait::USUAL, &find)
            .await?;
        let text: String = page
            .browser
            .evaluate("return document.body.innerText")
            .await?;
        for missing in [
            "you may not list gpunodes.gpu.tranche.dev",
            "you may not list resourceslices.resource.k8s.io",
            "you may not list resourceclaims.resource.k8s.io in all namespaces",
        ] {
            ensure!(text.contains(missing), "{missing} is not in:\n{text}");
        }
        ensure!(
            !text.contains("theirs") && !text.contains("all of it is free"),
            "{text}"
        );
        page.close().await
    })
}
