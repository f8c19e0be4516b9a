//! Alerts and dashboards use metrics that exist, and every alert has its page.
use std::collections::BTreeSet;
use std::fs;

use tranche_docs::monitoring::{alerts, dashboards, documented, expressions, metrics};
use tranche_docs::repository;

const RUNBOOKS: &str = "https://github.com/tranche-dev/tranche/blob/main/docs/runbooks/";

/// Tests of the plugin and of the controller compare the reference pages with the metrics.
#[test]
fn every_metric_of_an_expression_is_in_the_reference() {
    let pages = ["metrics.md", "controller-metrics.md"]
        .map(|page| fs::read_to_string(repository().join("docs/reference").join(page)).unwrap());
    let known: BTreeSet<_> = pages.iter().flat_map(|page| documented(page)).collect();
    let known = |name: &str| {
        let of_histogram = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|it| name.strip_suffix(it));
        known.contains(name) || of_histogram.is_some_and(|name| known.contains(name))
    };
    let of_alerts = alerts(&repository())
        .unwrap()
        .into_iter()
        .map(|it| (it.alert, it.expr));
    let of_dashboards = expressions(&repository())
        .unwrap()
        .into_iter()
        .map(|it| (it.place, it.query));
    let mut unknown = Vec::new();
    for (place, query) in of_alerts.chain(of_dashboards) {
        let names = metrics(&query);
        assert!(
            !names.is_empty() || query.contains("up{"),
            "{place}: {query}"
        );
        let missing = names.into_iter().filter(|name| !known(name));
        unknown.extend(missing.map(|name| format!("{place}: {name}")));
    }
    assert!(
        unknown.is_empty(),
        "metrics that are not in docs/reference: {unknown:#?}"
    );
}

#[test]
fn every_alert_has_a_page_and_every_page_an_alert() {
    let mut with_alert = BTreeSet::new();
    for alert in alerts(&repository()).unwrap() {
        let name = &alert.alert;
        assert!(name.starts_with("Tranche"), "{name}");
        assert_eq!(
            alert.annotations.runbook_url,
            format!("{RUNBOOKS}{name}.md")
        );
        let severities = ["critical", "warning", "info"];
        assert!(
            severities.contains(&alert.labels.severity.as_str()),
            "{name}"
        );
        with_alert.insert(format!("{name}.md"));
    }
    let pages: BTreeSet<_> = fs::read_dir(repository().join("docs/runbooks"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(with_alert, pages);
    for page in pages {
        let text = fs::read_to_string(repository().join("docs/runbooks").join(&page)).unwrap();
        let title = format!("# {}\n", page.trim_end_matches(".md"));
        assert!(text.starts_with(&title), "{page}");
        for part in ["\n## How to look\n", "\n## What to do\n"] {
            assert!(text.contains(part), "{page} has no{part}");
        }
    }
}

/// Metrics of memory in one expression must have the same unit.
#[test]
fn a_value_in_mib_meets_no_value_in_bytes() {
    let of_alerts = alerts(&repository())
        .unwrap()
        .into_iter()
        .map(|it| (it.alert, it.expr));
    let of_dashboards = expressions(&repository())
        .unwrap()
        .into_iter()
        .map(|it| (it.place, it.query));
    for (place, query) in of_alerts.chain(of_dashboards) {
        let names = metrics(&query);
        let has = |part| names.iter().any(|name| name.contains(part));
        if has("DCGM_FI_DEV_FB_") && has("_bytes") {
            assert!(query.contains("* 1048576"), "{place}: {query}");
        }
    }
}

#[test]
fn dashboards_have_unique_uids_and_panels_a_title_and_a_unit() {
    let mut uids = BTreeSet::new();
    for (file, dashboard) in dashboards(&repository()).unwrap() {
        let uid = dashboard["uid"].as_str().unwrap().to_owned();
        assert!(
            uid.starts_with("tranche-") && uids.insert(uid.clone()),
            "{file}: {uid}"
        );
        let mut ids = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            assert!(
                ids.insert(panel["id"].as_u64().unwrap()),
                "{file}, {title}: its id is another's"
            );
            if panel["type"] == "row" || panel["type"] == "text" {
                continue;
            }
            assert!(
                panel["fieldConfig"]["defaults"]["unit"].is_string(),
                "{file}, {title}: no unit"
            );
            assert_eq!(
                panel["datasource"]["uid"], "${datasource}",
                "{file}, {title}"
            );
        }
    }
    assert_eq!(uids.len(), 4);
}
