//! Writes the files that are made from this crate: the CRDs of the chart and the reference page of
//! attributes.
//!
//! ```console
//! cargo run -p tranche-api --example generate
//! ```

mod files;

use std::fs;
use std::io;

fn main() -> io::Result<()> {
    for file in files::all() {
        let path = files::root().join(file.path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&path, file.content)?;
        println!("wrote {}", file.path);
    }
    Ok(())
}
