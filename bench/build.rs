//! Compiles the kubelet's side of the DRA protocol from the plugin's copy of it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "../kubelet-plugin/proto/dra/v1/api.proto";
    println!("cargo::rerun-if-changed={proto}");
    let descriptors = protox::compile([proto], ["../kubelet-plugin/proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(descriptors)?;
    Ok(())
}
