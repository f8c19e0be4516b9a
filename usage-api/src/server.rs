//! Answers the API server.
//!
//! ```text
//!  kubectl ─► API server ─ TLS, client certificate ─► front_proxy ─► request ─► access ─► nodes, claims ─► list or table
//! ```
//!
//! Lists go out object by object while nodes are asked: no list is held whole.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Request as HttpRequest, State};
use axum::http::header::{CONTENT_TYPE, VARY};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReviewSpec};
use rustls::pki_types::UnixTime;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tranche_api::usage_api::{API_VERSION, GROUP, VERSION};
use tranche_node_usage::reader::AT_ONCE;
use tranche_serving::access::{self, Access, Denied};
use tranche_serving::server::ServeError;
use tranche_serving::tls::{Peer, TlsListener};

use crate::claims::{Claims, Page};
use crate::documents;
use crate::front_proxy::Trust;
use crate::nodes::Nodes;
use crate::request::{Form, Include, Refusal, Request, Wanted, form, parse};
use crate::resources::{Object, Resource, node_object};

const JSON: &str = "application/json";
const DISCOVERY: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// Who the API server is, as of now; `None` before the ConfigMap was read.
pub type CurrentTrust = Arc<Mutex<Option<Arc<Trust>>>>;

/// What answers need.
#[derive(Debug)]
pub struct Usage {
    /// Who the API server is.
    pub trust: CurrentTrust,
    /// What users may do.
    pub access: Access,
    pub nodes: Arc<Nodes>,
    pub claims: Claims,
}

/// Serves on `endpoint` until `stop`.
pub async fn serve(
    endpoint: SocketAddr,
    usage: Usage,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    serve_on(tranche_serving::listen(endpoint).await?, usage, stop).await
}

/// Serves on `listener` until `stop`.
pub async fn serve_on(
    listener: TcpListener,
    usage: Usage,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let listener = TlsListener::with_client_certificates(listener)?;
    let nodes = Arc::clone(&usage.nodes);
    let router = Router::new().fallback(answer).with_state(Arc::new(usage));
    let served = axum::serve(
        listener,
        router.into_make_service_with_connect_info::<Peer>(),
    )
    .with_graceful_shutdown(stop.cancelled_owned());
    tokio::select! {
        served = async { served.await } => Ok(served?),
        () = nodes.forget() => Ok(()),
    }
}

async fn answer(
    State(usage): State<Arc<Usage>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: HttpRequest,
) -> Response {
    // A read has no body.
    let (http, _) = request.into_parts();
    match usage.answer(&peer, &http).await {
        Ok(response) => response,
        Err(refusal) => {
            let status =
                StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, [(CONTENT_TYPE, JSON)], refusal.json().to_string()).into_response()
        }
    }
}

impl Usage {
    async fn answer(self: &Arc<Self>, peer: &Peer, http: &Parts) -> Result<Response, Refusal> {
        let user = self.user(peer, http)?;
        let uri = &http.uri;
        let request = parse(&http.method, uri.path(), uri.query().unwrap_or_default())?;
        let wanted = match request {
            Request::Groups => {
                let aggregated = form(&http.headers)? == Form::Discovery;
                return Ok(if aggregated {
                    document(DISCOVERY, &documents::discovery())
                } else {
                    document(JSON, &documents::groups())
                });
            }
            Request::Group => return Ok(document(JSON, &documents::group())),
            Request::Version => return Ok(document(JSON, &documents::resources())),
            Request::OpenApi(wanted) => return Ok(document(JSON, &documents::open_api(wanted))),
            Request::Objects(wanted) => wanted,
        };
        let form = form(&http.headers)?;
        self.authorize(user, &wanted).await?;
        match wanted.resource {
            Resource::NodeUsages => self.nodes(wanted, form).await,
            Resource::ClaimUsages => self.claims(wanted, form).await,
        }
    }

    /// For whom the API server asks.
    fn user(&self, peer: &Peer, http: &Parts) -> Result<UserInfo, Refusal> {
        let current = self
            .trust
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let trust = current.ok_or_else(|| {
            let message =
                "the API server's certificate authority is not known yet; see the usage API's log";
            Refusal::new(503, "ServiceUnavailable", message)
        })?;
        let user = trust.user(&peer.certificates, &http.headers, UnixTime::now());
        user.map_err(|rejected| Refusal::new(401, "Unauthorized", rejected.to_string()))
    }

    /// The API server authorized the user before it forwarded the request. This authorizes what we read in the request once more.
    async fn authorize(&self, user: UserInfo, wanted: &Wanted) -> Result<(), Refusal> {
        let (verb, resource) = (wanted.verb(), wanted.resource.plural());
        let scope = match &wanted.namespace {
            Some(namespace) => format!(" in the namespace {namespace}"),
            None => " at the cluster scope".to_owned(),
        };
        let what = format!("{verb} {resource}.{GROUP}{scope}");
        let wanted = SubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                group: Some(GROUP.to_owned()),
                version: Some(VERSION.to_owned()),
                resource: Some(resource.to_owned()),
                verb: Some(verb.to_owned()),
                namespace: wanted.namespace.clone(),
                name: wanted.only().map(str::to_owned),
                ..ResourceAttributes::default()
            }),
            ..access::of(user)
        };
        self.access
            .may(wanted, &what)
            .await
            .map_err(|denied| match denied {
                Denied::Forbidden { .. } => Refusal::new(403, "Forbidden", denied.to_string()),
                _ => Refusal::new(503, "ServiceUnavailable", denied.to_string()),
            })
    }

    async fn nodes(self: &Arc<Self>, wanted: Wanted, form: Form) -> Result<Response, Refusal> {
        let known = self.nodes.names().ok_or_else(|| {
            Refusal::new(
                503,
                "ServiceUnavailable",
                "the node plugins are not listed yet",
            )
        })?;
        let only = wanted.only().map(str::to_owned);
        // A page begins behind the last node of the one before it.
        let after = &wanted.continue_token;
        let mut names: Vec<String> = known
            .into_iter()
            .filter(|name| name > after && only.as_ref().is_none_or(|only| only == name))
            .collect();
        if let Some(name) = &wanted.name {
            if names.is_empty() {
                return Err(missing(&wanted, name, "no node plugin runs on this node"));
            }
            return Ok(one(
                &wanted,
                form,
                &node(Arc::clone(&self.nodes), name.clone()).await,
            ));
        }
        let next = match usize::try_from(wanted.limit) {
            Ok(limit) if limit > 0 && names.len() > limit => {
                names.truncate(limit);
                names.last().cloned().unwrap_or_default()
            }
            _ => String::new(),
        };
        let nodes = Arc::clone(&self.nodes);
        let objects = futures::stream::iter(names)
            .map(move |name| node(Arc::clone(&nodes), name))
            .buffered(AT_ONCE)
            .map(|object| Part::Object(Box::new(object)));
        let end = futures::stream::iter([Part::End(next)]);
        let parts = objects.chain(end).map(Ok::<_, Infallible>);
        Ok(stream(&wanted, form, parts))
    }

    async fn claims(self: &Arc<Self>, wanted: Wanted, form: Form) -> Result<Response, Refusal> {
        // What the API server refuses is refused before the answer begins.
        let Page { mut objects, next } = self.claims.page(&wanted, &wanted.continue_token).await?;
        if let Some(name) = &wanted.name {
            let object = objects.pop().ok_or_else(|| {
                missing(
                    &wanted,
                    name,
                    "no claim of this name has a device of gpu.tranche.dev",
                )
            })?;
            return Ok(one(&wanted, form, &object));
        }
        // A caller that sets a limit asks for the next page itself.
        let (told, rest) = if wanted.limit > 0 {
            (next, String::new())
        } else {
            (String::new(), next)
        };
        let parts = |objects: Vec<Object>| {
            let parts = objects
                .into_iter()
                .map(|object| Ok(Part::Object(Box::new(object))));
            futures::stream::iter(parts.collect::<Vec<Result<Part, PageError>>>())
        };
        let (claims, more) = (self.claims.clone(), wanted.clone());
        let pages = futures::stream::try_unfold(rest, move |token| {
            let (claims, wanted) = (claims.clone(), more.clone());
            async move {
                if token.is_empty() {
                    return Ok(None);
                }
                let page = claims
                    .page(&wanted, &token)
                    .await
                    .map_err(|refusal| PageError(refusal.message))?;
                Ok(Some((parts(page.objects), page.next)))
            }
        });
        let first = parts(objects);
        let end = futures::stream::iter([Ok(Part::End(told))]);
        Ok(stream(
            &wanted,
            form,
            first.chain(pages.try_flatten()).chain(end),
        ))
    }
}

/// A list that could not be finished: the connection is broken off, so that no reader takes the list for complete.
#[derive(Debug, thiserror::Error)]
#[error("the list ends early: {0}")]
struct PageError(String);

/// A part of a list.
enum Part {
    Object(Box<Object>),
    /// The end, with the token for the rest of the list.
    End(String),
}

async fn node(nodes: Arc<Nodes>, name: String) -> Object {
    node_object(&name, nodes.usage(&name).await)
}

fn missing(wanted: &Wanted, name: &str, why: &str) -> Refusal {
    let resource = wanted.resource.plural();
    Refusal::new(
        404,
        "NotFound",
        format!("{resource}.{GROUP} {name:?} not found: {why}"),
    )
}

fn document(kind: &'static str, body: &Value) -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(kind)),
        (VARY, HeaderValue::from_static("Accept")),
    ];
    (headers, body.to_string()).into_response()
}

/// One object, or a table with its row.
fn one(wanted: &Wanted, form: Form, object: &Object) -> Response {
    let body = match form {
        Form::Table(version) => json!({
            "kind": "Table", "apiVersion": version, "metadata": {},
            "columnDefinitions": wanted.resource.columns(), "rows": [row(wanted.include, version, object)],
        }),
        Form::Json | Form::Discovery => object.json(),
    };
    document(JSON, &body)
}

/// A list of objects, or a table with their rows.
fn stream<E>(
    wanted: &Wanted,
    form: Form,
    parts: impl Stream<Item = Result<Part, E>> + Send + 'static,
) -> Response
where
    E: std::error::Error + Send + Sync + 'static,
{
    let head = match form {
        Form::Table(version) => format!(
            r#"{{"kind":"Table","apiVersion":"{version}","columnDefinitions":{},"rows":["#,
            wanted.resource.columns()
        ),
        Form::Json | Form::Discovery => {
            format!(
                r#"{{"kind":"{}List","apiVersion":"{API_VERSION}","items":["#,
                wanted.resource.kind()
            )
        }
    };
    let include = wanted.include;
    let mut is_first = true;
    let body = parts.map_ok(move |part| match part {
        Part::Object(object) => {
            let json = match form {
                Form::Table(version) => row(include, version, &object),
                Form::Json | Form::Discovery => object.json(),
            };
            let comma = if std::mem::take(&mut is_first) {
                ""
            } else {
                ","
            };
            Bytes::from(format!("{comma}{json}"))
        }
        Part::End(next) => {
            let metadata = if next.is_empty() {
                json!({})
            } else {
                json!({"continue": next})
            };
            Bytes::from(format!(r#"],"metadata":{metadata}}}"#))
        }
    });
    let begin = futures::stream::iter([Ok(Bytes::from(head))]);
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(JSON)),
        (VARY, HeaderValue::from_static("Accept")),
    ];
    (headers, Body::from_stream(begin.chain(body))).into_response()
}

/// A row of a table in this version of `meta.k8s.io`.
fn row(include: Include, version: &str, object: &Object) -> Value {
    let mut row = json!({"cells": object.cells()});
    match include {
        Include::None => {}
        Include::Metadata => {
            row["object"] = json!({
                "kind": "PartialObjectMetadata", "apiVersion": version, "metadata": object.metadata(),
            });
        }
        Include::Object => row["object"] = object.json(),
    }
    row
}

#[cfg(test)]
mod tests;
