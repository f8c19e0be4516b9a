//! The kubelet's protocols, which `build.rs` compiles from `proto/`.
#![allow(missing_docs, clippy::pedantic, clippy::unwrap_used)]

/// The registration of plugins.
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// The DRA plugin service.
pub mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// The pod resources service.
pub mod podresources {
    tonic::include_proto!("v1");
}
