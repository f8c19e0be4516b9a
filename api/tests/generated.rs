//! The generated files in the repository are up to date.

#[path = "../examples/generate/files.rs"]
mod files;

use std::fs;

#[test]
fn generated_files_are_up_to_date() {
    for file in files::all() {
        let path = files::root().join(file.path);
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == file.content,
            "{} is out of date: run `cargo run -p tranche-api --example generate`",
            file.path
        );
    }
}
