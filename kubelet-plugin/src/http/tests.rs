//! The metrics of shares, and that the reference lists all metrics.

mod usage;

use std::fmt::Write as _;

use tranche_driver::health::{Status, Verdict, Verdicts};
use tranche_node::nvml::Hang;
use tranche_node::watchdog::compare::Findings;
use tranche_shim_core::layout;

use tranche_api::usage::NodeUsage;

use super::{Known, exposition};
use crate::metrics::{Method, Metrics};
use crate::share::last_findings::{LastFindings, Watched};
use crate::testing::{Plugin, World, capped, claim, claim_ref, whole};

const REFERENCE: &str = include_str!("../../../docs/reference/metrics.md");

/// All metrics of a node whose GPUs NVML was not asked about.
fn encoded(metrics: &Metrics, world: &World, plugin: &Plugin) -> String {
    let (ledger, usage) = (plugin.preparer.ledger(), NodeUsage::default());
    exposition(
        metrics,
        ledger,
        &world.layout,
        &LastFindings::default(),
        &usage,
        &Known {
            sensors: true,
            ..Known::default()
        },
    )
}

/// The line of one metric of the only share.
fn line<'a>(text: &'a str, name: &str) -> &'a str {
    let mut lines = text.lines().filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with('{'))
    });
    let found = lines.next().unwrap_or_else(|| panic!("{name}: {text}"));
    assert_eq!(lines.next(), None, "one series: {text}");
    found
}

fn write(path: &std::path::Path, at: usize, word: u64) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &word.to_le_bytes(), at as u64).unwrap();
}

#[tokio::test]
async fn a_share_has_its_numbers_as_long_as_it_is_held() {
    let world = World::new();
    let plugin = world.start();
    let metrics = Metrics::default();
    let encode = || encoded(&metrics, &world, &plugin);
    world.api.put(claim(
        "a",
        &[capped("gpu", 0, "20Gi", 25), whole("whole", 1)],
    ));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let device = &record.plan.devices[0];
    let account = world.layout.share("uid-of-a", &device.key).account;
    let context: u64 = 300 << 20;
    let slot = layout::HEADER_LEN;
    for (at, word) in [
        (128, context + (5 << 30)),
        (136, context + (6 << 30)),
        (392, 2_500_000_000),
        (512, 1),
        (slot + 24, 7),
        (slot + 40, 1000),
        (slot + 48, 1_500_000_000),
        (slot + 56, tranche_node::sampler::now() - 60_000_000_000),
    ] {
        write(&account, at, word);
    }
    let text = encode();
    let labels = format!(
        "{{namespace=\"team\",pod=\"pod-of-a\",claim=\"a\",request=\"gpu\",device=\"gpu-00000000-capped\",gpu_uuid=\"{}\"}}",
        device.gpu_uuid
    );
    for (name, value) in [
        ("tranche_share_account_readable", "1"),
        ("tranche_share_memory_limit_bytes", "21474836480"),
        ("tranche_share_memory_used_bytes", "5368709120"),
        ("tranche_share_memory_peak_bytes", "6442450944"),
        ("tranche_share_refused_allocations_total", "7"),
        ("tranche_share_processes", "1"),
        ("tranche_share_compute_limit_ratio", "0.25"),
        ("tranche_share_gpu_time_seconds_total", "2.5"),
        ("tranche_share_launches_total", "1000"),
        ("tranche_share_throttled_seconds_total", "1.5"),
    ] {
        assert_eq!(line(&text, name), format!("{name}{labels} {value}"));
    }
    let last_launch = line(&text, "tranche_share_last_launch_timestamp_seconds");
    let last: f64 = last_launch.rsplit_once(' ').unwrap().1.parse().unwrap();
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((now - 60.0 - last).abs() < 10.0, "{last}, {now}");

    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    let text = encode();
    assert!(
        !text.lines().any(|line| line.starts_with("tranche_share_")),
        "{text}"
    );
}

#[tokio::test]
async fn a_page_that_its_tenant_broke_is_shown_and_breaks_nothing() {
    let world = World::new();
    let plugin = world.start();
    let metrics = Metrics::default();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let key = &record.plan.devices[0].key;
    let account = world.layout.share("uid-of-a", key).account;
    // First every count at its maximum, then an empty page.
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&account).unwrap(),
        &vec![0xff; layout::LEN - 128],
        128,
    )
    .unwrap();
    let text = encoded(&metrics, &world, &plugin);
    assert!(line(&text, "tranche_share_processes").ends_with(" 1024"));
    std::fs::write(&account, "").unwrap();
    let text = encoded(&metrics, &world, &plugin);
    assert!(line(&text, "tranche_share_account_readable").ends_with(" 0"));
    line(&text, "tranche_share_memory_limit_bytes");
    assert!(!text.contains("tranche_share_processes{"), "{text}");
}

/// Names, types and meanings, as a table.
fn table(text: &str) -> String {
    let mut table = String::from("| metric | type | meaning |\n|---|---|---|\n");
    let mut meaning = "";
    for line in text.lines() {
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", _, help] => meaning = help.trim_end_matches('.'),
            ["#", "TYPE", name, kind] => {
                let total = if kind == "counter" { "_total" } else { "" };
                let _ = writeln!(table, "| `{name}{total}` | {kind} | {meaning} |");
            }
            _ => {}
        }
    }
    table
}

#[tokio::test]
async fn the_reference_lists_every_metric() {
    let world = World::new();
    let plugin = world.start();
    let metrics = Metrics::default();
    metrics.observe(Method::Prepare, "ok", std::time::Duration::ZERO);
    metrics.set_hangs(&[Hang {
        object: String::new(),
        call: "nvmlInit_v2",
    }]);
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let key = &record.plan.devices[0].key;
    // A launch of a process that has ended.
    write(&world.layout.share("uid-of-a", key).account, 464, 1);
    let ledger = plugin.preparer.ledger();
    // The first GPU is shared, the second is divided.
    let inventory = &world.ready.inventory;
    let mut usage = usage::everything();
    for (gpu, known) in usage.gpus.iter_mut().zip(&inventory.gpus) {
        gpu.uuid.clone_from(&known.uuid);
    }
    let last_findings = LastFindings::default();
    let found = Findings {
        unowned: Some(0),
        ..Findings::default()
    };
    let uuid = record.plan.devices[0].gpu_uuid.clone();
    last_findings.set(0, [(uuid, Watched::Yes(found))].into(), false);
    let lost = Verdict {
        status: Status::Unhealthy,
        reason: "GpuLost".into(),
        message: String::new(),
        taint: None,
    };
    let verdicts = Verdicts::from([("GPU-lost".to_owned(), lost)]);
    let text = exposition(
        &metrics,
        ledger,
        &world.layout,
        &last_findings,
        &usage,
        &Known {
            inventory: Some(inventory),
            verdicts: Some(&verdicts),
            sensors: true,
        },
    );
    let faulty = "tranche_gpu_healthy{gpu_uuid=\"GPU-lost\",reason=\"GpuLost\"} 0";
    assert!(text.contains(faulty), "{text}");
    let table = table(&text);
    assert!(
        REFERENCE.contains(&table),
        "docs/reference/metrics.md must have this table:\n{table}"
    );
}
