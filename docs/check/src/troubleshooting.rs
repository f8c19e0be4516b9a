//! docs/troubleshooting.md: advice by the text of a message.
//!
//! A section has text that people wrote, a comment that names the sources of its messages, and the list of these messages, which
//! [`updated`] writes. If several sections name a file, the one with the longest path gets its messages. People may write a note after
//! a message in the list; the note stays as long as the message exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::sources::Messages;

/// Literals that are no messages, or that no user sees, by file or text, and why.
pub const UNSEEN: &[(&str, &str)] = &[
    (
        "usage-api/src/documents.rs",
        "descriptions of the API's kinds, for kubectl explain",
    ),
    (
        "usage-api/src/resources.rs",
        "descriptions of the columns of kubectl get",
    ),
    (
        "api/src/reference.rs",
        "text of docs/reference/attributes.md, which has it",
    ),
    (
        "shim/coverage/src/page.rs",
        "text of docs/reference/cuda-coverage.md and nvml-coverage.md",
    ),
    (
        "shim/coverage/src/lib.rs",
        "of the shim's build, for developers",
    ),
    (
        "shim/runtime/src/lib.rs",
        "a compile error on other architectures",
    ),
    (
        "kubelet-plugin/src/http/dcgm.rs",
        "the help of metrics, which docs/reference/metrics.md has",
    ),
    (
        "kubelet-plugin/src/http/claims.rs",
        "the help of metrics, which docs/reference/metrics.md has",
    ),
    (
        "driver/src/health/xid.rs",
        "parts of a message of driver/src/health/fault.rs; docs/health.md has them",
    ),
    (
        "node/gpu-check/src/main.rs",
        "the code of a kernel, and how the program is used",
    ),
    (
        "text/plain; version=0.0.4; charset=utf-8",
        "the media type of the metrics",
    ),
    (
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        "the media type of the metrics",
    ),
    (
        "'compute' in self && 'utility' in self",
        "a rule, whose message is on the page",
    ),
    (
        "nvidia-smi compute-policy --list",
        "a command that the plugin runs",
    ),
    (
        "nvidia-smi compute-policy --set-timeslice",
        "a command that the plugin runs",
    ),
];

/// The beginning of the comment with a section's sources.
const SOURCES: &str = "<!-- messages of ";
/// The headings of sections.
const SECTION: &str = "\n## ";

/// Why a page cannot be written.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PageError {
    /// Some messages belong to no section.
    #[error(
        "no section of docs/troubleshooting.md has the messages of {0:?}: name it in the comment of one, or in UNSEEN of docs/check/src/troubleshooting.rs with the reason why nobody sees them"
    )]
    Homeless(BTreeSet<String>),
    /// A section names a source that has no messages.
    #[error(
        "a section of docs/troubleshooting.md names {0}, which has no messages: remove it there"
    )]
    Empty(String),
}

/// Whether a user never sees it.
fn is_unseen(message: &str, file: &str) -> bool {
    UNSEEN
        .iter()
        .any(|(what, _)| *what == message || file.starts_with(what))
}

/// A message as the page shows it.
fn span(message: &str) -> String {
    if message.contains('`') {
        format!("`` {message} ``")
    } else {
        format!("`{message}`")
    }
}

/// The sources that a section names.
fn sources(section: &str) -> impl Iterator<Item = &str> {
    let comment = section.split_once(SOURCES);
    let names = comment.and_then(|(_, rest)| rest.split_once(" -->"));
    names.map_or("", |(names, _)| names).split_whitespace()
}

/// The page with these messages in its lists.
pub fn updated(page: &str, messages: &Messages) -> Result<String, PageError> {
    let notes = notes(page);
    let mut parts = page.split(SECTION);
    let mut text = parts.next().unwrap_or_default().trim_end().to_owned();
    let sections: Vec<_> = parts.collect();
    let named: Vec<&str> = sections.iter().flat_map(|it| sources(it)).collect();
    let mut lists: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut homeless = BTreeSet::new();
    for (message, file) in messages {
        if is_unseen(message, file) {
            continue;
        }
        let fitting = named.iter().filter(|it| file.starts_with(**it));
        match fitting.max_by_key(|it| it.len()) {
            Some(source) => {
                lists.entry(source).or_default().insert(message);
            }
            None => {
                homeless.insert(file.clone());
            }
        }
    }
    if !homeless.is_empty() {
        return Err(PageError::Homeless(homeless));
    }
    for section in sections {
        let mut list = BTreeSet::new();
        for source in sources(section) {
            let found = lists.remove(source);
            list.extend(found.ok_or_else(|| PageError::Empty(source.to_owned()))?);
        }
        let prose = match section.split_once(SOURCES) {
            Some((prose, rest)) => {
                let comment = rest.split_once("-->").map_or(rest, |(names, _)| names);
                format!("{prose}{SOURCES}{comment}-->\n\n")
            }
            None => format!("{}\n", section.trim_end()),
        };
        let _ = write!(text, "\n{SECTION}{prose}");
        for message in list {
            let span = span(message);
            let note = notes.get(span.as_str()).copied().unwrap_or_default();
            let _ = writeln!(text, "- {span}{note}");
        }
        text.truncate(text.trim_end().len());
    }
    text.push('\n');
    Ok(text)
}

/// The notes that people wrote after messages, by the message's span.
fn notes(page: &str) -> BTreeMap<&str, &str> {
    let bullets = page.lines().filter_map(|line| line.strip_prefix("- "));
    bullets
        .filter_map(|line| {
            let length = match line.strip_prefix("`` ") {
                Some(text) => "`` ".len() + text.find(" ``")? + " ``".len(),
                None => "``".len() + line.strip_prefix('`')?.find('`')?,
            };
            Some(line.split_at(length))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Title\n\nAn introduction.\n\n## Claims\n\nLook at it.\n\n<!-- messages of driver/src/claim driver/src/cdi -->\n\n\
        - `a claim is gone`: see above\n- `stale`: nothing\n- `` use `x` now ``: a note\n\n## Scheduler\n\nNo list.\n";

    fn messages() -> Messages {
        [
            ("a claim is gone", "driver/src/claim.rs"),
            ("use `x` now", "driver/src/cdi.rs"),
            ("new", "driver/src/claim/error.rs"),
            ("The node.", "usage-api/src/resources.rs"),
        ]
        .map(|(message, file)| (message.to_owned(), file.to_owned()))
        .into()
    }

    #[test]
    fn lists_follow_the_sources_and_notes_stay() {
        let page = updated(PAGE, &messages()).expect("a page");
        let expected = "# Title\n\nAn introduction.\n\n## Claims\n\nLook at it.\n\n<!-- messages of driver/src/claim driver/src/cdi -->\n\n\
            - `a claim is gone`: see above\n- `new`\n- `` use `x` now ``: a note\n\n## Scheduler\n\nNo list.\n";
        assert_eq!(page, expected);
        assert_eq!(updated(&page, &messages()), Ok(page.clone()));
    }

    #[test]
    fn messages_without_a_section_and_empty_sections_are_refused() {
        let mut more = messages();
        more.insert("cannot go on".to_owned(), "mps/src/main.rs".to_owned());
        let homeless = BTreeSet::from(["mps/src/main.rs".to_owned()]);
        assert_eq!(updated(PAGE, &more), Err(PageError::Homeless(homeless)));
        let less = Messages::from([("new".to_owned(), "driver/src/claim.rs".to_owned())]);
        let empty = PageError::Empty("driver/src/cdi".to_owned());
        assert_eq!(updated(PAGE, &less), Err(empty));
    }
}
