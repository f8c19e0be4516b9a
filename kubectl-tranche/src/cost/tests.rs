//! The bill of a cluster.

use crate::output::{Format, text};
use crate::testing::{busy, part};
use crate::usage::{PartUsed, Usage, Used};

use super::*;

fn prices(data: &[(&str, &str)]) -> Prices {
    let data = data
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Prices::read(&data.collect()).0
}

fn shown(answer: &impl View) -> String {
    let text = text(answer, Format::Table).unwrap();
    anstream::adapter::strip_str(&text).to_string()
}

#[test]
fn the_parts_of_all_gpus_sum_to_their_prices() {
    let model = Model::new(&busy().snapshot(), &Err("nobody serves it".into()));
    let prices = prices(&[("NVIDIA-H100-80GB-HBM3", "7.00")]);
    for by in [CostBy::Namespace, CostBy::Claim, CostBy::Tier] {
        let answer = answer(&model, by, &prices, &[]);
        let Total {
            all,
            held,
            free,
            stranded,
            ..
        } = answer.total;
        assert_eq!(all.to_string(), "$14.50");
        assert_eq!(held.0 + free.0 + stranded.0, all.0);
        assert_eq!(
            answer.rows.iter().map(|row| row.per_hour.0).sum::<Money>(),
            held.0
        );
        // A seventh of an H100.
        assert_eq!(stranded.to_string(), "$1.00");
        // The T4 has a default price, and the use is not known.
        assert_eq!(answer.default_prices.len(), 1);
        assert!(answer.idle.is_none() && answer.right_sizes.is_none());
    }
    let by_claim = answer(&model, CostBy::Claim, &prices, &[]);
    let of = |name: &str| {
        let row = by_claim.rows.iter().find(|row| row.name == name).unwrap();
        row.per_hour.to_string()
    };
    assert_eq!(of("team-a/left"), "$3.00");
    // The mean of 20 of 77.1 GiB and 25 percent.
    assert_eq!(of("team-a/notebook"), "$1.78");
    assert_eq!(of("team-c/card"), "$0.50");
    let text = shown(&by_claim);
    assert!(
        text.contains("prices are defaults of this release, not yours: Tesla T4 $0.50"),
        "{text}"
    );
}

#[test]
fn idle_and_too_large_shares_are_named_where_the_use_is_known() {
    let used = |memory: u64, idle_seconds| PartUsed {
        all: Used {
            memory: memory << 30,
            time: Some(0.0),
            idle_seconds,
            peak: None,
        },
        ..PartUsed::default()
    };
    let shown_of = |notebook: PartUsed, training: PartUsed| {
        let device = "gpu-a0000000-capped";
        let usage = Usage {
            parts: [
                (part("uid-team-a-notebook", device), notebook),
                (part("uid-team-b-training", device), training),
            ]
            .into(),
            ..Usage::default()
        };
        let model = Model::new(&busy().snapshot(), &Ok(usage));
        shown(&answer(&model, CostBy::Claim, &Prices::default(), &[]))
    };
    let text = shown_of(used(5, Some(7_260)), used(30, Some(599)));
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].ends_with("REQUESTED   USED   PEAK"), "{text}");
    let row = |name: &str| *lines.iter().find(|it| it.starts_with(name)).unwrap();
    assert!(
        row("team-a/notebook").ends_with("20Gi        5Gi    -"),
        "{text}"
    );
    assert!(row("team-c/card").ends_with('-'), "{text}");
    assert!(
        text.contains("idle: team-a/notebook has run nothing for 2h 1m and pays $0.89 an hour"),
        "{text}"
    );
    assert!(
        text.contains("right size: team-a/notebook asked for 20Gi and uses 5Gi now; if it never uses more, ask for 7Gi"),
        "{text}"
    );
    // No line for ten minutes without a kernel, nor for a share whose suggested size is not smaller.
    assert_eq!(text.matches("idle: ").count(), 1, "{text}");
    // The highest use counts, even if it uses less now.
    let with_peak = |memory: u64, peak: u64| {
        let mut used = used(memory, None);
        used.all.peak = Some(Peak {
            bytes: peak << 30,
            watched_seconds: 7_260,
        });
        used
    };
    let text = shown_of(with_peak(5, 10), with_peak(0, 30));
    let line = text.lines().find(|it| it.starts_with("team-a/notebook"));
    assert!(line.unwrap().ends_with("5Gi    10Gi"), "{text}");
    assert!(
        text.contains(
            "right size: team-a/notebook asked for 20Gi and used at most 10Gi in the last 2h 1m; \
             if it never uses more, ask for 13Gi"
        ),
        "{text}"
    );
    let text = shown_of(used(16, None), used(0, None));
    assert!(
        !text.contains("idle: ") && !text.contains("right size: "),
        "{text}"
    );
}

#[test]
fn a_product_without_a_price_is_named_and_left_out() {
    let mut snapshot = busy().snapshot();
    for node in &mut snapshot.gpu_nodes {
        let inventory = node.status.as_mut().and_then(|it| it.inventory.as_mut());
        for gpu in inventory.into_iter().flat_map(|it| &mut it.gpus) {
            gpu.product_name = "Nobody's GPU".into();
        }
    }
    let model = Model::new(&snapshot, &Err(String::new()));
    let answer = answer(&model, CostBy::Namespace, &Prices::default(), &[]);
    assert_eq!((answer.total, answer.rows.len()), (Total::default(), 0));
    assert!(shown(&answer).contains("nobody set a price: Nobody's GPU"));
}

#[test]
fn the_calculator_reproduces_the_example() {
    let comparison = compare(Calculator {
        gpus: 10,
        price: "3.50".parse().unwrap(),
        tenants: 4,
        overhead: 8,
    });
    let text = shown(&comparison.unwrap());
    assert!(
        text.contains("$3.50 → $0.95 per job-hour, −73 %, 180 GPU-hours a day"),
        "{text}"
    );
}
