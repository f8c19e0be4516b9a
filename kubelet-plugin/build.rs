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
    Ok(())
}
