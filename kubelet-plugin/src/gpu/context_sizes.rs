//! The sizes of CUDA contexts that this node measured, by GPU model and driver. They are kept across
//! restarts, because a size becomes known only when a process has nothing but a context.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::{info, warn};
use tranche_api::Quantity;
use tranche_api::gpu_node::Inventory;
use tranche_node::watchdog::compare::Sample;
use tranche_node::watchdog::contexts::{ContextSizes, Line, Model};

use crate::host::fs::{self, Fs};
use crate::host::layout::Layout;

/// The measured sizes, and the file that keeps them.
#[derive(Debug)]
pub struct Contexts {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    sizes: Mutex<ContextSizes>,
}

impl Contexts {
    /// Reads the file; if that fails, the sizes are measured again.
    #[must_use]
    pub fn load(fs: Arc<dyn Fs>, layout: &Layout) -> Self {
        let path = layout.contexts();
        let lines: Vec<Line> = match fs.read(&path) {
            Ok(None) => Vec::new(),
            Ok(Some(bytes)) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                warn!(path = %path.display(), %error, "the measured sizes of contexts cannot be read; they are measured again");
                Vec::new()
            }),
            Err(error) => {
                warn!(%error, "the measured sizes of contexts cannot be read; they are measured again");
                Vec::new()
            }
        };
        Self {
            fs,
            path,
            sizes: Mutex::new(ContextSizes::from_lines(lines)),
        }
    }

    /// Bytes of a context, if they were measured.
    #[must_use]
    pub fn get(&self, model: &Model) -> Option<u64> {
        self.lock().get(model)
    }

    /// Writes the sizes that are known into an inventory.
    pub fn describe(&self, inventory: &mut Inventory) {
        for gpu in &mut inventory.gpus {
            let model = Model {
                product: gpu.product_name.clone(),
                driver: inventory.driver_version.clone(),
            };
            gpu.context_memory = self.get(&model).map(Quantity::from_bytes);
        }
    }

    /// Evaluates a sample of a GPU, and saves a changed size.
    pub fn note(&self, model: &Model, gpu_uuid: &str, sample: &Sample) {
        let mut sizes = self.lock();
        if !sizes.note(model, gpu_uuid, sample) {
            return;
        }
        let lines = sizes.lines();
        info!(
            product = model.product,
            driver = model.driver,
            bytes = sizes.get(model),
            "measured how much memory a CUDA context takes"
        );
        drop(sizes);
        let written = serde_json::to_vec(&lines)
            .map_err(|error| error.to_string())
            .and_then(|content| {
                fs::ensure(&*self.fs, &self.path, &content, 0o644)
                    .map_err(|error| error.to_string())
            });
        if let Err(error) = written {
            warn!(
                error,
                "the measured sizes of contexts cannot be saved; after a restart they are measured again"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, ContextSizes> {
        // No holder of the lock can panic in the middle of a change.
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tranche_node::watchdog::compare::{
        Owner, ProcessId, ProcessSample, ShareSample, SlotSample,
    };

    use super::*;
    use crate::testing::World;

    #[test]
    fn a_measured_size_is_published_and_outlives_the_plugin() {
        let world = World::new();
        let mut inventory = world.ready.inventory.clone();
        let model = Model {
            product: inventory.gpus[0].product_name.clone(),
            driver: inventory.driver_version.clone(),
        };
        let charged = 512 << 20;
        let sample = Sample {
            shares: vec![ShareSample {
                movable: 0,
                key: "share".into(),
                limit: 10 << 30,
                context: charged,
                slots: Some(vec![SlotSample {
                    pid: 1,
                    charged: Some(charged),
                }]),
            }],
            processes: vec![ProcessSample {
                id: ProcessId { pid: 7, started: 1 },
                inner_pid: Some(1),
                bytes: 450 << 20,
                owner: Owner::Shares {
                    pod: None,
                    keys: vec!["share".into()],
                },
            }],
            ..Sample::default()
        };
        let load = || Contexts::load(Arc::new(crate::host::fs::HostFs), &world.layout);
        let contexts = load();
        contexts.describe(&mut inventory);
        assert_eq!(inventory.gpus[0].context_memory, None);
        for _ in 0..2 {
            contexts.note(&model, "GPU-0", &sample);
        }
        let measured = 464 << 20;
        for contexts in [contexts, load()] {
            contexts.describe(&mut inventory);
            for gpu in &inventory.gpus {
                assert_eq!(gpu.context_memory, Some(Quantity::from_bytes(measured)));
            }
        }
        // A broken file must not prevent a start.
        std::fs::write(world.layout.contexts(), b"{").unwrap();
        assert_eq!(load().get(&model), None);
        let other = Model {
            driver: "999".into(),
            ..model
        };
        assert_eq!(load().get(&other), None);
    }
}
