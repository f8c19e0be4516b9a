//! What a request asks for: its path, its query and what it accepts. Pure.

use form_urlencoded::parse as query_pairs;
use http::{HeaderMap, Method};
use serde_json::{Value, json};
use tranche_api::usage_api::{GROUP, VERSION};

use crate::resources::Resource;

/// A request that can be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `/apis`: the groups.
    Groups,
    /// `/apis/GROUP`: its versions.
    Group,
    /// `/apis/GROUP/VERSION`: its resources.
    Version,
    /// `/openapi/v2`, `/openapi/v3` or a document of the latter.
    OpenApi(OpenApi),
    Objects(Wanted),
}

/// A document that describes the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenApi {
    /// All of it in version 2.
    V2,
    /// The list of documents in version 3.
    V3,
    /// The document of our group and version.
    V3Group,
}

/// Objects that are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub resource: Resource,
    /// The namespace; `None` for all, and for nodes.
    pub namespace: Option<String>,
    /// One object by its name in the path.
    pub name: Option<String>,
    /// `fieldSelector`.
    pub fields: String,
    /// `labelSelector`.
    pub labels: String,
    /// `limit`; 0 for none.
    pub limit: u32,
    /// `continue`.
    pub continue_token: String,
    /// `includeObject`, of a table.
    pub include: Include,
}

/// How much of the object a row of a table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Include {
    None,
    #[default]
    Metadata,
    Object,
}

/// In which form the answer is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    /// A `Table` of `meta.k8s.io` in this version.
    Table(&'static str),
    /// An `APIGroupDiscoveryList` of `apidiscovery.k8s.io/v2`.
    Discovery,
}

/// Why a request is not answered: a `Status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: u16,
    /// As in `metav1.StatusReason`.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl Refusal {
    #[must_use]
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            code,
            reason,
            message,
        }
    }

    #[must_use]
    pub fn not_found() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    /// As a `Status`.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}

impl Wanted {
    /// The verb, as in rights.
    #[must_use]
    pub const fn verb(&self) -> &'static str {
        if self.name.is_some() { "get" } else { "list" }
    }

    /// The only name that the path or the selector allows: the API server authorizes `list` with such a selector by name, too.
    #[must_use]
    pub fn only(&self) -> Option<&str> {
        self.name.as_deref().or_else(|| selected_name(&self.fields))
    }
}

/// The name that a field selector of one term selects.
fn selected_name(fields: &str) -> Option<&str> {
    let (field, name) = fields.split_once('=')?;
    let name = name.strip_prefix('=').unwrap_or(name);
    (field == "metadata.name" && is_name(name)).then_some(name)
}

/// What a request asks for.
pub fn parse(method: &Method, path: &str, query: &str) -> Result<Request, Refusal> {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let request = match parts.as_slice() {
        ["apis"] => Request::Groups,
        ["apis", group] if *group == GROUP => Request::Group,
        ["apis", group, version] if *group == GROUP && *version == VERSION => Request::Version,
        ["openapi", "v2"] => Request::OpenApi(OpenApi::V2),
        ["openapi", "v3"] => Request::OpenApi(OpenApi::V3),
        ["openapi", "v3", "apis", group, version] if *group == GROUP && *version == VERSION => {
            Request::OpenApi(OpenApi::V3Group)
        }
        ["apis", group, version, rest @ ..] if *group == GROUP && *version == VERSION => {
            let wanted = objects(rest).ok_or_else(Refusal::not_found)?;
            Request::Objects(with_query(wanted, query)?)
        }
        _ => return Err(Refusal::not_found()),
    };
    if method != Method::GET {
        return Err(Refusal::new(
            405,
            "MethodNotAllowed",
            "usage can be read and not written: use get or list",
        ));
    }
    Ok(request)
}

fn objects(rest: &[&str]) -> Option<Wanted> {
    let (namespace, resource, name) = match rest {
        ["namespaces", namespace, resource] => (Some(*namespace), *resource, None),
        ["namespaces", namespace, resource, name] => (Some(*namespace), *resource, Some(*name)),
        [resource] => (None, *resource, None),
        [resource, name] => (None, *resource, Some(*name)),
        _ => return None,
    };
    let resource = Resource::ALL
        .into_iter()
        .find(|it| it.plural() == resource)?;
    let fits = match (namespace, name) {
        (Some(_), _) => resource.is_namespaced(),
        (None, Some(_)) => !resource.is_namespaced(),
        (None, None) => true,
    };
    // Escaped characters are not decoded, since a name has none: so we read the same name that the API server authorized.
    let named = namespace.into_iter().chain(name).all(is_name);
    (fits && named).then(|| Wanted {
        resource,
        namespace: namespace.map(str::to_owned),
        name: name.map(str::to_owned),
        fields: String::new(),
        labels: String::new(),
        limit: 0,
        continue_token: String::new(),
        include: Include::default(),
    })
}

/// Whether this can be the name of a claim, a namespace or a node: a DNS subdomain. `..` is not one: names become a part of a path.
fn is_name(name: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        let ends = bytes.first().into_iter().chain(bytes.last());
        !bytes.is_empty()
            && ends.copied().all(alphanumeric)
            && bytes
                .iter()
                .all(|byte| alphanumeric(*byte) || *byte == b'-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

fn with_query(mut wanted: Wanted, query: &str) -> Result<Wanted, Refusal> {
    for (key, value) in query_pairs(query.as_bytes()) {
        match key.as_ref() {
            "watch" if !matches!(value.as_ref(), "0" | "false") => {
                return Err(Refusal::new(
                    405,
                    "MethodNotAllowed",
                    format!(
                        "{}.{GROUP} cannot be watched: nothing stores usage; list it again",
                        wanted.resource.plural()
                    ),
                ));
            }
            "fieldSelector" => wanted.fields = value.into_owned(),
            "labelSelector" => wanted.labels = value.into_owned(),
            "continue" => wanted.continue_token = value.into_owned(),
            "limit" => {
                wanted.limit = value.parse().map_err(|_| {
                    Refusal::new(400, "BadRequest", format!("limit {value:?} is no number"))
                })?;
            }
            "includeObject" => {
                wanted.include = match value.as_ref() {
                    "None" => Include::None,
                    "" | "Metadata" => Include::Metadata,
                    "Object" => Include::Object,
                    _ => {
                        let message =
                            format!("includeObject {value:?} is not None, Metadata or Object");
                        return Err(Refusal::new(400, "BadRequest", message));
                    }
                };
            }
            _ => {}
        }
    }
    if wanted.resource == Resource::NodeUsages {
        let by_name = wanted.fields.is_empty() || selected_name(&wanted.fields).is_some();
        if !by_name || !wanted.labels.is_empty() {
            let message = "nodeusages can be selected by the field metadata.name only";
            return Err(Refusal::new(400, "BadRequest", message));
        }
    }
    Ok(wanted)
}

/// The first form of `Accept` that is served.
pub fn form(headers: &HeaderMap) -> Result<Form, Refusal> {
    let mut ranges = headers
        .get_all(http::header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .peekable();
    if ranges.peek().is_none() {
        return Ok(Form::Json);
    }
    ranges.find_map(form_of).ok_or_else(|| {
        Refusal::new(
            406,
            "NotAcceptable",
            "only application/json is served, as an object, a list or a Table of meta.k8s.io",
        )
    })
}

fn form_of(range: &str) -> Option<Form> {
    let mut parts = range.split(';').map(str::trim);
    if !matches!(parts.next()?, "application/json" | "application/*" | "*/*") {
        return None;
    }
    let (mut form, mut group, mut version) = ("", "", "");
    for (key, value) in parts.filter_map(|part| part.split_once('=')) {
        match key.trim() {
            "as" => form = value.trim(),
            "g" => group = value.trim(),
            "v" => version = value.trim(),
            _ => {}
        }
    }
    match (form, group, version) {
        ("", _, _) => Some(Form::Json),
        ("Table", "meta.k8s.io", "v1") => Some(Form::Table("meta.k8s.io/v1")),
        ("Table", "meta.k8s.io", "v1beta1") => Some(Form::Table("meta.k8s.io/v1beta1")),
        ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2") => Some(Form::Discovery),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOT: &str = "/apis/usage.gpu.tranche.dev/v1alpha1";

    fn get(path: &str, query: &str) -> Result<Request, Refusal> {
        parse(&Method::GET, path, query)
    }

    fn wanted(path: &str, query: &str) -> Wanted {
        match get(&format!("{ROOT}/{path}"), query).unwrap() {
            Request::Objects(wanted) => wanted,
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn paths_are_read_as_the_api_server_reads_them() {
        let list = wanted("claimusages", "");
        assert_eq!((list.namespace.as_deref(), list.verb()), (None, "list"));
        let list = wanted("namespaces/team/claimusages", "limit=500&continue=abc");
        assert_eq!(list.namespace.as_deref(), Some("team"));
        assert_eq!((list.limit, list.continue_token.as_str()), (500, "abc"));
        let one = wanted("namespaces/team/claimusages/a.b-c", "");
        assert_eq!((one.only(), one.verb()), (Some("a.b-c"), "get"));
        let one = wanted("nodeusages", "fieldSelector=metadata.name%3Da");
        assert_eq!((one.only(), one.verb()), (Some("a"), "list"));
        assert_eq!(wanted("nodeusages/a", "").name.as_deref(), Some("a"));
        for path in [
            "/",
            "/api",
            "/apis/other",
            "/apis/usage.gpu.tranche.dev/v1",
            "/healthz",
            "/openapi/v4",
        ] {
            assert_eq!(get(path, "").unwrap_err().code, 404, "{path}");
        }
        for path in [
            "",
            "pods",
            "claimusages/a",
            "namespaces/team/nodeusages",
            "namespaces/team/nodeusages/a",
            "nodeusages/a/status",
            "namespaces//claimusages",
            "namespaces/team%2Fother/claimusages",
            "namespaces/../claimusages",
            "namespaces/./claimusages",
            "namespaces/team/claimusages/..",
            "nodeusages/-a",
            "namespaces/team/claimusages/a%2e",
            "namespaces/Team/claimusages",
            "watch/claimusages",
            "namespaces/team",
        ] {
            let answer = get(&format!("{ROOT}/{path}"), "");
            assert_eq!(answer.unwrap_err().code, 404, "{path}");
        }
    }

    #[test]
    fn a_watch_and_a_write_are_refused_with_a_way_out() {
        for query in ["watch=true", "watch=1", "watch", "limit=5&watch=true"] {
            let refusal = get(&format!("{ROOT}/claimusages"), query).unwrap_err();
            assert_eq!(refusal.code, 405, "{query}");
            assert!(
                refusal.message.contains("list it again"),
                "{}",
                refusal.message
            );
            assert_eq!(refusal.json()["kind"], "Status");
        }
        assert_eq!(wanted("claimusages", "watch=false").verb(), "list");
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
            let refusal = parse(&method, &format!("{ROOT}/nodeusages/a"), "").unwrap_err();
            assert_eq!(refusal.code, 405, "{method}");
        }
        for (path, query) in [
            ("nodeusages", "labelSelector=a%3Db"),
            ("nodeusages", "fieldSelector=spec.a%3Db"),
            ("nodeusages", "limit=many"),
            ("claimusages", "includeObject=Half"),
        ] {
            let refusal = get(&format!("{ROOT}/{path}"), query).unwrap_err();
            assert_eq!(refusal.code, 400, "{path} {query}");
        }
    }

    #[test]
    fn kubectl_gets_a_table_and_its_output_as_json_an_object() {
        let form = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("accept", accept.parse().unwrap());
            super::form(&headers).map_err(|refusal| refusal.code)
        };
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(form(table), Ok(Form::Table("meta.k8s.io/v1")));
        assert_eq!(form("application/json"), Ok(Form::Json));
        assert_eq!(
            form("application/vnd.kubernetes.protobuf, */*"),
            Ok(Form::Json)
        );
        assert_eq!(
            form(
                "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"
            ),
            Ok(Form::Json)
        );
        let discovery =
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        assert_eq!(form(discovery), Ok(Form::Discovery));
        assert_eq!(form("application/vnd.kubernetes.protobuf"), Err(406));
        assert_eq!(form("text/html"), Err(406));
        assert_eq!(super::form(&HeaderMap::new()).unwrap(), Form::Json);
    }

    proptest! {
        #[test]
        fn nothing_in_a_path_or_a_query_panics(path in ".*", query in ".*", accept in ".*") {
            let _ = get(&path, &query);
            let _ = get(&format!("{ROOT}/{path}"), &query);
            let _ = form_of(&accept);
        }
    }
}
