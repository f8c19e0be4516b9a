//! The kubelet's protocols, as `build.rs` compiles them from `proto/`.
#![allow(missing_docs, clippy::pedantic, clippy::unwrap_used)]

/// How a plugin makes itself known.
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// What the kubelet asks of a DRA driver.
pub mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// What the kubelet says of the resources of its pods.
pub mod podresources {
    tonic::include_proto!("v1");
}
