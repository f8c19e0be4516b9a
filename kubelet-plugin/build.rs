//! Compiles the kubelet's protocols, with no protoc on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for proto in [
        "pluginregistration/v1/api.proto",
        "dra/v1/api.proto",
        "podresources/v1/api.proto",
    ] {
        println!("cargo::rerun-if-changed=proto/{proto}");
        let descriptors = protox::compile([proto], ["proto"])?;
        tonic_prost_build::configure()
            .btree_map(".")
            // The client halves drive the plugin's own liveness probe, its questions to the kubelet, and the
            // tests' kubelet.
            .build_client(true)
            .compile_fds(descriptors)?;
    }
    // Their packages are called v1 and v1alpha1, as that of the pod resources: each goes into a folder of its own.
    for version in ["v1", "v1alpha1"] {
        let proto = format!("dra-health/{version}/api.proto");
        println!("cargo::rerun-if-changed=proto/{proto}");
        let folder = std::path::PathBuf::from(std::env::var("OUT_DIR")?).join("dra-health");
        std::fs::create_dir_all(&folder)?;
        let descriptors = protox::compile([proto], ["proto"])?;
        tonic_prost_build::configure()
            .build_client(true)
            .out_dir(folder)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
