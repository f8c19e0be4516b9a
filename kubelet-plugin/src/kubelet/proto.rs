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

/// The health of devices.
pub mod dra_health {
    /// Kubernetes 1.37 and later.
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/dra-health/v1.rs"));
    }
    /// Kubernetes 1.36 and earlier.
    pub mod v1alpha1 {
        include!(concat!(env!("OUT_DIR"), "/dra-health/v1alpha1.rs"));
    }
}
