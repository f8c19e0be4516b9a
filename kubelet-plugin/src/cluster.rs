//! The API server: claims, their status, events, the GpuNode, and other systems that hand out the node's GPUs.

pub mod api_server;
pub mod claim_health;
pub mod claims;
pub mod competing_drivers;
pub mod cordon;
pub mod events;
pub mod gpu_node;
pub mod node_policy;
pub mod status;
