//! `cost`: what holders pay for an hour, what is free, what is stranded, and which holders use less than they have.
//!
//! ```text
//!  prices ─► split ─► bill ─► CostReport  the price of a GPU for an hour, by product: an administrator's, or a default
//!                                         split: that price among the GPU's holders, what is free and what is stranded
//!  calculator                             jobs on whole GPUs against jobs on shares
//! ```
//!
//! **What a holder pays.** A partition pays for its compute slices, as clouds price MIG. A share with sizes pays the mean of its
//! part of the memory and its part of the cores. Timeshared shares, which have no sizes, pay equal parts. The parts of a GPU add
//! up to its price.

mod bill;
mod calculator;
mod prices;
mod split;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer};
use tranche_api::usage::Peak;

use crate::args::CostBy;
use crate::model::{Model, Tenant};
use crate::money::Money;
use crate::output::{Block, Table, Tone, View, bytes, or_dash, span};
use crate::top::size;

pub use bill::{Bill, Item, bill, of_gpu};
pub use calculator::{Calculator, CalculatorError, Comparison, compare};
pub use prices::{PriceError, Prices, key};

/// Hours in a month, as clouds count them.
const MONTH: u64 = 730;
/// Seconds without a kernel after which a holder is idle.
const IDLE: u64 = 600;
/// How much more than it uses a share should have, percent: a program fails at the first byte above its limit.
const HEADROOM: u64 = 25;
const GI: u64 = 1 << 30;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CostReport {
    /// How the rows are grouped.
    pub by: CostBy,
    /// What holders pay, the most expensive first.
    pub rows: Vec<Row>,
    /// Where the money goes.
    pub total: Total,
    /// Holders that use nothing of what they pay for; `None` where the use is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<Vec<Idle>>,
    /// Shares that use so little that they could be smaller; `None` where the use is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub right_sizes: Option<Vec<RightSize>>,
    /// Products whose price is a default of this release.
    pub default_prices: BTreeMap<String, Dollars>,
    /// Products without a price: the sums do not include their GPUs.
    pub unpriced: BTreeSet<String>,
    /// Entries of the ConfigMap that are not prices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub price_errors: Vec<String>,
}

/// An amount in JSON: dollars as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dollars(pub Money);

impl Serialize for Dollars {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0.dollars())
    }
}

impl std::fmt::Display for Dollars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What the holders of a namespace, a claim or a tier pay.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// The namespace, `namespace/claim`, or the tier.
    pub name: String,
    /// Devices and shares.
    pub devices: usize,
    pub per_hour: Dollars,
    /// For a month of 730 hours.
    pub per_month: Dollars,
    /// Requested memory, bytes.
    pub requested_memory: u64,
    /// Memory in use now, bytes, where it is known for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_memory: Option<u64>,
    /// The sum of the most memory that each of them used, bytes, where it is known for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory: Option<u64>,
}

/// Where the price of all GPUs goes, for an hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Total {
    /// All GPUs with a price.
    pub all: Dollars,
    /// What holders pay.
    pub held: Dollars,
    /// What is free and can be allocated.
    pub free: Dollars,
    /// What is free but cannot be allocated.
    pub stranded: Dollars,
    /// GPUs that are not offered.
    pub not_offered: Dollars,
    /// GPUs in partitions whose node does not say how they are divided.
    pub unknown: Dollars,
}

/// A holder that uses nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Idle {
    /// `namespace/claim`.
    pub claim: String,
    /// Since its last kernel.
    pub idle_seconds: u64,
    /// What it pays for an hour.
    pub per_hour: Dollars,
}

/// A share that could be smaller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RightSize {
    /// `namespace/claim`.
    pub claim: String,
    /// Bytes that it requested.
    pub requested_memory: u64,
    /// Bytes that it uses now.
    pub used_memory: u64,
    /// The highest use that was measured, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<Peak>,
    /// Bytes that it should request if it never uses more.
    pub suggested_memory: u64,
}

impl RightSize {
    /// Its use and the suggested size, as the end of a sentence.
    #[must_use]
    pub fn in_words(&self) -> String {
        let suggested = bytes(self.suggested_memory);
        match self.peak {
            Some(peak) => format!(
                "used at most {} in the last {}; if it never uses more, ask for {suggested}",
                size(peak.bytes),
                span(peak.watched_seconds)
            ),
            None => format!(
                "uses {} now; if it never uses more, ask for {suggested}",
                size(self.used_memory)
            ),
        }
    }
}

#[must_use]
pub fn answer(model: &Model, by: CostBy, prices: &Prices, errors: &[PriceError]) -> CostReport {
    let Bill {
        items,
        total,
        default_prices,
        unpriced,
    } = bill(model, prices);
    let is_known = model.usage_unknown.is_none();
    CostReport {
        by,
        rows: rows(&items, by),
        total,
        idle: is_known.then(|| idle(&items)),
        right_sizes: is_known.then(|| {
            let sizes = items.iter().filter_map(|item| right_size(item.tenant));
            sizes.collect()
        }),
        default_prices,
        unpriced,
        price_errors: errors.iter().map(ToString::to_string).collect(),
    }
}

fn rows(items: &[Item<'_>], by: CostBy) -> Vec<Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for item in items {
        let tenant = item.tenant;
        let name = match by {
            CostBy::Namespace => tenant.namespace.clone(),
            CostBy::Claim => claim(tenant),
            CostBy::Tier => tenant.device.tier.to_string(),
            CostBy::Node => tenant.device.node.clone(),
        };
        let row = rows.entry(name.clone()).or_insert_with(|| Row {
            name,
            used_memory: Some(0),
            peak_memory: Some(0),
            ..Row::default()
        });
        row.devices += 1;
        row.per_hour.0 = row.per_hour.0 + item.per_hour;
        row.requested_memory += tenant.device.memory.unwrap_or_default();
        let used = tenant.used.map(|used| used.memory);
        row.used_memory = add(row.used_memory, used);
        let peak = tenant.used.and_then(|used| used.peak);
        row.peak_memory = add(row.peak_memory, peak.map(|peak| peak.bytes));
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    for row in &mut rows {
        row.per_month.0 = row.per_hour.0.times(MONTH);
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.per_hour));
    rows
}

/// The sum, where both are known.
fn add(sum: Option<u64>, more: Option<u64>) -> Option<u64> {
    let (sum, more) = sum.zip(more)?;
    Some(sum.saturating_add(more))
}

fn claim(tenant: &Tenant) -> String {
    format!("{}/{}", tenant.namespace, tenant.claim)
}

fn idle(items: &[Item<'_>]) -> Vec<Idle> {
    let idle = items.iter().filter_map(|item| {
        let idle = item.tenant.used?.idle_seconds;
        Some(Idle {
            claim: claim(item.tenant),
            idle_seconds: idle.filter(|seconds| *seconds >= IDLE)?,
            per_hour: Dollars(item.per_hour),
        })
    });
    let mut idle: Vec<Idle> = idle.collect();
    idle.sort_by_key(|it| std::cmp::Reverse(it.per_hour));
    idle
}

/// The size that a share should have if it never uses more than until now; `None` where that is not less than it has. Only shares
/// have a free choice of size. Suggestions are whole GiB. A share that uses nothing gets no suggestion.
pub(crate) fn right_size(tenant: &Tenant) -> Option<RightSize> {
    let device = &tenant.device;
    let requested = device.memory.filter(|_| device.tier.has_shim())?;
    let used = tenant.used?;
    let most = used.peak.map_or(used.memory, |peak| peak.bytes);
    let wanted = most.saturating_add(most / 100 * HEADROOM);
    let suggested = wanted.div_ceil(GI).saturating_mul(GI);
    (most > 0 && suggested < requested).then(|| RightSize {
        claim: claim(tenant),
        requested_memory: requested,
        used_memory: used.memory,
        peak: used.peak,
        suggested_memory: suggested,
    })
}

impl View for CostReport {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        let name = match self.by {
            CostBy::Namespace => "NAMESPACE",
            CostBy::Claim => "CLAIM",
            CostBy::Tier => "TIER",
            CostBy::Node => "NODE",
        };
        let mut header = vec![name, "DEVICES", "PER HOUR", "PER MONTH"];
        if is_wide || self.idle.is_some() {
            header.extend(["REQUESTED", "USED", "PEAK"]);
        }
        let mut table = Table::new(&header);
        for row in &self.rows {
            let mut cells = vec![
                row.name.clone(),
                row.devices.to_string(),
                row.per_hour.to_string(),
                row.per_month.to_string(),
            ];
            if is_wide || self.idle.is_some() {
                cells.push(size(row.requested_memory));
                cells.push(or_dash(row.used_memory.map(size)));
                cells.push(or_dash(row.peak_memory.map(size)));
            }
            table.row(Tone::Plain, cells);
        }
        if table.is_empty() {
            blocks.push(Block::plain("no claim has a GPU with a price"));
        } else {
            blocks.push(Block::Table(table));
        }
        blocks.extend(self.total.lines());
        blocks.extend(self.hints());
        blocks.extend(self.remarks());
        blocks
    }
}

impl Total {
    fn lines(&self) -> Vec<Block> {
        let line = |tone, name, amount: Dollars| {
            let month = amount.0.times(MONTH);
            Block::Line(
                tone,
                format!("{name:<12} {amount:>10} an hour {month:>12} a month"),
            )
        };
        let mut lines = vec![Block::plain(""), line(Tone::Heading, "all GPUs", self.all)];
        let others = [
            (Tone::Plain, "held", self.held),
            (Tone::Good, "free", self.free),
            (Tone::Warning, "stranded", self.stranded),
            (Tone::Warning, "not offered", self.not_offered),
            (Tone::Warning, "unknown", self.unknown),
        ];
        let shown = others
            .into_iter()
            .filter(|(_, name, amount)| *name == "held" || *amount > Dollars::default());
        lines.extend(shown.map(|(tone, name, amount)| line(tone, name, amount)));
        lines
    }
}

impl CostReport {
    fn hints(&self) -> Vec<Block> {
        let idle = self.idle.iter().flatten().map(|it| {
            let text = format!(
                "idle: {} has run nothing for {} and pays {} an hour",
                it.claim,
                span(it.idle_seconds),
                it.per_hour
            );
            Block::Line(Tone::Warning, text)
        });
        let sizes = self.right_sizes.iter().flatten().map(|it| {
            let text = format!(
                "right size: {} asked for {} and {}",
                it.claim,
                bytes(it.requested_memory),
                it.in_words()
            );
            Block::Line(Tone::Warning, text)
        });
        idle.chain(sizes).collect()
    }

    fn remarks(&self) -> Vec<Block> {
        let mut remarks = Vec::new();
        if !self.default_prices.is_empty() {
            let prices: Vec<_> = self
                .default_prices
                .iter()
                .map(|(product, price)| format!("{product} {price}"))
                .collect();
            remarks.push(format!(
                "prices are defaults of this release, not yours: {}; set yours in the ConfigMap tranche-prices",
                prices.join(", ")
            ));
        }
        if !self.unpriced.is_empty() {
            let products: Vec<_> = self.unpriced.iter().cloned().collect();
            remarks.push(format!(
                "not in the sums, because nobody set a price: {}; set it in the ConfigMap tranche-prices",
                products.join(", ")
            ));
        }
        let errors = self.price_errors.iter();
        remarks.extend(errors.map(|error| format!("ConfigMap tranche-prices, {error}")));
        let remarks = remarks.into_iter();
        remarks.map(|text| Block::Line(Tone::Faint, text)).collect()
    }
}

#[cfg(test)]
mod tests;
