//! NVIDIA's dcgm-exporter finds the GPU of each device that we publish.

use super::*;

/// What `internal/pkg/transformation/dra.go` of dcgm-exporter reads from a device: the GPU's UUID, and the profile of a
/// partition; `None` if it finds nothing.
fn as_dcgm_exporter_reads(device: &Device) -> Option<(String, Option<String>)> {
    let attributes = device.attributes.as_ref()?;
    // Names without a domain only.
    let string = |name: &str| attributes.get(name)?.string.clone();
    match string("type")?.as_str() {
        "gpu" => Some((string("uuid")?, None)),
        "mig" => Some((string("parentUUID")?, Some(string("profile")?))),
        _ => None,
    }
}

#[test]
fn dcgm_exporter_finds_the_gpu_of_every_device() {
    let mut node = inventory(vec![gpu(0), gpu(1)]);
    let uuids = [gpu(0).uuid, gpu(1).uuid];
    node.mig_geometries = vec![tables::h100(&uuids.each_ref().map(|it| &**it))];
    let tiers = json!([
        "exclusive",
        "capped",
        "concurrent",
        "timeshared",
        "partition"
    ]);
    let all = policy("default", &json!({"tiers": tiers}));
    let (mut whole, mut partitions) = (0, 0);
    for device in devices(&planned(&node, &[all])) {
        let found = as_dcgm_exporter_reads(&device);
        let (uuid, profile) = found.unwrap_or_else(|| panic!("{} is not found", device.name));
        assert!(uuids.contains(&uuid), "{}: {uuid}", device.name);
        match profile {
            None => whole += 1,
            Some(_) => partitions += 1,
        }
    }
    assert!(whole > 0 && partitions > 0, "{whole}, {partitions}");
}
