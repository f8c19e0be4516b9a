//! What users see of what a node publishes: a condition, and events about changes.

use std::collections::BTreeSet;

use tranche_api::WithheldGpu;
use tranche_api::conditions::{ALL_OFFERED, State};
use tranche_api::gpu_node::Published;

/// The most bytes of an event's action.
const LONGEST_ACTION: usize = 128;

/// The condition `AllOffered` of a node for which this is published.
#[must_use]
pub fn condition(published: &Published) -> State {
    let (holds, reason, message) = if !published.problem.is_empty() {
        (false, "NotPublished", published.problem.clone())
    } else if published.withheld.is_empty() {
        (true, "AllOffered", String::new())
    } else {
        let entries: Vec<_> = published.withheld.iter().map(text).collect();
        (false, "Withheld", entries.join("; "))
    };
    State {
        kind: ALL_OFFERED,
        holds,
        reason,
        message,
    }
}

/// One event to publish on the GpuNode, and on the policy that has to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whether something got worse.
    pub warning: bool,
    /// In CamelCase.
    pub reason: &'static str,
    /// Distinguishes different problems of one node: an event that differs only in its note counts
    /// as a repetition.
    pub action: String,
    /// For people.
    pub note: String,
    /// The SharingPolicy that has to change.
    pub policy: Option<String>,
}

/// The relevant changes from one record to the next.
#[must_use]
pub fn news(before: &Published, after: &Published) -> Vec<News> {
    let mut news = Vec::new();
    if !after.problem.is_empty() && after.problem != before.problem {
        news.push(News {
            warning: true,
            reason: "NotPublished",
            action: "Publish".to_owned(),
            note: after.problem.clone(),
            policy: None,
        });
    }
    for entry in &after.withheld {
        if !before.withheld.contains(entry) {
            news.push(News {
                warning: true,
                reason: "GpuWithheld",
                action: action(&entry.reason, &entry.gpu),
                note: text(entry),
                policy: entry.policy.clone(),
            });
        }
    }
    let gpus = |published: &Published| -> BTreeSet<String> {
        published.withheld.iter().map(|e| e.gpu.clone()).collect()
    };
    for gpu in gpus(before).difference(&gpus(after)) {
        news.push(News {
            warning: false,
            reason: "GpuReleased",
            action: action("Release", gpu),
            note: format!("GPU {gpu} is no longer withheld"),
            policy: None,
        });
    }
    news
}

fn action(what: &str, gpu: &str) -> String {
    let mut action = format!("{what} {gpu}");
    let end = (0..=LONGEST_ACTION.min(action.len()))
        .rev()
        .find(|end| action.is_char_boundary(*end));
    action.truncate(end.unwrap_or_default());
    action
}

fn text(entry: &WithheldGpu) -> String {
    let tiers: Vec<_> = entry.tiers.iter().map(|tier| tier.as_str()).collect();
    let where_not = match &tiers[..] {
        [] => String::new(),
        tiers => format!(" in the tier {}", tiers.join(", ")),
    };
    format!(
        "GPU {} is not offered{where_not} ({}): {}",
        entry.gpu, entry.reason, entry.message
    )
}

#[cfg(test)]
mod tests {
    use tranche_api::Tier;
    use tranche_api::withheld::reason;

    use super::*;

    fn published(withheld: &[WithheldGpu]) -> Published {
        Published {
            withheld: withheld.to_vec(),
            ..Published::default()
        }
    }

    #[test]
    fn what_did_not_change_is_no_news() {
        let lost = WithheldGpu::whole("index 1", reason::GPU_LOST, "it fell off".to_owned());
        let small = WithheldGpu {
            tiers: vec![Tier::Capped],
            policy: Some("default".to_owned()),
            ..WithheldGpu::whole("GPU-a", reason::TOO_SMALL, "too small".to_owned())
        };
        let (none, one) = (published(&[]), published(std::slice::from_ref(&lost)));
        let both = published(&[lost, small]);
        assert_eq!(news(&none, &none), []);
        assert_eq!(news(&both, &both), []);
        let written = news(&one, &both);
        assert_eq!(written.len(), 1);
        assert_eq!(
            written[0].note,
            "GPU GPU-a is not offered in the tier capped (TooSmall): too small"
        );
        assert_eq!(written[0].policy.as_deref(), Some("default"));
        let healed = news(&both, &one);
        assert_eq!(
            (healed.len(), healed[0].warning, healed[0].reason),
            (1, false, "GpuReleased")
        );
        let actions: BTreeSet<_> = news(&none, &both).into_iter().map(|n| n.action).collect();
        assert_eq!(actions.len(), 2, "each problem is an event of its own");
    }

    #[test]
    fn an_action_is_never_longer_than_the_api_allows() {
        assert_eq!(action("MigMode", &"é".repeat(100)).len(), 128);
    }

    #[test]
    fn the_condition_names_what_is_not_offered() {
        assert!(condition(&published(&[])).holds);
        let lost = WithheldGpu::whole("index 1", reason::GPU_LOST, "it fell off".to_owned());
        let state = condition(&published(&[lost]));
        assert!(!state.holds);
        assert_eq!(
            state.message,
            "GPU index 1 is not offered (GpuLost): it fell off"
        );
    }
}
