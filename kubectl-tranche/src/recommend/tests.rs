//! The tree's traps, its page, and the claims that it leads to.

use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use tranche_driver::claim::WholeGpuTier;

use super::*;
use crate::testing::part;
use crate::usage::{PartUsed, Usage, Used};

/// Every path through the tree: the answers and the leaf.
fn paths() -> Vec<(Answers, &'static Leaf)> {
    fn follow(next: Next, answers: &Answers, paths: &mut Vec<(Answers, &'static Leaf)>) {
        match next {
            Next::Leaf(leaf) => paths.push((answers.clone(), leaf)),
            Next::Ask(question) => {
                for choice in question.choices {
                    let mut answers = answers.clone();
                    assert!(
                        answers.insert(question.name, choice.answer).is_none(),
                        "asked twice"
                    );
                    follow(choice.next, &answers, paths);
                }
            }
        }
    }
    let mut paths = Vec::new();
    follow(START, &Answers::new(), &mut paths);
    paths
}

#[test]
fn no_path_leads_into_a_trap() {
    for (answers, leaf) in paths() {
        let is = |question, answer| answers.get(question) == Some(&answer);
        let tier = leaf.class.strip_suffix(".gpu.tranche.dev").unwrap();
        assert!(
            !(is("latency", "p99") && matches!(tier, "timeshared" | "concurrent")),
            "{answers:?}"
        );
        assert!(!is("data", "regulated") || tier == "hard", "{answers:?}");
        assert!(!(is("gpu", "no-mig") && tier == "partition"), "{answers:?}");
        assert!(
            !(is("kernels", "long") && tier != "exclusive"),
            "{answers:?}"
        );
        assert!(
            !(is("faults", "own") && tier == "concurrent"),
            "{answers:?}"
        );
        let said = leaf.traps.join(" ");
        assert!(tier != "concurrent" || said.contains("fault"), "{said}");
        assert!(
            tier != "capped" || said.contains("cannot be interrupted"),
            "{said}"
        );
        assert!(tier != "partition" || said.contains("T4"), "{said}");
    }
}

#[test]
fn every_question_is_asked_and_every_tier_is_recommended() {
    let paths = paths();
    for question in TREE {
        assert!(
            paths
                .iter()
                .any(|(answers, _)| answers.contains_key(question.name)),
            "{}",
            question.name
        );
    }
    for tier in tranche_api::Tier::ALL {
        let class = tier.class_name();
        assert!(paths.iter().any(|(_, leaf)| leaf.class == class), "{class}");
    }
}

#[test]
fn who_answers_off_a_terminal_sees_all_that_may_follow() {
    let given = read(&["machine=container".into(), "data=trusted".into()]).unwrap();
    let error = walk(&given, all_missing).unwrap_err().to_string();
    for part in [
        "size=part",
        "latency=p99",
        "gpu=mig",
        "faults=own",
        "; then latency",
        "such as size=whole",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("machine="), "{error}");
}

#[test]
fn the_page_has_the_same_tree() {
    let page = include_str!("../../../docs/choosing.md");
    assert!(
        page.contains(&markdown()),
        "docs/choosing.md must contain:\n{}",
        markdown()
    );
    for (_, leaf) in paths() {
        let row = format!("| `{}` |", leaf.class);
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn every_claim_is_one_that_the_api_has() {
    let size = Size {
        memory: Some(20 << 30),
        cores: Some(30),
    };
    for (_, leaf) in paths() {
        let yaml = yaml(leaf, "mine", Some("team-a"), size);
        let value: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(
            value,
            claim::object(leaf, "mine", Some("team-a"), size),
            "{yaml}"
        );
        let template: ResourceClaimTemplate = serde_json::from_value(value.clone()).unwrap();
        // No field was dropped: the API knows every field.
        assert_eq!(serde_json::to_value(&template).unwrap(), value);
        let asked =
            &value["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"];
        assert_eq!(asked["memory"].is_string(), leaf.has_memory);
        assert_eq!(asked["cores"].is_string(), leaf.has_cores);
        // Whole GPUs and timeshared shares have no sizes to request.
        let tier = leaf.class.split('.').next().unwrap().parse().ok();
        let unsized_tier = tier
            .and_then(WholeGpuTier::new)
            .is_some_and(|it| !it.tier().has_shim());
        assert!(!(unsized_tier && leaf.has_memory), "{}", leaf.class);
    }
}

fn given(words: &[&str]) -> Result<Answers, AnswerError> {
    let words: Vec<String> = words.iter().map(ToString::to_string).collect();
    read(&words)
}

#[test]
fn answers_lead_to_a_class_and_what_is_missing_is_said() {
    let answers = given(&[
        "machine=container",
        "data=trusted",
        "size=part",
        "latency=p99",
        "gpu=mig",
    ]);
    let (leaf, path) = walk(&answers.unwrap(), missing).unwrap();
    assert_eq!((leaf.class, path.len()), ("partition.gpu.tranche.dev", 5));
    let error = walk(&given(&["machine=container"]).unwrap(), missing).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("data=regulated (yes) or data=trusted"),
        "{error}"
    );
    for word in ["size", "size=half", "colour=red"] {
        let error = given(&[word]).unwrap_err().to_string();
        assert!(!error.is_empty() && !error.contains('\n'), "{error}");
    }
}

#[test]
fn sizes_are_those_of_claims() {
    assert_eq!(
        Size::default().with_memory("20Gi").unwrap().memory,
        Some(20 << 30)
    );
    for text in ["", "much", "0", "-1", "0.5"] {
        assert_eq!(
            Size::default().with_memory(text),
            Err(SizeError::Memory(text.into()))
        );
    }
}

#[test]
fn a_running_pod_answers_what_it_shows() {
    let snapshot = crate::testing::busy().snapshot();
    let model = crate::model::Model::new(&snapshot, &Err(String::new()));
    let known = of_pod(&model, &snapshot, "team-a", "notebook").unwrap();
    let expected = [("machine", "container"), ("size", "part"), ("gpu", "mig")];
    assert_eq!(known.answers, expected.into());
    assert_eq!(
        known.size,
        Size {
            memory: Some(20 << 30),
            cores: Some(25)
        }
    );
    assert_eq!(known.hint, None);
    let used = PartUsed {
        all: Used {
            memory: 5 << 30,
            ..Used::default()
        },
        ..PartUsed::default()
    };
    let key = part("uid-team-a-notebook", "gpu-a0000000-capped");
    let usage = Usage {
        parts: [(key, used)].into(),
        ..Usage::default()
    };
    let idle = crate::model::Model::new(&snapshot, &Ok(usage));
    let of_now = of_pod(&idle, &snapshot, "team-a", "notebook").unwrap();
    // A single measurement is no reason to suggest less without being asked.
    assert_eq!(of_now.size, known.size);
    let hint = of_now.hint.unwrap();
    assert!(
        hint.ends_with("if it never uses more, ask for 7Gi (--memory)"),
        "{hint}"
    );
    let card = of_pod(&model, &snapshot, "team-c", "card").unwrap();
    assert_eq!(
        (card.answers["size"], card.answers["gpu"]),
        ("whole", "no-mig")
    );
    let error = of_pod(&model, &snapshot, "team-a", "card").unwrap_err();
    assert!(error.to_string().contains("team-a/card"), "{error}");
}
