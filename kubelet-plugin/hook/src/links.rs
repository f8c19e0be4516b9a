//! `create-links`: makes the links under which programs find the driver's libraries.

use tranche_cdi_hook::rootfs::{Rootfs, RootfsError};

use crate::args::Link;

/// Makes the links, in order.
pub fn create(root: &Rootfs, links: &[Link]) -> Result<(), RootfsError> {
    for link in links {
        match root.link(&link.target, &link.path) {
            Ok(()) => {}
            // The container starts anyway, and programs that load by the versioned name work.
            Err(e) if e.is_read_only() => {
                eprintln!(
                    "tranche-cdi-hook: {e}: the image's file system is read-only, continuing"
                );
                return Ok(());
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
