//! `map`: each GPU as a bar of its holders, what is free, what is stranded and what is used.

use serde::Serialize;
use tranche_api::Tier;

use crate::model::{AllocatedDevice, Gpu, Model, Room, Tenant};
use crate::output::{Block, Tone, View, bytes};
use crate::top::{free, size, use_of};
use crate::usage::Used;

/// Cells of a bar.
const WIDTH: u64 = 40;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Map {
    pub nodes: Vec<NodeMap>,
    /// Whether only ASCII characters are drawn.
    #[serde(skip)]
    pub is_ascii: bool,
}

/// The GPUs of a node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMap {
    pub node: String,
    /// What is wrong with it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    pub gpus: Vec<GpuMap>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMap {
    pub uuid: String,
    /// The short form of the UUID, for people.
    #[serde(skip)]
    pub short: String,
    pub product: String,
    pub memory: u64,
    /// The tier that it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// The segments of the bar, in order. A segment's length is its part of the sum.
    pub segments: Vec<Segment>,
    /// What is free.
    pub room: Room,
    /// What is used of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
    /// The claims that only observe it (admin access), with what they use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub observers: Vec<String>,
    /// Why none of it is offered: the reason of its GpuNode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
}

/// A part of a bar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Segment {
    /// Its size in bytes, slices or shares.
    pub part: u64,
    #[serde(flatten)]
    pub content: Content,
}

/// What a segment shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Content {
    /// An allocated device, or one claim's share.
    Held {
        /// `namespace/claim` of each, with its limits and what it uses.
        tenants: Vec<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        profile: Option<String>,
    },
    Free,
    /// Free, but no claim can get it.
    Stranded,
    /// Not offered.
    Closed,
}

/// The map of all GPUs.
#[must_use]
pub fn map(model: &Model, is_ascii: bool) -> Map {
    let nodes = model.nodes.iter().map(|node| NodeMap {
        node: node.name.clone(),
        problems: node.problems.clone(),
        gpus: node.gpus.iter().map(gpu_map).collect(),
    });
    Map {
        nodes: nodes.collect(),
        is_ascii,
    }
}

fn gpu_map(gpu: &Gpu) -> GpuMap {
    GpuMap {
        uuid: gpu.uuid.clone(),
        short: gpu.short().to_owned(),
        product: gpu.product.clone(),
        memory: gpu.memory,
        tier: gpu.tier,
        segments: segments(gpu),
        room: gpu.room.clone(),
        used: gpu.used,
        observers: gpu.observers().map(named).collect(),
        withheld: gpu.withheld_whole().map(str::to_owned),
    }
}

fn segments(gpu: &Gpu) -> Vec<Segment> {
    let segment = |part, content| Segment { part, content };
    let rest = |free: u64, stranded: u64| {
        [
            segment(free - stranded.min(free), Content::Free),
            segment(stranded, Content::Stranded),
        ]
    };
    let all = match &gpu.room {
        Room::All => vec![segment(1, Content::Free)],
        Room::NotOffered => vec![segment(1, Content::Closed)],
        Room::Nothing | Room::Unknown => {
            let whole = gpu.held.iter().map(|held| segment(1, of_device(held)));
            whole.collect()
        }
        Room::Places { free, .. } => {
            let held = gpu
                .held
                .iter()
                .flat_map(of_tenants)
                .map(|(_, content)| segment(1, content));
            held.chain([segment(*free, Content::Free)]).collect()
        }
        Room::Shares(room) => {
            let held = gpu
                .held
                .iter()
                .flat_map(of_tenants)
                .map(|(memory, content)| segment(memory, content));
            held.chain(rest(room.free_memory, room.stranded_memory))
                .collect()
        }
        Room::Slices(room) => {
            let mut held: Vec<&AllocatedDevice> = gpu.held.iter().collect();
            held.sort_by_key(|held| held.slice);
            let taken = u64::from(room.memory - room.free_memory.min(room.memory));
            let sum: u64 = held.iter().map(|it| it.memory).sum();
            // The memory slices in use, divided in proportion to the partitions' memory.
            let slices = |memory: u64| (memory * taken + sum / 2).checked_div(sum).unwrap_or(1);
            held.into_iter()
                .map(|it| segment(slices(it.memory), of_device(it)))
                .chain(rest(room.free_memory.into(), room.stranded_memory.into()))
                .collect()
        }
    };
    all.into_iter().filter(|it| it.part > 0).collect()
}

fn of_device(held: &AllocatedDevice) -> Content {
    let tenants = of_tenants(held).filter_map(|(_, content)| match content {
        Content::Held { tenants, .. } => Some(tenants),
        _ => None,
    });
    Content::Held {
        tenants: tenants.flatten().collect(),
        profile: held.profile.clone(),
    }
}

/// A claim that only observes, with what it uses.
fn named(tenant: &Tenant) -> String {
    let name = format!("{}/{}", tenant.namespace, tenant.claim);
    match tenant.used {
        Some(used) => format!("{name} (uses {})", use_of(used)),
        None => name,
    }
}

/// Each tenant with its memory.
fn of_tenants(held: &AllocatedDevice) -> impl Iterator<Item = (u64, Content)> {
    held.holders().map(|tenant| {
        let device = &tenant.device;
        let mut text = format!("{}/{}", tenant.namespace, tenant.claim);
        if let Some(memory) = device.memory {
            text = format!("{text} {}", bytes(memory));
        }
        if let Some(cores) = device.cores.filter(|_| device.tier.has_shim()) {
            text = format!("{text} {cores}%");
        }
        if let Some(used) = tenant.used {
            text = format!("{text} (uses {})", use_of(used));
        }
        let content = Content::Held {
            tenants: vec![text],
            profile: device.profile.clone(),
        };
        (device.memory.unwrap_or_default(), content)
    })
}

/// The characters of a bar.
struct Pen {
    left: char,
    right: char,
    fill: char,
    free: char,
    stranded: char,
    closed: char,
}

const UNICODE: Pen = Pen {
    left: '▕',
    right: '▏',
    fill: '█',
    free: '░',
    stranded: '╳',
    closed: '·',
};

const ASCII: Pen = Pen {
    left: '[',
    right: ']',
    fill: '=',
    free: '.',
    stranded: 'x',
    closed: '-',
};

impl Pen {
    /// The bar. A segment begins with its letter and has at least one cell.
    fn bar(&self, segments: &[Segment]) -> String {
        let widths = widths(segments);
        let mut letters = letters();
        let mut bar = String::from(self.left);
        for (segment, width) in segments.iter().zip(widths) {
            let fill = match segment.content {
                Content::Held { .. } => self.fill,
                Content::Free => self.free,
                Content::Stranded => self.stranded,
                Content::Closed => self.closed,
            };
            let mut width = width;
            if matches!(segment.content, Content::Held { .. }) {
                bar.push(letters.next().unwrap_or('?'));
                width -= 1;
            }
            bar.extend((0..width).map(|_| fill));
        }
        bar.push(self.right);
        bar
    }
}

/// `A` to `Z`, `a` to `z`, again and again.
fn letters() -> impl Iterator<Item = char> {
    ('A'..='Z').chain('a'..='z').cycle()
}

/// The cells of each segment: at least one, and [`WIDTH`] in total unless there are more segments. The cells that rounding down
/// leaves go to the segments with the largest remainders.
fn widths(segments: &[Segment]) -> Vec<u64> {
    let sum: u128 = segments.iter().map(|it| u128::from(it.part)).sum();
    let exact = segments
        .iter()
        .map(|it| u128::from(it.part) * u128::from(WIDTH));
    let (mut widths, rest): (Vec<u64>, Vec<u128>) = exact
        .map(|cells| {
            let whole = u64::try_from(cells / sum.max(1)).unwrap_or(WIDTH);
            (
                whole.max(1),
                if whole == 0 { 0 } else { cells % sum.max(1) },
            )
        })
        .unzip();
    let mut order: Vec<usize> = (0..widths.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(rest[*index]));
    let left = WIDTH.saturating_sub(widths.iter().sum());
    for index in order
        .into_iter()
        .take(usize::try_from(left).unwrap_or_default())
    {
        widths[index] += 1;
    }
    // The widest segments give up cells for segments that are shown larger than they are.
    while widths.iter().sum::<u64>() > WIDTH {
        match widths.iter_mut().max_by_key(|width| **width) {
            Some(widest) if *widest > 1 => *widest -= 1,
            _ => break,
        }
    }
    widths
}

impl View for Map {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        if self.nodes.iter().all(|node| node.gpus.is_empty()) {
            return vec![Block::plain("there are no GPUs that Tranche knows here")];
        }
        let pen = if self.is_ascii { &ASCII } else { &UNICODE };
        let mut blocks = Vec::new();
        for node in &self.nodes {
            blocks.push(Block::Line(Tone::Heading, node.node.clone()));
            let problems = node.problems.iter();
            blocks.extend(problems.map(|it| Block::Line(Tone::Warning, format!("  {it}"))));
            for gpu in &node.gpus {
                blocks.extend(gpu.lines(pen, is_wide));
            }
        }
        let Pen {
            free,
            stranded,
            closed,
            ..
        } = pen;
        let legend = format!("{free} free   {stranded} stranded   {closed} not offered");
        blocks.push(Block::Line(Tone::Faint, legend));
        blocks
    }
}

impl GpuMap {
    fn lines(&self, pen: &Pen, is_wide: bool) -> Vec<Block> {
        let uuid = if is_wide { &self.uuid } else { &self.short };
        let idle = if self.withheld.is_some() { "-" } else { "free" };
        let tier = self.tier.map_or(idle, Tier::as_str);
        let tone = match (
            &self.room,
            self.segments
                .iter()
                .any(|it| it.content == Content::Stranded),
        ) {
            _ if self.withheld.is_some() => Tone::Warning,
            (Room::All, _) => Tone::Good,
            (Room::NotOffered, _) | (_, true) => Tone::Warning,
            _ => Tone::Plain,
        };
        let first = format!(
            "  {uuid} {} {tier:<11} {} {}, free: {}",
            pen.bar(&self.segments),
            self.product,
            size(self.memory),
            match &self.withheld {
                Some(reason) => format!("not offered ({reason})"),
                None => free(&self.room),
            }
        );
        let first = match self.used {
            Some(used) => format!("{first}, used: {}", use_of(used)),
            None => first,
        };
        let mut lines = vec![Block::Line(tone, first)];
        let mut letters = letters();
        for segment in &self.segments {
            let Content::Held { tenants, profile } = &segment.content else {
                continue;
            };
            let letter = letters.next().unwrap_or('?');
            let profile = profile.iter().map(|it| format!("{it}: "));
            let text = format!(
                "    {letter} {}{}",
                profile.collect::<String>(),
                tenants.join(", ")
            );
            lines.push(Block::plain(text));
        }
        if !self.observers.is_empty() {
            let text = format!("    admin access: {}", self.observers.join(", "));
            lines.push(Block::plain(text));
        }
        lines
    }
}

#[cfg(test)]
mod tests;
