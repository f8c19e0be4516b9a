//! Over TLS with real certificates, in front of an API server with two claims and of two nodes, one of them dead.

use axum::body::Body as AxumBody;
use futures::future::BoxFuture;
use http::{Request as Http, Response as HttpResponse};
use kube::Client;
use kube::client::Body as KubeBody;
use tokio::net::TcpStream;
use tranche_serving::client::Client as TlsClient;

use super::*;
use crate::front_proxy::testing::{Authority, Identity};
use tranche_node_usage::reader::Scrape;
use tranche_node_usage::{Plugins, Reader};

const ROOT: &str = "/apis/usage.gpu.tranche.dev/v1alpha1";

struct Plugin;

impl Scrape for Plugin {
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>> {
        Box::pin(async move {
            if plugin.port() != 1 {
                return Err("connection refused".to_owned());
            }
            let share = |uid: &str| {
                json!({
                    "claim": {"namespace": "team", "name": format!("claim-{uid}"), "uid": uid}, "request": "gpu",
                    "pool": "a/gpu", "device": "gpu-1-capped", "shareId": uid, "tier": "capped",
                    "memory": {"allocated": 1 << 30, "reserved": 0, "used": 1 << 20, "free": 5},
                    "utilization": {"gpu": 2_500}, "processes": 1,
                })
            };
            let gpu = json!({
                "uuid": "GPU-1", "minor": 0, "pciBusID": "0000:1b:00.0", "productName": "H100",
                "shares": [share("1"), share("of-another")],
            });
            Ok(json!({"node": "a", "unixMillis": 7, "gpus": [gpu]})
                .to_string()
                .into())
        })
    }
}

/// An API server with the claims 1 on node a and 2 on node b, in pages of one. jane may list claimusages in `team`; root may all.
fn cluster() -> Client {
    Client::new(
        tower::service_fn(|request: Http<KubeBody>| async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let query = parts.uri.query().unwrap_or_default();
            let answer = match parts.uri.path() {
                "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                    let mut review: Value = serde_json::from_slice(&body).unwrap();
                    let (spec, wanted) = (&review["spec"], &review["spec"]["resourceAttributes"]);
                    assert_eq!(wanted["group"], "usage.gpu.tranche.dev");
                    let jane = spec["user"] == "jane" && spec["groups"] == json!(["team"]);
                    let allowed = spec["user"] == "root"
                        || jane
                            && wanted["resource"] == "claimusages"
                            && wanted["namespace"] == "team";
                    review["status"] = json!({"allowed": allowed});
                    review
                }
                path => {
                    let claim = |uid: &str, node: &str| {
                        json!({
                            "metadata": {"namespace": "team", "name": format!("claim-{uid}"), "uid": uid}, "spec": {},
                            "status": {"allocation": {"devices": {"results": [
                                {"driver": "gpu.tranche.dev", "pool": format!("{node}/gpu"), "request": "gpu", "device": "d"},
                            ]}}},
                        })
                    };
                    let (items, next) = match path {
                        "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
                        | "/apis/resource.k8s.io/v1/resourceclaims" => {
                            if query.contains("continue=broken") {
                                (vec![], "error")
                            } else if query.contains("continue=second") || query.contains("claim-2")
                            {
                                (vec![claim("2", "b")], "")
                            } else if query.contains("metadata.name%3Dnone") {
                                (vec![], "")
                            } else if query.contains("claim-1") {
                                (vec![claim("1", "a")], "")
                            } else {
                                (vec![claim("1", "a")], "second")
                            }
                        }
                        _ => (vec![], ""),
                    };
                    if next == "error" {
                        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "message": "expired", "reason": "Expired"})
                    } else {
                        json!({"kind": "ResourceClaimList", "apiVersion": "resource.k8s.io/v1", "metadata": {"continue": next}, "items": items})
                    }
                }
            };
            let code = answer["code"].as_u64().unwrap_or(200);
            let response = HttpResponse::builder().status(u16::try_from(code).unwrap());
            let body = KubeBody::from(answer.to_string().into_bytes());
            Ok::<_, std::io::Error>(response.body(body).unwrap())
        }),
        "default",
    )
}

struct Served {
    address: SocketAddr,
    authority: Authority,
    stop: CancellationToken,
}

async fn served() -> Served {
    let authority = Authority::new();
    let trust = Trust::new(&authority.config_map()).unwrap();
    let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let plugins = Plugins::fixed([("a".to_owned(), at(1)), ("b".to_owned(), at(2))]);
    let nodes = Arc::new(Nodes::new(Reader::new(plugins, Plugin)));
    let usage = Usage {
        trust: Arc::new(Mutex::new(Some(Arc::new(trust)))),
        access: Access::new(cluster()),
        claims: Claims::new(cluster(), Arc::clone(&nodes)),
        nodes,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(serve_on(listener, usage, stop.clone()));
    Served {
        address,
        authority,
        stop,
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Served {
    async fn get_as(
        &self,
        identity: Option<Identity>,
        user: &str,
        path: &str,
        accept: &str,
    ) -> (u16, Value) {
        let own = identity.map(|identity| (identity.chain, identity.key));
        let client = TlsClient::with_certificate(own).unwrap();
        let request = Http::get(path)
            .header("X-Remote-User", user)
            .header("X-Remote-Group", "team")
            .header("Accept", accept)
            .header("Authorization", "Bearer of-an-administrator")
            .body(AxumBody::empty())
            .unwrap();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (status, body) = client.send(stream, request, 1 << 20).await.unwrap();
        let json = serde_json::from_slice(&body);
        (
            status.as_u16(),
            json.unwrap_or_else(|error| panic!("{error}: {body:?}")),
        )
    }

    async fn get(&self, user: &str, path: &str) -> (u16, Value) {
        let identity = self.authority.sign("front-proxy-client", true);
        self.get_as(Some(identity), user, path, "application/json")
            .await
    }
}

#[tokio::test]
async fn only_the_api_server_is_answered() {
    let served = served().await;
    let path = format!("{ROOT}/nodeusages");
    assert_eq!(served.get("root", &path).await.0, 200);
    let callers = [
        ("no certificate", None),
        (
            "another authority",
            Some(Authority::new().sign("front-proxy-client", true)),
        ),
        (
            "another name",
            Some(served.authority.sign("kubernetes-admin", true)),
        ),
        (
            "a server's certificate",
            Some(served.authority.sign("front-proxy-client", false)),
        ),
    ];
    for (why, identity) in callers {
        let (code, status) = served
            .get_as(identity, "root", &path, "application/json")
            .await;
        assert_eq!(
            (code, status["reason"].as_str()),
            (401, Some("Unauthorized")),
            "{why}: {status}"
        );
        assert_eq!(status.get("items"), None);
    }
    let (code, status) = served.get("", &path).await;
    assert_eq!(code, 401, "{status}");
}

#[tokio::test]
async fn a_user_reads_what_its_rights_allow() {
    let served = served().await;
    let team = format!("{ROOT}/namespaces/team/claimusages");
    assert_eq!(served.get("jane", &team).await.0, 200);
    for path in [
        "nodeusages",
        "nodeusages/a",
        "claimusages",
        "namespaces/other/claimusages",
    ] {
        let (code, status) = served.get("jane", &format!("{ROOT}/{path}")).await;
        assert_eq!(
            (code, status["reason"].as_str()),
            (403, Some("Forbidden")),
            "{path}: {status}"
        );
        let message = status["message"].as_str().unwrap();
        assert!(message.starts_with("jane may not "), "{message}");
    }
    for path in [
        "/apis",
        "/apis/usage.gpu.tranche.dev",
        ROOT,
        "/openapi/v2",
        "/openapi/v3",
        "/openapi/v3/apis/usage.gpu.tranche.dev/v1alpha1",
    ] {
        assert_eq!(served.get("anybody", path).await.0, 200, "{path}");
    }
    assert_eq!(
        served
            .get("root", &format!("{ROOT}/claimusages?watch=true"))
            .await
            .0,
        405
    );
}

#[tokio::test]
async fn a_list_has_every_page_and_a_dead_node_costs_its_own_rows() {
    let served = served().await;
    let team = format!("{ROOT}/namespaces/team/claimusages");
    let (_, list) = served.get("jane", &team).await;
    assert_eq!(
        (list["kind"].as_str(), list["metadata"].clone()),
        (Some("ClaimUsageList"), json!({}))
    );
    let items = list["items"].as_array().unwrap();
    assert_eq!(items.len(), 2, "{list}");
    assert_eq!(items[0]["devices"][0]["gpuUUID"], "GPU-1");
    assert_eq!(items[0]["devices"].as_array().unwrap().len(), 1);
    assert_eq!(items[1]["metadata"]["name"], "claim-2");
    let problem = items[1]["problem"].as_str().unwrap();
    assert!(problem.contains("connection refused"), "{problem}");

    // A client that sets a limit gets one page, and asks for the next.
    let (_, page) = served.get("jane", &format!("{team}?limit=1")).await;
    assert_eq!(
        (
            page["items"].as_array().unwrap().len(),
            page["metadata"]["continue"].as_str()
        ),
        (1, Some("second"))
    );
    let (_, page) = served
        .get("jane", &format!("{team}?limit=1&continue=second"))
        .await;
    assert_eq!(
        (
            page["items"][0]["metadata"]["name"].as_str(),
            page["metadata"].clone()
        ),
        (Some("claim-2"), json!({}))
    );
    let (code, status) = served
        .get("jane", &format!("{team}?limit=1&continue=broken"))
        .await;
    assert_eq!((code, status["reason"].as_str()), (410, Some("Expired")));

    let (_, one) = served.get("jane", &format!("{team}/claim-1")).await;
    assert_eq!(one, items[0]);
    let (code, status) = served.get("jane", &format!("{team}/none")).await;
    assert_eq!((code, status["reason"].as_str()), (404, Some("NotFound")));

    let (_, nodes) = served
        .get("root", &format!("{ROOT}/nodeusages?limit=500"))
        .await;
    assert_eq!(nodes["kind"], "NodeUsageList");
    assert_eq!(
        nodes["items"][0]["gpus"][0]["shares"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert!(
        nodes["items"][1]["problem"]
            .as_str()
            .unwrap()
            .contains("connection refused")
    );
    assert_eq!(nodes["metadata"], json!({}));
    for (query, item, next) in [
        ("limit=1", 0, json!({"continue": "a"})),
        ("limit=1&continue=a", 1, json!({})),
    ] {
        let page = served
            .get("root", &format!("{ROOT}/nodeusages?{query}"))
            .await
            .1;
        assert_eq!(page["items"], json!([nodes["items"][item]]), "{query}");
        assert_eq!(page["metadata"], next, "{query}");
    }
    assert_eq!(
        served.get("root", &format!("{ROOT}/nodeusages/a")).await.1,
        nodes["items"][0]
    );
    let (_, named) = served
        .get(
            "root",
            &format!("{ROOT}/nodeusages?fieldSelector=metadata.name%3Db"),
        )
        .await;
    assert_eq!(named["items"], json!([nodes["items"][1]]));
    assert_eq!(
        served.get("root", &format!("{ROOT}/nodeusages/c")).await.0,
        404
    );
}

#[tokio::test]
async fn kubectl_gets_tables() {
    let served = served().await;
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let identity = || Some(served.authority.sign("front-proxy-client", true));
    for path in [
        "nodeusages",
        "claimusages",
        "nodeusages/a",
        "namespaces/team/claimusages/claim-1",
    ] {
        let (code, table) = served
            .get_as(identity(), "root", &format!("{ROOT}/{path}"), accept)
            .await;
        assert_eq!(
            (code, table["kind"].as_str()),
            (200, Some("Table")),
            "{path}: {table}"
        );
        assert_eq!(table["apiVersion"], "meta.k8s.io/v1");
        let columns = table["columnDefinitions"].as_array().unwrap().len();
        for row in table["rows"].as_array().unwrap() {
            assert_eq!(row["cells"].as_array().unwrap().len(), columns);
            assert_eq!(row["object"]["kind"], "PartialObjectMetadata");
            assert_eq!(row["object"]["metadata"]["name"], row["cells"][0]);
        }
    }
    let path = format!("{ROOT}/claimusages?includeObject=Object");
    let (_, table) = served.get_as(identity(), "root", &path, accept).await;
    assert_eq!(table["rows"][0]["object"]["kind"], "ClaimUsage");
    let discovery = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let (_, list) = served.get_as(identity(), "root", "/apis", discovery).await;
    assert_eq!(list["kind"], "APIGroupDiscoveryList");
    let (code, _) = served
        .get_as(
            identity(),
            "root",
            &format!("{ROOT}/nodeusages"),
            "application/vnd.kubernetes.protobuf",
        )
        .await;
    assert_eq!(code, 406);
}

#[tokio::test]
async fn without_the_config_map_nobody_is_answered() {
    let served = served().await;
    let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let plugins = Plugins::fixed([("a".to_owned(), at(1))]);
    let nodes = Arc::new(Nodes::new(Reader::new(plugins, Plugin)));
    let usage = Usage {
        trust: CurrentTrust::default(),
        access: Access::new(cluster()),
        claims: Claims::new(cluster(), Arc::clone(&nodes)),
        nodes,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = Served {
        address: listener.local_addr().unwrap(),
        authority: Authority::new(),
        stop: CancellationToken::new(),
    };
    tokio::spawn(serve_on(listener, usage, other.stop.clone()));
    let identity = served.authority.sign("front-proxy-client", true);
    let (code, status) = other
        .get_as(Some(identity), "root", &format!("{ROOT}/nodeusages"), "*/*")
        .await;
    assert_eq!(
        (code, status["reason"].as_str()),
        (503, Some("ServiceUnavailable"))
    );
}
