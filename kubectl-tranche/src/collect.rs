//! `collect`: packs what support needs, without secrets.
//!
//! ```text
//!  Evidence ─► files ─► redact ─► .tar.gz
//! ```
//!
//! It packs only what support needs: whole objects of our own kinds, and objects of other kinds without fields that may have
//! secrets. Then it searches every text for words that look like a token.

mod redact;

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde_json::{Value, json};
use tranche_api::names::DRIVER;

use crate::doctor::examine;
use crate::evidence::Evidence;
use crate::output::{Block, Tone, View};

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path in the archive.
    pub path: String,
    pub text: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Collected {
    /// Where the archive was written.
    pub archive: String,
    /// The paths in it.
    pub files: Vec<String>,
    /// What could not be read.
    pub missing: Vec<String>,
}

/// The files, without secrets.
#[must_use]
pub fn files(evidence: &Evidence) -> Vec<File> {
    let facts = &evidence.facts;
    let snapshot = &facts.snapshot;
    let report = examine(facts);
    let mut files = vec![
        file("doctor", json!(report)),
        file(
            "versions",
            json!({
                "kubectlTranche": env!("CARGO_PKG_VERSION"),
                "kubernetes": facts.version.clone().unwrap_or_else(|why| why),
                "pods": facts.components.as_ref().map(|all| {
                    let all = all.iter().map(|it| json!({"pod": it.pod, "node": it.node, "ready": it.is_ready, "images": it.images}));
                    all.collect::<Vec<_>>()
                }).unwrap_or_default(),
                "featureGates": facts.gates.clone().unwrap_or_default(),
            }),
        ),
        file("gpunodes", json!(snapshot.gpu_nodes)),
        file("sharingpolicies", json!(snapshot.policies)),
        file("resourceslices", json!(snapshot.slices)),
        file("deviceclasses", json!(our_classes(evidence))),
        file("resourceclaims", json!(our_claims(evidence))),
        file("pods", json!(evidence.pods)),
        file("events", json!(evidence.events)),
        file("missing", json!(evidence.missing)),
    ];
    files.extend(evidence.logs.iter().map(|log| File {
        path: format!("logs/{}/{}.log", log.pod, log.container),
        text: log.text.clone(),
    }));
    for file in &mut files {
        file.text = redact::text(&file.text);
    }
    files
}

fn file(name: &str, mut value: Value) -> File {
    redact::object(&mut value);
    File {
        path: format!("{name}.json"),
        text: format!("{value:#}\n"),
    }
}

fn our_classes(evidence: &Evidence) -> Vec<Value> {
    let classes = evidence.facts.snapshot.classes.iter().map(|it| json!(it));
    classes
        .filter(|it| it.to_string().contains(DRIVER))
        .collect()
}

/// Claims that request or have devices of ours.
fn our_claims(evidence: &Evidence) -> Vec<Value> {
    let claims = evidence.facts.snapshot.claims.iter().map(|it| json!(it));
    claims
        .filter(|it| it.to_string().contains(DRIVER))
        .collect()
}

/// The archive of the files, which are in the folder `folder`.
pub fn archive(files: &[File], folder: &str, unix_seconds: u64) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for file in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(file.text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(unix_seconds);
        let path = format!("{folder}/{}", file.path);
        archive.append_data(&mut header, path, file.text.as_bytes())?;
    }
    let mut compressed = archive.into_inner()?.finish()?;
    compressed.flush()?;
    Ok(compressed)
}

impl View for Collected {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        let count = self.files.len();
        let mut blocks = vec![Block::plain(format!(
            "{}: {count} files, without Secrets, environments and tokens",
            self.archive
        ))];
        if is_wide {
            blocks.extend(
                self.files
                    .iter()
                    .map(|path| Block::plain(format!("  {path}"))),
            );
        }
        let missing = self.missing.iter();
        blocks.extend(missing.map(|it| Block::Line(Tone::Warning, format!("missing: {it}"))));
        blocks
    }
}

#[cfg(test)]
mod tests;
