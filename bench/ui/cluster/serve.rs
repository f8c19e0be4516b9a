//! Answers lists and watches as an API server does.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use serde_json::json;

use crate::tenants::GpuPosition;
use crate::{Cluster, objects, tenants, usage};

/// A part of a list.
struct Page {
    start: usize,
    limit: usize,
}

pub async fn answer(State(cluster): State<Arc<Cluster>>, request: Request) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let of = |name: &str| {
        query
            .split('&')
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name, otherwise| {
        let given = of(name).and_then(|it| it.parse().ok());
        given.unwrap_or(otherwise)
    };
    let (resource, namespace) = resource(request.uri().path());
    if of("watch").is_some() {
        return watch(&cluster, resource);
    }
    let page = Page {
        start: number("continue", 0),
        limit: number("limit", usize::MAX),
    };
    list(&cluster, resource, namespace, &page).unwrap_or_else(not_found)
}

/// The resource and the namespace of a path.
fn resource(path: &str) -> (&str, Option<&str>) {
    let (before, resource) = path.rsplit_once('/').unwrap_or(("", path));
    let namespace = before.split_once("/namespaces/").map(|(_, name)| name);
    (resource, namespace)
}

fn list(
    cluster: &Cluster,
    resource: &str,
    namespace: Option<&str>,
    page: &Page,
) -> Option<Response> {
    let is_wanted = |of: &str| namespace.is_none_or(|wanted| wanted == of);
    let of_namespace = |all: &[(String, String)]| -> Vec<String> {
        let wanted = all.iter().filter(|(of, _)| is_wanted(of));
        wanted.map(|(_, object)| object.clone()).collect()
    };
    let bursts = || -> Vec<GpuPosition> {
        let bursts = cluster.bursts.lock().unwrap();
        bursts
            .iter()
            .copied()
            .filter(|_| is_wanted("burst"))
            .collect()
    };
    match resource {
        "gpunodes" => Some(page.of(&cluster.gpu_nodes, Clone::clone)),
        "resourceslices" => Some(page.of(&cluster.slices, Clone::clone)),
        "deviceclasses" => Some(page.of(&[], String::clone)),
        "pods" => Some(page.of(&of_namespace(&cluster.pods), Clone::clone)),
        "resourceclaims" => {
            let mut claims = of_namespace(&cluster.claims);
            let came = bursts().into_iter().map(tenants::burst);
            claims.extend(came.map(|it| objects::claim(&it).to_string()));
            Some(page.of(&claims, Clone::clone))
        }
        "nodeusages" => {
            let nodes: Vec<usize> = (0..cluster.nodes).collect();
            Some(page.of(&nodes, |node| usage::of_node(cluster, *node)))
        }
        "claimusages" => {
            let places: Vec<GpuPosition> = cluster.places().collect();
            let all = places.into_iter().flat_map(|it| cluster.tenants(it));
            let wanted: Vec<_> = all.filter(|it| is_wanted(it.namespace)).collect();
            Some(page.of(&wanted, |tenant| usage::of_claim(cluster, tenant)))
        }
        _ => None,
    }
}

impl Page {
    /// This part of a list. It makes only the objects of the part.
    fn of<T>(&self, all: &[T], object: impl Fn(&T) -> String) -> Response {
        let start = self.start.min(all.len());
        let next = start.saturating_add(self.limit).min(all.len());
        let mut metadata = json!({"resourceVersion": "1"});
        if next < all.len() {
            metadata["continue"] = json!(next.to_string());
        }
        let page: Vec<String> = all[start..next].iter().map(object).collect();
        let items = page.join(",");
        let list = format!(
            r#"{{"kind":"List","apiVersion":"v1","metadata":{metadata},"items":[{items}]}}"#
        );
        ([(header::CONTENT_TYPE, "application/json")], list).into_response()
    }
}

fn not_found() -> Response {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404});
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (StatusCode::NOT_FOUND, kind, body.to_string()).into_response()
}

/// Only claims change.
fn watch(cluster: &Cluster, resource: &str) -> Response {
    let body = if resource == "resourceclaims" {
        let events = stream::unfold(cluster.events.subscribe(), |mut events| async {
            let line = events.recv().await.ok()?;
            Some((Ok::<_, Infallible>(line), events))
        });
        Body::from_stream(events)
    } else {
        Body::from_stream(stream::pending::<Result<Bytes, Infallible>>().boxed())
    };
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
