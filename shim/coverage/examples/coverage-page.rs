//! Writes `docs/reference/cuda-coverage.md` and `nvml-coverage.md`.
//!
//! ```console
//! cargo run -p tranche-shim-coverage --example coverage-page
//! ```

use std::error::Error;
use std::fs;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in tranche_shim_coverage::pages()? {
        fs::write(root.join(page.path), page.content)?;
        println!("wrote {}", page.path);
    }
    Ok(())
}
