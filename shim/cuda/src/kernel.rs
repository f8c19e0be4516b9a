//! What is launched: a kernel with its grid, or an executable graph.

use tranche_shim_core::compute::Shape;
use tranche_shim_core::compute::costs::key;

use crate::abi::{CUfunction, CUlaunchConfig};

/// This bit marks a handle as a graph's. Handles are addresses of user space, which do not have it.
const GRAPH: CUfunction = 1 << 47;

/// A kernel and how it is launched.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The function's handle, or a graph's, with [`GRAPH`].
    pub handle: CUfunction,
    /// Blocks of the grid, threads of a block.
    pub grid: [u32; 3],
    pub block: [u32; 3],
}

impl Kernel {
    /// A kernel without its grid, if another call sets the grid, or if it does not matter.
    pub fn of(handle: CUfunction) -> Self {
        Self {
            handle,
            grid: [0; 3],
            block: [0; 3],
        }
    }

    /// A graph that can be launched.
    #[inline]
    pub fn graph(handle: CUfunction) -> Self {
        Self::of(handle | GRAPH)
    }

    pub fn is_graph(&self) -> bool {
        self.handle & GRAPH != 0
    }

    /// What `cuLaunchKernelEx` launches.
    #[inline]
    pub fn configured(config: *const CUlaunchConfig, handle: CUfunction) -> Self {
        // SAFETY: null, which the driver refuses, or the program's, for the driver to read.
        match unsafe { config.as_ref() } {
            Some(config) => Self {
                handle,
                grid: config.grid,
                block: config.block,
            },
            None => Self::of(handle),
        }
    }

    #[inline]
    pub fn numbers(&self) -> [u64; 3] {
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            two(self.grid[0], self.grid[1]),
            two(self.grid[2], self.block[0]),
            two(self.block[1], self.block[2]),
        ]
    }

    pub fn shape(&self) -> Shape {
        let work = self.grid.iter().chain(&self.block).fold(1, |work, extent| {
            u64::saturating_mul(work, u64::from(*extent).max(1))
        });
        Shape {
            key: key(self.handle as u64, self.numbers()),
            kernel: self.family(),
            work,
        }
    }

    /// The key of the kernel without its grid.
    pub fn family(&self) -> u64 {
        key(self.handle as u64, [0; 3])
    }
}
