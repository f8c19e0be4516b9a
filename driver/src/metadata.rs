//! What a container can read about its devices: one file per request, as KEP-5304 specifies.
//!
//! The format is that of `k8s.io/dynamic-resource-allocation/api/metadata`: a stream of the same object in each
//! version, the newest first. A program finds the file by the names of the claim and of the request; for a claim from a
//! template the pod's name for it is used. The memory and cores of a share are attributes, because the format has no
//! field for them.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tranche_api::Tier;
use tranche_api::names::{DRIVER, OVERSUBSCRIBED, attribute};

use crate::preparation::{Cap, PreparationPlan, PreparedDevice};

/// The folder in a container (`metadata.ContainerDir`).
const FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// The versions, in their order in the file.
const VERSIONS: [&str; 2] = [
    "metadata.resource.k8s.io/v1beta1",
    "metadata.resource.k8s.io/v1alpha1",
];

/// The requests of a plan, each once, with subrequests stripped.
#[must_use]
pub fn requests(plan: &PreparationPlan) -> Vec<&str> {
    let mut requests: Vec<&str> = Vec::new();
    for device in &plan.devices {
        if !requests.contains(&&*device.request) {
            requests.push(&device.request);
        }
    }
    requests
}

/// The path of a request's file in a container.
#[must_use]
pub fn container_path(plan: &PreparationPlan, request: &str) -> String {
    let (kind, claim) = match &plan.allocation.pod_claim_name {
        Some(name) => ("resourceclaimtemplates", name),
        None => ("resourceclaims", &plan.allocation.name),
    };
    format!("{FOLDER}/{kind}/{claim}/{request}/{DRIVER}-metadata.json")
}

/// The file of a request, with a final newline.
#[must_use]
pub fn file(plan: &PreparationPlan, request: &str) -> Vec<u8> {
    let allocation = &plan.allocation;
    let pairs = allocation.devices.iter().zip(&plan.devices);
    let of_request = pairs.filter(|(_, device)| device.request == request);
    // All devices of a request belong to one subrequest; the object has its name.
    let mut name = request;
    let mut devices = Vec::new();
    for (allocated, device) in of_request {
        name = &allocated.request;
        devices.push(json!({
            "driver": DRIVER,
            "pool": device.pool,
            "name": device.device,
            "attributes": attributes(device),
        }));
    }
    let mut object = json!({
        "kind": "DeviceMetadata",
        "metadata": {
            "name": allocation.name,
            "namespace": allocation.namespace,
            "uid": allocation.uid,
            "generation": 1,
        },
        "requests": [{"name": name, "devices": devices}],
    });
    if let Some(name) = &allocation.pod_claim_name {
        object["podClaimName"] = json!(name);
    }
    let mut file = Vec::new();
    for version in VERSIONS {
        object["apiVersion"] = json!(version);
        file.extend(object.to_string().into_bytes());
        file.push(b'\n');
    }
    file
}

/// As in a ResourceSlice.
fn attributes(device: &PreparedDevice) -> BTreeMap<&'static str, Value> {
    let text = |value: &str| json!({"string": value});
    let int = |value: u64| json!({"int": value});
    let mut attributes = BTreeMap::from([
        (attribute::TYPE, text("gpu")),
        (attribute::UUID, text(&device.gpu_uuid)),
        (attribute::PCI_BUS_ID, text(&device.pci_bus_id)),
        (attribute::ISOLATION, text(device.tier.as_str())),
        (attribute::ISOLATION_LEVEL, int(device.tier.level().into())),
    ]);
    if let Some(over) = device.oversubscription() {
        attributes.extend([
            (attribute::ISOLATION, text(OVERSUBSCRIBED)),
            (
                attribute::ISOLATION_LEVEL,
                int(Tier::Timeshared.level().into()),
            ),
            (
                attribute::MEMORY_OVERSUBSCRIPTION,
                int(over.percent().into()),
            ),
            ("residentMemory", int(device.cap.on_gpu())),
        ]);
    }
    if let Some(partition) = &device.partition {
        attributes.extend([
            (attribute::TYPE, text("mig")),
            (attribute::PARENT_UUID, text(&device.gpu_uuid)),
            (
                attribute::PROFILE,
                text(&partition.placement.profile.to_string()),
            ),
        ]);
        if let Some(mig) = &partition.mig {
            attributes.insert(attribute::UUID, text(&mig.uuid));
        }
    }
    if let Cap::Share { memory, cores, .. } = device.cap {
        attributes.extend([("memory", int(memory)), ("cores", int(cores.into()))]);
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preparation::plan;
    use crate::testing::{allocation, capped, gpu, inventory, plain, with};

    fn two_requests() -> PreparationPlan {
        let results = [
            with(capped("20Gi", "25"), &json!({"request": "first/small"})),
            with(plain("gpu-00000001"), &json!({"request": "second"})),
        ];
        let inventory = inventory(vec![gpu(0), gpu(1)]);
        plan(&allocation("a", &results), &inventory, []).unwrap()
    }

    fn objects(file: &[u8]) -> Vec<Value> {
        let stream = serde_json::Deserializer::from_slice(file).into_iter();
        stream.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn each_request_has_its_devices_in_every_version() {
        let plan = two_requests();
        assert_eq!(requests(&plan), ["first", "second"]);
        let all = objects(&file(&plan, "first"));
        let versions: Vec<_> = all.iter().map(|object| &object["apiVersion"]).collect();
        assert_eq!(versions, VERSIONS);
        assert_eq!(
            all[0]["requests"],
            json!([{"name": "first/small", "devices": [{
                "driver": "gpu.tranche.dev", "pool": "node-a/gpu", "name": "gpu-00000000-capped",
                "attributes": {
                    "type": {"string": "gpu"}, "uuid": {"string": gpu(0).uuid},
                    "resource.kubernetes.io/pciBusID": {"string": "0000:00:00.0"},
                    "isolation": {"string": "capped"}, "isolationLevel": {"int": 3},
                    "memory": {"int": 20_u64 << 30}, "cores": {"int": 25},
                },
            }]}])
        );
        assert_eq!(all[0]["metadata"]["name"], "a");
    }

    #[test]
    fn a_claim_from_a_template_is_found_by_the_pods_name_for_it() {
        let mut plan = two_requests();
        assert_eq!(
            container_path(&plan, "second"),
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/a/second/gpu.tranche.dev-metadata.json"
        );
        plan.allocation.pod_claim_name = Some("gpu".to_owned());
        assert_eq!(
            container_path(&plan, "second"),
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/second/gpu.tranche.dev-metadata.json"
        );
        assert_eq!(objects(&file(&plan, "second"))[1]["podClaimName"], "gpu");
    }
}
