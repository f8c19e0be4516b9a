//! Updates the lists of docs/troubleshooting.md.

use tranche_docs::{repository, sources, troubleshooting};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = repository().join("docs/troubleshooting.md");
    let messages = sources::messages(&repository())?;
    let page = std::fs::read_to_string(&path)?;
    std::fs::write(&path, troubleshooting::updated(&page, &messages)?)?;
    Ok(())
}
