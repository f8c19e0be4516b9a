//! Every test that a page of this repository names exists.
//!
//! A page names a test in backticks: `path.rs::test`, or `::test` for another test of the same file. The path is relative to the
//! repository, to the page's folder, or to the suite that is named before it (`e2e`, `shim`, or `api` for `e2e/api`). Columns "held by"
//! and "tried by" contain only files, and tests of the file that was named last. `src/promise.rs` checks rows of `bench`.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

use std::fs;
use std::path::{Path, PathBuf};

/// Finds all Markdown below `folder`, except in build folders and hidden folders.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            pages(&path, found);
        } else if path.extension().is_some_and(|it| it == "md") {
            found.push(path);
        }
    }
}

/// The source of a file, or of all files of a folder.
fn source(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|_| {
        let files = fs::read_dir(path).into_iter().flatten().flatten();
        files.map(|file| source(&file.path())).collect()
    })
}

fn has_test(source: &str, name: &str) -> bool {
    source
        .split("\n\n")
        .filter_map(|item| item.split_once(&format!("fn {name}(")))
        .any(|(before, _)| before.contains("#[test]") || before.contains("#[tokio::test"))
}

/// Reads a page from its beginning.
struct Reader<'a> {
    repository: &'a Path,
    page: &'a Path,
    /// The file that was named last.
    file: PathBuf,
    named: usize,
    missing: Vec<String>,
}

impl Reader<'_> {
    fn open(&mut self, path: &str, suite: &str) {
        let folder = if suite == "api" { "e2e/api" } else { suite };
        let tests = self.repository.join(folder).join("tests/suite");
        let folders = [self.repository, self.page.parent().unwrap(), &tests];
        let found = folders
            .map(|it| it.join(path))
            .into_iter()
            .find(|it| it.exists());
        if found.is_none() {
            self.missing.push(path.to_owned());
        }
        self.file = found.unwrap_or_default();
    }

    fn test(&mut self, name: &str) {
        self.named += 1;
        if !has_test(&source(&self.file), name) {
            let file = self.file.display();
            self.missing.push(format!("{name} in {file}"));
        }
    }

    /// Reads a text in backticks. `suite` is the word before it. With `only_tests` it must be a test or a file.
    fn span(&mut self, span: &str, suite: &str, only_tests: bool) {
        let name = span.split(' ').next().unwrap_or_default();
        let (path, test) = name.split_once("::").unwrap_or((name, ""));
        let is_source = Path::new(path).extension().is_some_and(|it| it == "rs");
        if is_source || (only_tests && path.contains('/')) {
            self.open(path, suite);
        }
        if !test.is_empty() && (is_source || path.is_empty()) {
            self.test(test);
        } else if only_tests && !path.contains(['/', '.']) {
            self.test(name);
        }
    }

    fn read(&mut self, text: &str) {
        let (mut line, mut in_column) = (String::new(), false);
        for part in text.lines() {
            line += part;
            // Blocks of code, and spans that continue in the next line.
            if line.matches('`').count() % 2 == 1 {
                line.push(' ');
                continue;
            }
            in_column = line.starts_with('|')
                && (in_column || line.ends_with("held by |") || line.ends_with("tried by |"));
            let column = line.trim_end_matches('|').rfind('|').unwrap_or(0);
            let (mut at, mut before, mut suite) = (0, "", "");
            for (n, piece) in line.split('`').enumerate() {
                if n % 2 == 0 {
                    before = piece.split_whitespace().last().unwrap_or_default();
                    if ["e2e", "shim", "api"].contains(&before) {
                        suite = before;
                    }
                } else if before != "bench" {
                    self.span(piece, suite, in_column && at > column);
                }
                at += piece.len() + 1;
            }
            line.clear();
        }
    }
}

#[test]
fn every_test_that_a_page_names_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = Vec::new();
    pages(repository, &mut all);
    let (mut named, mut missing) = (0, Vec::new());
    for page in &all {
        let mut reader = Reader {
            repository,
            page,
            file: PathBuf::new(),
            named: 0,
            missing: Vec::new(),
        };
        reader.read(&fs::read_to_string(page).unwrap());
        named += reader.named;
        let page = page.display();
        missing.extend(reader.missing.iter().map(|it| format!("{page}: {it}")));
    }
    assert!(
        missing.is_empty(),
        "named and not there:\n{}",
        missing.join("\n")
    );
    assert!(named > 100, "{named} tests are named");
}
