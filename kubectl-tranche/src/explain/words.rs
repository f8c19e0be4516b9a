//! The explanation in words, with numbers.

use std::collections::BTreeMap;

use tranche_api::Quantity;
use tranche_api::names::{DRIVER, OVERSUBSCRIBED, capacity};
use tranche_driver::claim::DeviceName;
use tranche_scheduler_rules::{DeviceReport, Granted, Holder, Obstacle, RequestReport};

use super::{Conclusion, Explanation, Has, NodeExplanation, WouldFit};
use crate::output::{Block, Tone, View, bytes};

/// The most nodes that are shown.
const MOST_NODES: usize = 20;
/// The most devices that are shown for a request on a node.
const MOST_DEVICES: usize = 12;

impl View for Explanation {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        let mut blocks = vec![Block::Line(self.tone(), self.headline())];
        let line = |text: String| Block::plain(text);
        let state = self.state.iter();
        blocks.extend(state.map(|it| Block::Line(Tone::Warning, format!("  {it}"))));
        blocks.extend(self.obstacles.iter().map(|it| line(format!("  {it}"))));
        for has in &self.has {
            blocks.extend(has.lines().into_iter().map(line));
        }
        let wants = self.nodes.first().map(|node| &node.requests);
        for request in wants.into_iter().flatten() {
            blocks.push(line(format!("  needs {}", needs(request))));
        }
        if self.fits_one_by_one {
            let text = "each of its claims fits alone; but a pod holds all of its claims from its start to its end, those of its init \
                containers, too: one claim that all of its containers name in resources.claims is held once";
            blocks.push(line(format!("  {text}")));
        }
        let most = if is_wide { usize::MAX } else { MOST_NODES };
        for node in self.nodes.iter().take(most) {
            blocks.extend(node.lines(is_wide).into_iter().map(line));
        }
        if self.nodes.len() > most {
            let rest = self.nodes.len() - most;
            blocks.push(line(format!(
                "  and {rest} more nodes: show them with -o wide"
            )));
        }
        if let Some(would) = &self.would_fit_after {
            blocks.push(Block::Line(Tone::Heading, would.line()));
        } else if self.verdict == Conclusion::Waits && self.obstacles.is_empty() {
            let text = "no release of claims was found that makes it fit";
            blocks.push(Block::Line(Tone::Heading, format!("  {text}")));
        }
        if let Some(scheduler) = &self.scheduler {
            let text = format!("  the scheduler says: {scheduler}");
            blocks.push(Block::Line(Tone::Faint, text));
        }
        blocks
    }
}

impl Explanation {
    fn tone(&self) -> Tone {
        match self.verdict {
            Conclusion::Allocated | Conclusion::Fits if self.state.is_empty() => Tone::Good,
            Conclusion::Stopped | Conclusion::Late | Conclusion::Fails => Tone::Bad,
            _ => Tone::Warning,
        }
    }

    fn headline(&self) -> String {
        let Self {
            kind,
            namespace,
            name,
            ..
        } = self;
        let verdict = match self.verdict {
            Conclusion::Allocated if self.has.is_empty() => "waits for no GPU",
            Conclusion::Allocated => "has its devices",
            Conclusion::Stopped if self.has.is_empty() => "waits for no GPU, and does not start",
            Conclusion::Stopped => "has its devices, and does not start",
            Conclusion::Ending => "is ending",
            Conclusion::Late if self.has.is_empty() => "should have ended",
            Conclusion::Late => "should have ended, and still has its devices",
            Conclusion::Fits => "fits: the scheduler should place it now",
            Conclusion::Waits => "waits",
            Conclusion::Fails => "waits: the scheduler stops with an error",
            Conclusion::Unjudged => "waits, and this program cannot say for certain why",
        };
        let partial = if self.is_partial {
            " (partial: not everything could be read)"
        } else {
            ""
        };
        format!("{kind} {namespace}/{name} {verdict}{partial}")
    }
}

/// `40Gi of memory and 25 of cores of capped.gpu.tranche.dev`.
fn needs(request: &RequestReport) -> String {
    let number = match request.count {
        Some(1) => String::new(),
        Some(count) => format!("{count} devices, each "),
        None => "all devices, each ".to_owned(),
    };
    let asked: Vec<String> = request
        .asks
        .iter()
        .map(|(name, amount)| format!("{} of {name}", amount_of(name, *amount)))
        .collect();
    let amounts = if asked.is_empty() {
        String::new()
    } else {
        format!("{}, ", asked.join(" and "))
    };
    format!(
        "{number}{amounts}class {} ({}, request {})",
        request.class, request.claim, request.request
    )
}

impl NodeExplanation {
    fn lines(&self, is_wide: bool) -> Vec<String> {
        let node = &self.node;
        let mut lines: Vec<String> = Vec::new();
        for obstacle in &self.obstacles {
            lines.push(format!("  node {node}: {obstacle}"));
        }
        if let Some(problem) = &self.problem {
            lines.push(format!("  node {node}: {problem}"));
            return lines;
        }
        for pool in &self.pools {
            lines.push(format!(
                "  node {node}: no device of the pool {} of {} is allocated: {}",
                pool.pool, pool.driver, pool.why
            ));
        }
        if self.has_devices {
            let got: Vec<String> = self.would_get.iter().flatten().map(granted).collect();
            // A pod without a claim gets nothing.
            if !got.is_empty() {
                lines.push(format!("  node {node}: has room: {}", got.join(", ")));
            }
            return lines;
        }
        for fault in &self.faults {
            lines.push(format!("  node {node}: {fault}"));
        }
        // A pod that cannot run on the node need not know that the node lacks devices of the kind.
        if !self.obstacles.is_empty() && !is_wide {
            return lines;
        }
        for request in &self.requests {
            // The lines about the pools and the node say why there are no devices.
            let is_said = !self.pools.is_empty() || !self.faults.is_empty();
            if request.devices.is_empty() && is_said {
                continue;
            }
            let several = (self.requests.len() > 1).then_some(request.request.as_str());
            for line in of_request(node, several, request, is_wide) {
                // Requests of several claims may have one name.
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }
}

/// Why a request cannot get a node's devices: one line for each GPU of the kind.
fn of_request(
    node: &str,
    several: Option<&str>,
    request: &RequestReport,
    is_wide: bool,
) -> Vec<String> {
    let place = match several {
        Some(name) => format!("  node {node}, request {name}: "),
        None => format!("  node {node}: "),
    };
    let of_kind = request.devices.iter().filter(|device| {
        let other = device
            .obstacle
            .as_ref()
            .is_some_and(Obstacle::is_another_kind);
        !other
    });
    // A GPU that serves other claims has one line for all its devices; so has a reason that several devices have.
    let mut reasons: Vec<Reason> = Vec::new();
    for device in of_kind {
        let reason = Reason::new(device);
        let same_gpu = reasons.iter_mut().find_map(|known| match (known, &reason) {
            (
                Reason::Serves { gpu, holders },
                Reason::Serves {
                    gpu: own,
                    holders: more,
                },
            ) if gpu == own => Some((holders, more)),
            _ => None,
        });
        if let Some((holders, more)) = same_gpu {
            holders.extend(more.clone());
        } else if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    if reasons.is_empty() {
        return vec![format!("{place}{}", none_of_kind(request))];
    }
    let most = if is_wide { usize::MAX } else { MOST_DEVICES };
    let rest = reasons.len().saturating_sub(most);
    let mut lines: Vec<String> = reasons
        .into_iter()
        .take(most)
        .map(|reason| format!("{place}{}", reason.text()))
        .collect();
    if rest > 0 {
        lines.push(format!("{place}and {rest} more: show them with -o wide"));
    }
    lines
}

/// Why a request cannot get a device.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reason {
    /// A GPU of ours that serves other claims, each with its device.
    Serves {
        gpu: String,
        holders: BTreeMap<String, String>,
    },
    Text(String),
}

impl Reason {
    fn new(report: &DeviceReport) -> Self {
        let (driver, device) = (&report.device.driver, &report.device.device);
        let Some(obstacle) = &report.obstacle else {
            let text = "is free, but not together with the other requested devices";
            return Self::Text(format!("{device} {text}"));
        };
        let holders = obstacle.holders();
        let is_ours = |holder: &Holder| service(&holder.device).is_some();
        match obstacle {
            Obstacle::InUse { .. } | Obstacle::Counters { .. }
                if driver == DRIVER && !holders.is_empty() && holders.iter().all(is_ours) =>
            {
                Self::Serves {
                    gpu: subject(driver, device),
                    holders: holders
                        .iter()
                        .map(|it| (it.claim.clone(), it.device.clone()))
                        .collect(),
                }
            }
            _ => Self::Text(sentence(report, obstacle)),
        }
    }

    /// `gpu-2c4d6e8f serves exclusive to team-c/z`.
    fn text(&self) -> String {
        let (gpu, holders) = match self {
            Self::Serves { gpu, holders } => (gpu, holders),
            Self::Text(text) => return text.clone(),
        };
        let mut ways: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (claim, device) in holders {
            let way = service(device).unwrap_or_default();
            ways.entry(way).or_default().push(claim.clone());
        }
        let texts: Vec<String> = ways
            .into_iter()
            .map(|(way, claims)| format!("{way} to {}", list(claims)))
            .collect();
        format!("{gpu} serves {}", texts.join(", "))
    }
}

/// The kind of device that the node lacks.
fn none_of_kind(request: &RequestReport) -> String {
    if request.devices.is_empty() {
        return "no devices: Tranche offers none there".to_owned();
    }
    let selectors = request
        .devices
        .iter()
        .filter_map(|device| match &device.obstacle {
            Some(Obstacle::NotSelected { selector }) => Some(selector.as_str()),
            _ => None,
        });
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for selector in selectors {
        *counts.entry(selector).or_default() += 1;
    }
    match counts.iter().next() {
        None => format!("no device of class {}", request.class),
        Some((selector, count)) => {
            let devices = if *count == 1 { "device" } else { "devices" };
            format!("the selector is false for {count} {devices} of the class: {selector}")
        }
    }
}

/// `gpu-1f2e3d4c` of a device of ours, the name of another's.
fn subject(driver: &str, device: &str) -> String {
    if driver == DRIVER && device.parse::<DeviceName>().is_ok() {
        return device.splitn(3, '-').take(2).collect::<Vec<_>>().join("-");
    }
    device.to_owned()
}

/// How a device of ours is allocated: its tier, or its profile.
fn service(device: &str) -> Option<String> {
    let name: DeviceName = device.parse().ok()?;
    Some(match name.placement() {
        Some(place) => format!("partition {}", place.profile),
        None if name.oversubscription().is_some() => OVERSUBSCRIBED.to_owned(),
        None => name.tier().to_string(),
    })
}

fn sentence(report: &DeviceReport, obstacle: &Obstacle) -> String {
    let driver = report.device.driver.as_str();
    let device = report.device.device.as_str();
    let gpu = subject(driver, device);
    match obstacle {
        Obstacle::InUse { holders } => format!("{gpu} is in use by {}", names(holders)),
        Obstacle::TooLittle {
            capacity,
            wanted,
            left,
            total,
            holders,
        } => {
            let amount = left_of(capacity, *left, *total);
            let wanted = amount_of(capacity, *wanted);
            if holders.is_empty() {
                format!("{gpu} has {amount}, {wanted} needed: it never has more")
            } else {
                format!(
                    "{gpu} has {amount}, {wanted} needed; held by {}",
                    with_amounts(capacity, holders)
                )
            }
        }
        Obstacle::Counters {
            counter_set,
            counter,
            wanted,
            left,
            holders,
        } => {
            let mut text = format!(
                "{gpu} needs {wanted} of {counter} of {counter_set}, which has {left} left"
            );
            if !holders.is_empty() {
                text = format!("{text}; held by {}", names(holders));
            }
            text
        }
        Obstacle::Taint {
            key,
            value,
            effect,
            rule,
        } => {
            let value = value
                .as_ref()
                .map(|value| format!("={value}"))
                .unwrap_or_default();
            let text = format!("{gpu} has the taint {key}{value}:{effect}");
            match rule {
                Some(rule) => format!("{text} of the DeviceTaintRule {rule}"),
                None => text,
            }
        }
        Obstacle::NoSuchCapacity { capacity } => format!("{device} has no capacity {capacity}"),
        Obstacle::AgainstPolicy {
            capacity,
            wanted,
            most,
        } => match most {
            Some(most) => {
                let (most, wanted) = (amount_of(capacity, *most), amount_of(capacity, *wanted));
                format!("{gpu} gives at most {most} of {capacity} to one claim, {wanted} needed")
            }
            None => format!(
                "{gpu} gives no {} of {capacity}: its request policy has other amounts",
                amount_of(capacity, *wanted)
            ),
        },
        Obstacle::Constraint { constraint } => {
            format!("{device} does not satisfy the constraint {constraint}")
        }
        Obstacle::NotOfClass { .. } | Obstacle::NotSelected { .. } | Obstacle::OtherNode => {
            format!("{device} is of another kind")
        }
    }
}

fn left_of(capacity: &str, left: Quantity, total: Quantity) -> String {
    let (left, total) = (amount_of(capacity, left), amount_of(capacity, total));
    format!("{left} of {total} of {capacity} left")
}

/// Bytes as people write them; other amounts without a unit: 1000 cores are no `1k`.
fn amount_of(capacity: &str, amount: Quantity) -> String {
    let is_bytes = matches!(capacity, capacity::MEMORY | capacity::CONTEXT_MEMORY);
    match amount.to_count() {
        Ok(count) if !is_bytes => count.to_string(),
        _ => amount.to_string(),
    }
}

/// `team-a/x, team-b/y and team-c/z`.
fn list(mut parts: Vec<String>) -> String {
    parts.dedup();
    match parts.pop() {
        None => "nobody".to_owned(),
        Some(last) if parts.is_empty() => last,
        Some(last) => format!("{} and {last}", parts.join(", ")),
    }
}

fn names(holders: &[Holder]) -> String {
    list(holders.iter().map(|holder| holder.claim.clone()).collect())
}

fn with_amounts(capacity: &str, holders: &[Holder]) -> String {
    let parts = holders.iter().map(|holder| match holder.amount {
        Some(amount) => format!("{} ({})", holder.claim, amount_of(capacity, amount)),
        None => holder.claim.clone(),
    });
    list(parts.collect())
}

fn granted(granted: &Granted) -> String {
    let device = &granted.device.device;
    let memory = granted.consumed.get("memory");
    match (granted.share, memory) {
        (true, Some(memory)) => format!("{memory} of {device}"),
        (true, None) => format!("a share of {device}"),
        (false, _) => device.clone(),
    }
}

impl WouldFit {
    fn line(&self) -> String {
        let claims = list(self.release.claims.clone());
        let how = if self.release.smallest && !self.is_bounded {
            ""
        } else {
            "; the search is bounded, so fewer may do"
        };
        format!(
            "  would fit on node {} after the release of {claims}{how}",
            self.node
        )
    }
}

impl Has {
    fn lines(&self) -> Vec<String> {
        let device = &self.device;
        let mut parts = vec![device.kind()];
        parts.extend(device.memory.map(bytes));
        parts.extend(device.cores.map(|cores| format!("{cores} % of the cores")));
        let gpu = device.gpu_uuid.as_deref().unwrap_or(&device.device);
        let ready = if device.is_ready {
            ""
        } else {
            ", not prepared yet"
        };
        let mut lines = vec![format!(
            "  {}: {} of {gpu} on node {}{ready}",
            self.claim,
            parts.join(", "),
            device.node
        )];
        for neighbour in &self.neighbours {
            let mut parts = Vec::new();
            if neighbour.is_admin {
                parts.push("admin access: nothing limits what it uses".to_owned());
            }
            parts.extend(neighbour.memory.map(bytes));
            parts.extend(neighbour.cores.map(|cores| format!("{cores} %")));
            let amounts = if parts.is_empty() {
                String::new()
            } else {
                format!(" ({})", parts.join(", "))
            };
            lines.push(format!("    beside {}{amounts}", neighbour.claim));
        }
        if self.neighbours.is_empty() {
            lines.push("    nobody else is on this GPU".to_owned());
        }
        lines
    }
}
