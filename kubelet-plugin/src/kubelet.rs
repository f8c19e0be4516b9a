//! The kubelet's sockets: registration, and the pods with their devices. [`claim::dra`](crate::claim::dra) serves its calls.

pub mod pod_resources;
pub mod proto;
pub mod registration;
pub mod sockets;
