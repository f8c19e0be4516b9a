//! The messages in the product's sources.
//!
//! A message is a string literal of three words or more, and the text of any `#[error("…")]`, in code that is not a test. Texts that
//! only developers see do not count: debug and info lines of the log, assertions, the help of metrics, other attributes. So this finds
//! every message, whether it is shown as an error, a condition, an event, a line of the log or on stderr. The few literals that are no
//! messages are in [`crate::troubleshooting::UNSEEN`]. The API server's messages about our objects are the `message` and the
//! `messageExpression` of rules in the chart's objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proc_macro2::{Delimiter, Group, Literal, TokenStream, TokenTree};
use serde_json::Value;

/// The folders of the product's code. The simulator, the tests and the benchmarks are not among them.
pub const FOLDERS: [&str; 20] = [
    "api/src",
    "driver/src",
    "controller/src",
    "node/src",
    "node/gpu-check/src",
    "nvml/src",
    "kubelet-plugin/src",
    "kubelet-plugin/hook/src",
    "mps/src",
    "serving/src",
    "node-usage/src",
    "usage-api/src",
    "cli/src",
    "kubectl-tranche/src",
    "kubectl-tranche/scheduler-rules/src",
    "shim/cuda/src",
    "shim/nvml/src",
    "shim/runtime/src",
    "shim/core/src",
    "shim/coverage/src",
];

/// Files of commands, whose texts are mostly normal output. Only the texts of their `#[error("…")]` are messages.
const COMMANDS: [&str; 11] = [
    "kubectl-tranche/src/collect",
    "kubectl-tranche/src/cost",
    "kubectl-tranche/src/doctor",
    "kubectl-tranche/src/evidence",
    "kubectl-tranche/src/explain",
    "kubectl-tranche/src/facts",
    "kubectl-tranche/src/map",
    "kubectl-tranche/src/model",
    "kubectl-tranche/src/recommend",
    "kubectl-tranche/src/top",
    "kubectl-tranche/src/ui",
];

/// Files with rules by which the API server refuses objects: the chart's, and the definitions of our resources.
const OBJECTS: [&str; 3] = [
    "deploy/helm/rendered.yaml",
    "deploy/helm/tranche/crds/gpunodes.gpu.tranche.dev.yaml",
    "deploy/helm/tranche/crds/sharingpolicies.gpu.tranche.dev.yaml",
];

/// Macros whose text users do not see.
const MACROS: [&str; 17] = [
    "asm",
    "naked_asm",
    "global_asm",
    "info",
    "debug",
    "trace",
    "info_span",
    "debug_span",
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "panic",
    "unreachable",
    "vocabulary",
    "const_assert",
];

/// Functions whose text users do not see: assertions, and the help of metrics, which docs/reference/metrics.md lists.
const FUNCTIONS: [&str; 5] = [
    "expect",
    "expect_err",
    "register",
    "register_with_unit",
    "sub_registry_with_prefix",
];

/// The fewest words of a literal that is a message.
const WORDS: usize = 3;

/// The messages, each with the path of the first file that has it.
pub type Messages = BTreeMap<String, String>;

/// Why sources cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct SourceError {
    path: PathBuf,
    problem: String,
}

/// All messages of the product.
pub fn messages(repository: &Path) -> Result<Messages, SourceError> {
    let mut files = Vec::new();
    for folder in FOLDERS {
        collect(&repository.join(folder), &mut files)?;
    }
    files.sort();
    let mut found = Messages::new();
    for path in files {
        let error = |problem: String| SourceError {
            path: path.clone(),
            problem,
        };
        let text = fs::read_to_string(&path).map_err(|e| error(e.to_string()))?;
        let name = path
            .strip_prefix(repository)
            .unwrap_or(&path)
            .display()
            .to_string();
        let is_command = COMMANDS.iter().any(|it| name.starts_with(it));
        for message in of_source(&text, is_command).map_err(|e| error(e.to_string()))? {
            found.entry(message).or_insert_with(|| name.clone());
        }
    }
    for name in OBJECTS {
        let path = repository.join(name);
        let error = |problem: String| SourceError {
            path: path.clone(),
            problem,
        };
        let text = fs::read_to_string(&path).map_err(|e| error(e.to_string()))?;
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(&text).map_err(|e| error(e.to_string()))?;
        for message in objects.iter().flat_map(of_rules) {
            found.entry(message).or_insert_with(|| name.to_owned());
        }
    }
    Ok(found)
}

/// The messages of the rules of an object, or of a schema in it.
fn of_rules(object: &Value) -> Vec<String> {
    let mut found = Vec::new();
    match object {
        Value::Object(fields) => {
            let is_rule = fields.contains_key("rule") || fields.contains_key("expression");
            if let Some(text) = fields.get("message").and_then(Value::as_str)
                && is_rule
            {
                found.push(text.trim().to_owned());
            }
            if let Some(text) = fields.get("messageExpression").and_then(Value::as_str) {
                // The literals are between quotes; the other parts vary.
                let parts = text
                    .trim()
                    .split('"')
                    .enumerate()
                    .map(|(at, part)| if at % 2 == 1 { part } else { "{}" });
                found.push(
                    fixed_words(&parts.collect::<String>())
                        .trim_matches('…')
                        .trim()
                        .to_owned(),
                );
            }
            found.extend(fields.values().flat_map(of_rules));
        }
        Value::Array(items) => found.extend(items.iter().flat_map(of_rules)),
        _ => {}
    }
    found
}

/// The files with the reasons of our events and conditions.
const REASONS: [&str; 8] = [
    "api/src/conditions.rs",
    "api/src/withheld.rs",
    "controller/src/offered.rs",
    "driver/src/competing_drivers.rs",
    "kubelet-plugin/src/gpu/driver_state.rs",
    "kubelet-plugin/src/cluster/events.rs",
    "kubelet-plugin/src/cluster/gpu_node.rs",
    "kubelet-plugin/src/cluster/status.rs",
];

/// The reasons of events and conditions: literals such as `DriverNotFound` in these files.
pub fn reasons(repository: &Path) -> Result<BTreeSet<String>, SourceError> {
    let mut found = BTreeSet::new();
    for name in REASONS {
        let path = repository.join(name);
        let text = fs::read_to_string(&path).map_err(|e| SourceError {
            path,
            problem: e.to_string(),
        })?;
        // The file's tests follow.
        let code = text.split("#[cfg(test)]\nmod tests").next();
        let literals = code.unwrap_or_default().split('"').skip(1).step_by(2);
        found.extend(literals.filter(|it| is_reason(it)).map(str::to_owned));
    }
    Ok(found)
}

/// Whether it consists of two or more capitalized words, as Kubernetes spells reasons.
fn is_reason(literal: &str) -> bool {
    let humps = literal.chars().filter(char::is_ascii_uppercase).count();
    literal.chars().all(|char| char.is_ascii_alphabetic())
        && literal.starts_with(|char: char| char.is_ascii_uppercase())
        && humps >= 2
        && humps < literal.len()
}

/// Collects the Rust files of a folder, except files of tests.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), SourceError> {
    let error = |e: std::io::Error| SourceError {
        path: folder.to_owned(),
        problem: e.to_string(),
    };
    for entry in fs::read_dir(folder).map_err(error)? {
        let path = entry.map_err(error)?.path();
        let stem = path.file_stem().unwrap_or_default();
        // The help of metrics is in docs/reference.
        let is_silent = ["tests", "testing", "metrics"].iter().any(|it| stem == *it);
        let is_loom = stem == "model" && path.components().any(|it| it.as_os_str() == "shim");
        if is_silent || is_loom {
            continue;
        }
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|it| it == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The messages of one source, in their order; with `errors_only`, only those in an `#[error("…")]`.
pub fn of_source(text: &str, errors_only: bool) -> Result<Vec<String>, proc_macro2::LexError> {
    let mut found = Vec::new();
    walk(TokenStream::from_str(text)?, errors_only, &mut found);
    Ok(found)
}

/// Collects the messages of these tokens.
fn walk(tokens: TokenStream, errors_only: bool, found: &mut Vec<String>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            TokenTree::Literal(literal) if !errors_only => note(literal, false, found),
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                if let Some(TokenTree::Punct(mark)) = tokens.get(at)
                    && mark.as_char() == '!'
                {
                    at += 1;
                }
                if let Some(TokenTree::Group(attribute)) = tokens.get(at)
                    && attribute.delimiter() == Delimiter::Bracket
                {
                    at += 1;
                    if attribute_of_error(attribute, found) {
                        continue;
                    }
                    if is_of_tests(attribute) {
                        at = end_of_item(&tokens, at);
                    }
                }
            }
            TokenTree::Ident(name) => {
                let is_macro =
                    matches!(tokens.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == '!');
                let silent = if is_macro {
                    MACROS.iter().any(|it| name == it)
                } else {
                    FUNCTIONS.iter().any(|it| name == it)
                };
                let arguments = if is_macro { at + 1 } else { at };
                if silent && matches!(tokens.get(arguments), Some(TokenTree::Group(_))) {
                    at = arguments + 1;
                }
            }
            TokenTree::Group(group) => walk(group.stream(), errors_only, found),
            TokenTree::Literal(_) | TokenTree::Punct(_) => {}
        }
    }
}

/// Whether it is `#[error(…)]`, whose texts are then collected.
fn attribute_of_error(attribute: &Group, found: &mut Vec<String>) -> bool {
    let mut tokens = attribute.stream().into_iter();
    let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(texts))) =
        (tokens.next(), tokens.next())
    else {
        return false;
    };
    if name != "error" {
        return false;
    }
    // The first is the format string; its arguments follow.
    let mut texts = texts.stream().into_iter();
    if let Some(TokenTree::Literal(text)) = texts.next() {
        note(&text, true, found);
    }
    walk(texts.collect(), false, found);
    true
}

/// Whether the item that follows is only in test builds.
fn is_of_tests(attribute: &Group) -> bool {
    let text = attribute.stream().to_string();
    text == "test" || (text.starts_with("cfg") && text.contains("test"))
}

/// The end of the item that begins here: after its braces or its semicolon.
fn end_of_item(tokens: &[TokenTree], from: usize) -> usize {
    let end = tokens.iter().skip(from).position(|token| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => mark.as_char() == ';',
        _ => false,
    });
    end.map_or(tokens.len(), |end| from + end + 1)
}

fn note(literal: &Literal, any_length: bool, found: &mut Vec<String>) {
    let stream = TokenStream::from(TokenTree::Literal(literal.clone()));
    let Ok(text) = syn::parse2::<syn::LitStr>(stream) else {
        return;
    };
    let text = fixed_words(&text.value());
    let is_word = |word: &&str| word.chars().any(char::is_alphabetic);
    let words = text.split_whitespace().filter(is_word).count();
    if words >= WORDS || (any_length && words >= 1) {
        found.push(text);
    }
}

/// A format string in one line, with `…` for the parts that vary.
#[must_use]
pub fn fixed_words(format: &str) -> String {
    let mut text = String::new();
    let mut rest = format.chars().peekable();
    while let Some(char) = rest.next() {
        match char {
            '{' if rest.next_if_eq(&'{').is_some() => text.push('{'),
            '}' if rest.next_if_eq(&'}').is_some() => text.push('}'),
            '{' => {
                for inner in rest.by_ref() {
                    if inner == '}' {
                        break;
                    }
                }
                if !text.ends_with('…') {
                    text.push('…');
                }
            }
            other => text.push(other),
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<String> {
        of_source(source, false).expect("Rust")
    }

    #[test]
    fn messages_are_found_by_whatever_way_they_take() {
        let source = r##"
            /// A comment with some words is no message.
            #[derive(Debug, thiserror::Error)]
            enum Error {
                #[error("gone")]
                Gone,
                #[error("claim {name}: {}", if true { "a text in an argument" } else { "no" })]
                Claim { name: String },
                #[error(transparent)]
                Other(#[from] Problem),
            }
            fn f() -> anyhow::Result<()> {
                ensure!(true, "a text of a macro, {x:?} and {{braces}}");
                open().with_context(|| format!("cannot open \
                    the file {}", 1))?;
                refuse(&[Part::Text(" is more than it may hold")]);
                let raw = r#"a raw "text" of words"#;
                let note = Note { reason: "ShortWord", text: "a field of some object" };
                tracing::warn!(%error, "cannot write an event");
            }
        "##;
        assert_eq!(
            found(source),
            [
                "gone",
                "claim …: …",
                "a text in an argument",
                "a text of a macro, … and {braces}",
                "cannot open the file …",
                "is more than it may hold",
                "a raw \"text\" of words",
                "a field of some object",
                "cannot write an event",
            ]
        );
    }

    #[test]
    fn of_a_command_only_errors_are_messages() {
        let source = r#"
            #[error("no GPU is called {name}")]
            struct Unknown { name: String }
            const SHOWN: &str = "all of it is free";
        "#;
        assert_eq!(
            of_source(source, true).expect("Rust"),
            ["no GPU is called …"]
        );
    }

    #[test]
    fn rules_of_objects_have_messages() {
        let object = serde_json::json!({"spec": {"validations": [
            {"expression": "a == b", "message": "a is b"},
            {"expression": "c", "messageExpression": "\"the plugin on \" + node + \" may not write \" + name"},
        ]}, "status": {"message": "not a rule's"}});
        assert_eq!(
            of_rules(&object),
            ["a is b", "the plugin on … may not write"]
        );
    }

    #[test]
    fn what_only_developers_see_is_none() {
        let source = r#"
            #![expect(clippy::all, reason = "a reason for a lint")]
            #[doc = "words of the documentation"]
            fn f() {
                tracing::info!("the node is published now");
                debug_assert!(x, "that this always holds");
                x.expect("a map of strings only");
                registry.register("name", "Help of a metric here", x);
            }
            #[cfg(test)]
            mod tests { fn t() { let x = "words of a test"; } }
            #[cfg(any(test, feature = "testing"))]
            pub mod testing;
            #[tokio::test]
            const AFTER: &str = "this one is a message";
        "#;
        assert_eq!(found(source), ["this one is a message"]);
    }
}
