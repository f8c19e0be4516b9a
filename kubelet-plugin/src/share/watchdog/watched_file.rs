//! Keeps the list of watched GPUs across restarts of the plugin: no claim holds a GPU that is withheld, so that nothing
//! else on the node says that its memory is not free.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tracing::{error, warn};

use crate::host::fs::{self, Fs};
use crate::host::layout::Layout;

/// The watched GPUs by UUID, and whether each is withheld.
pub type WatchedGpus = BTreeMap<String, bool>;

/// The file with the list.
#[derive(Debug)]
pub struct WatchedFile {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    /// What the file has; `None` if that is not known.
    saved: Option<WatchedGpus>,
    failed: bool,
}

impl WatchedFile {
    /// Reads the list of the last process; `None` if it cannot be read.
    #[must_use]
    pub fn load(fs: Arc<dyn Fs>, layout: &Layout) -> (Self, Option<WatchedGpus>) {
        let path = layout.watched();
        let read = match fs.read(&path) {
            Ok(None) => Ok(WatchedGpus::new()),
            Ok(Some(bytes)) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let known = read.inspect_err(|error| {
            error!(
                path = %path.display(),
                error,
                "the list of watched GPUs cannot be read; all GPUs of the node are withheld until their memory was seen to be free"
            );
        });
        let watched = known.ok();
        let file = Self {
            fs,
            path,
            saved: watched.clone(),
            failed: false,
        };
        (file, watched)
    }

    /// Writes the list if it has changed. After an error the next call writes it.
    pub fn save(&mut self, watched: &WatchedGpus) {
        if self.saved.as_ref() == Some(watched) {
            return;
        }
        let written = serde_json::to_vec(watched)
            .map_err(|error| error.to_string())
            .and_then(|content| {
                fs::ensure(&*self.fs, &self.path, &content, 0o600)
                    .map_err(|error| error.to_string())
            });
        match written {
            Ok(()) => {
                self.saved = Some(watched.clone());
                self.failed = false;
            }
            Err(error) => {
                self.saved = None;
                if !self.failed {
                    warn!(
                        error,
                        "the list of watched GPUs cannot be saved; trying again every second"
                    );
                }
                self.failed = true;
            }
        }
    }
}
