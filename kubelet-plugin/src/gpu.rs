//! The node's GPUs: what the driver says of them, and the modes, partitions and daemons that claims want of them.

pub mod context_sizes;
pub mod driver_state;
pub mod gpus;
pub mod load_pages;
pub mod mps;
pub mod records;
