//! What the API says of itself: discovery, and OpenAPI for `kubectl explain`. Pure.

use serde_json::{Map, Value, json};
use tranche_api::usage_api::{API_VERSION, GROUP, VERSION};

use crate::request::OpenApi;
use crate::resources::Resource;

const VERBS: [&str; 2] = ["get", "list"];

fn version() -> Value {
    json!({"groupVersion": API_VERSION, "version": VERSION})
}

/// An `APIGroup`.
#[must_use]
pub fn group() -> Value {
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version()], "preferredVersion": version(),
    })
}

/// The `APIGroupList` of this server.
#[must_use]
pub fn groups() -> Value {
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group()]})
}

/// The `APIResourceList` of our version.
#[must_use]
pub fn resources() -> Value {
    let resource = |resource: Resource| {
        json!({
            "name": resource.plural(), "singularName": resource.singular(), "namespaced": resource.is_namespaced(),
            "kind": resource.kind(), "verbs": VERBS,
        })
    };
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API_VERSION,
        "resources": Resource::ALL.map(resource),
    })
}

/// The `APIGroupDiscoveryList` of this server: all of the above in one answer.
#[must_use]
pub fn discovery() -> Value {
    let resource = |resource: Resource| {
        let scope = if resource.is_namespaced() {
            "Namespaced"
        } else {
            "Cluster"
        };
        json!({
            "resource": resource.plural(), "singularResource": resource.singular(), "scope": scope, "verbs": VERBS,
            "responseKind": {"group": GROUP, "version": VERSION, "kind": resource.kind()},
        })
    };
    json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
        "items": [{
            "metadata": {"name": GROUP},
            "versions": [{"version": VERSION, "freshness": "Current", "resources": Resource::ALL.map(resource)}],
        }],
    })
}

/// A document that describes the API. It has the kinds with their top-level fields; `docs/reference/usage-api.md` has the rest.
#[must_use]
pub fn open_api(document: OpenApi) -> Value {
    let info = json!({"title": "Tranche usage", "version": VERSION});
    match document {
        OpenApi::V2 => json!({
            "swagger": "2.0", "info": info, "paths": {}, "definitions": {},
        }),
        OpenApi::V3 => json!({
            "paths": {format!("apis/{API_VERSION}"): {"serverRelativeURL": format!("/openapi/v3/apis/{API_VERSION}")}},
        }),
        OpenApi::V3Group => {
            let mut paths = Map::new();
            let mut schemas = Map::new();
            for resource in Resource::ALL {
                let scope = if resource.is_namespaced() {
                    "namespaces/{namespace}/"
                } else {
                    ""
                };
                let path = format!("/apis/{API_VERSION}/{scope}{}/{{name}}", resource.plural());
                let schema = format!("dev.tranche.gpu.usage.{VERSION}.{}", resource.kind());
                let kind = json!({"group": GROUP, "version": VERSION, "kind": resource.kind()});
                let content = json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{schema}")}}});
                paths.insert(
                    path,
                    json!({"get": {
                        "operationId": format!("read{}", resource.kind()),
                        "responses": {"200": {"description": "OK", "content": content}},
                        "x-kubernetes-action": "get",
                        "x-kubernetes-group-version-kind": kind,
                    }}),
                );
                let mut described = schema_of(resource);
                described["x-kubernetes-group-version-kind"] = json!([kind]);
                schemas.insert(schema, described);
            }
            json!({"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}})
        }
    }
}

fn schema_of(resource: Resource) -> Value {
    let text = |meaning: &str| json!({"type": "string", "description": meaning});
    let list = |meaning: &str| json!({"type": "array", "items": {"type": "object"}, "description": meaning});
    let mut properties = match resource {
        Resource::NodeUsages => json!({
            "node": text("The node."),
            "driverVersion": text("The NVIDIA driver's version."),
            "unixMillis": {"type": "integer", "format": "int64", "description": "When NVML was read: Unix time in milliseconds."},
            "gpus": list("The GPUs, with their shares, partitions and what belongs to no claim."),
        }),
        Resource::ClaimUsages => json!({
            "claimUID": text("The claim's UID."),
            "nodes": {"type": "array", "items": {"type": "string"}, "description": "The nodes whose devices it has."},
            "devices": list("Its devices: GPU, tier, memory, utilization, processes and idle time."),
        }),
    };
    properties["apiVersion"] = text(API_VERSION);
    properties["kind"] = text(resource.kind());
    properties["metadata"] =
        json!({"type": "object", "description": "Name, and namespace and labels of a claim."});
    properties["problem"] = text("Why the usage, or a part of it, is not known.");
    let description = match resource {
        Resource::NodeUsages => {
            "NodeUsage tells who uses which part of a node's GPUs. It names the tenants of all namespaces."
        }
        Resource::ClaimUsages => "ClaimUsage tells what a ResourceClaim uses of its devices.",
    };
    json!({"type": "object", "description": description, "properties": properties})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_discovery_say_the_same() {
        let (old, new) = (resources(), discovery());
        let new = &new["items"][0]["versions"][0]["resources"];
        for (index, resource) in Resource::ALL.into_iter().enumerate() {
            let (old, new) = (&old["resources"][index], &new[index]);
            assert_eq!(old["name"], new["resource"]);
            assert_eq!(old["kind"], new["responseKind"]["kind"]);
            assert_eq!(old["verbs"], new["verbs"]);
            assert_eq!(old["namespaced"] == true, new["scope"] == "Namespaced");
            assert_eq!(old["name"], resource.plural());
        }
        // Nothing may delete, so neither the garbage collector nor the deletion of a namespace reads us.
        assert_eq!(old["resources"][0]["verbs"], json!(["get", "list"]));
    }

    #[test]
    fn every_kind_is_described_where_kubectl_looks_for_it() {
        let list = open_api(OpenApi::V3);
        assert!(list["paths"]["apis/usage.gpu.tranche.dev/v1alpha1"].is_object());
        let document = open_api(OpenApi::V3Group);
        for (_, path) in document["paths"].as_object().unwrap() {
            let answer =
                &path["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"];
            let name = answer.as_str().unwrap().rsplit('/').next().unwrap();
            let schema = &document["components"]["schemas"][name];
            assert_eq!(
                schema["x-kubernetes-group-version-kind"][0],
                path["get"]["x-kubernetes-group-version-kind"]
            );
        }
    }
}
