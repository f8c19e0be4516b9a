//! Asks the API server whether a token's owner may get a path, or whether a user may do something else, and
//! caches the answer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::warn;

/// The path of the metrics.
pub const PATH: &str = "/metrics";

/// The audience of a token that is valid for nothing else: a forged node can do nothing with it at the API server.
/// Tokens for the API server are accepted, too.
pub const AUDIENCE: &str = "metrics.gpu.tranche.dev";

/// How long a permission is cached. Two scrapes 30 s apart, as usual, need one request.
const ALLOWED_FOR: Duration = Duration::from_mins(1);
/// How long the permission of a user is cached whom the API server has just authorized itself. The API server's own
/// library for such servers uses the same time.
const ALLOWED_AGAIN_FOR: Duration = Duration::from_secs(10);
/// How long a refusal is cached: short, so that a new right takes effect soon.
const DENIED_FOR: Duration = Duration::from_secs(10);
/// The most answers in the cache.
const MAX_CACHED: usize = 128;
/// The most concurrent requests, so that a flood of invalid tokens does not reach the API server.
const MAX_CONCURRENT: usize = 4;
/// The time limit for both requests.
const DEADLINE: Duration = Duration::from_secs(10);
/// The longest token that is checked.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// Why a request is denied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The request has no bearer token.
    #[error("send a ServiceAccount's token: Authorization: Bearer TOKEN")]
    NoToken,
    /// The API server does not know the token.
    #[error("the API server does not accept this token")]
    Unauthenticated,
    /// The user does not have the right.
    #[error("{user} may not {what}")]
    Forbidden {
        /// The user's name.
        user: String,
        /// The action that is not allowed, and what allows it.
        what: String,
    },
    /// The API server did not answer.
    #[error("the API server did not answer whether this is allowed; see the log")]
    Unknown,
}

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Question {
    /// Whether the owner of the token may get the path.
    Token { token: String, path: String },
    /// Whether a user may do something: the specification of the SubjectAccessReview as JSON.
    User(String),
}

/// The end of an answer's validity, and the answer.
type Cache = HashMap<Question, (Instant, Result<(), Denied>)>;

/// Asks the API server for the owner of a token and for the rights of a user.
pub struct Access {
    client: Client,
    questions: Semaphore,
    cache: Mutex<Cache>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Access")
    }
}

impl Access {
    /// Uses `client`, which may create TokenReviews and SubjectAccessReviews.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            questions: Semaphore::new(MAX_CONCURRENT),
            cache: Mutex::default(),
        }
    }

    /// Whether the owner of `token` may get `path`, a non-resource URL.
    pub async fn check(&self, token: Option<&str>, path: &str) -> Result<(), Denied> {
        let token = token.ok_or(Denied::NoToken)?;
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Denied::Unauthenticated);
        }
        let question = Question::Token {
            token: token.to_owned(),
            path: path.to_owned(),
        };
        self.answer(question, ALLOWED_FOR, self.ask(token, path))
            .await
    }

    /// Whether a user may do what `wanted` asks; `what` names it in words. The API server has authenticated the user.
    pub async fn may(&self, wanted: SubjectAccessReviewSpec, what: &str) -> Result<(), Denied> {
        let Ok(question) = serde_json::to_string(&wanted) else {
            return Err(Denied::Unknown);
        };
        let asked = self.review(wanted, what);
        self.answer(Question::User(question), ALLOWED_AGAIN_FOR, asked)
            .await
    }

    /// The cached answer, or the API server's.
    async fn answer(
        &self,
        question: Question,
        allowed_for: Duration,
        ask: impl Future<Output = kube::Result<Result<(), Denied>>>,
    ) -> Result<(), Denied> {
        if let Some(known) = self.cached(&question) {
            return known;
        }
        let asked = async {
            // The semaphore is never closed.
            let _turn = self.questions.acquire().await;
            if let Some(known) = self.cached(&question) {
                return Ok(known);
            }
            ask.await
        };
        let problem = match tokio::time::timeout(DEADLINE, asked).await {
            Ok(Ok(verdict)) => {
                self.store(question, allowed_for, &verdict);
                return verdict;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
        };
        warn!(
            problem,
            "cannot check who may read; check that the service account may create tokenreviews and subjectaccessreviews"
        );
        Err(Denied::Unknown)
    }

    async fn ask(&self, token: &str, path: &str) -> kube::Result<Result<(), Denied>> {
        let mut user = self.owner(token, None).await?;
        if user.is_none() {
            user = self.owner(token, Some(AUDIENCE)).await?;
        }
        match user {
            Some(user) => self.review(may_get(user, path), &how_to_get(path)).await,
            None => Ok(Err(Denied::Unauthenticated)),
        }
    }

    /// The owner of the token, if the token is for the API server or for `audience`.
    async fn owner(&self, token: &str, audience: Option<&str>) -> kube::Result<Option<UserInfo>> {
        let audiences = audience.map(|audience| vec![audience.to_owned()]);
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: audiences.clone(),
            },
            ..TokenReview::default()
        };
        let reviews = Api::<TokenReview>::all(self.client.clone());
        let answer = reviews.create(&PostParams::default(), &review).await?;
        let authenticated = answer.status.filter(|it| it.authenticated == Some(true));
        // An authenticator that does not know audiences confirms no audience.
        let status = authenticated.filter(|it| audiences.is_none() || it.audiences == audiences);
        Ok(status.and_then(|status| status.user))
    }

    async fn review(
        &self,
        wanted: SubjectAccessReviewSpec,
        what: &str,
    ) -> kube::Result<Result<(), Denied>> {
        let user = wanted.user.clone().unwrap_or_default();
        let review = SubjectAccessReview {
            spec: wanted,
            ..SubjectAccessReview::default()
        };
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let review = reviews.create(&PostParams::default(), &review).await?;
        let allowed = review
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true));
        let what = what.to_owned();
        Ok(if allowed {
            Ok(())
        } else {
            Err(Denied::Forbidden { user, what })
        })
    }

    fn cached(&self, question: &Question) -> Option<Result<(), Denied>> {
        let cache = self.cache();
        let (until, verdict) = cache.get(question)?;
        (Instant::now() < *until).then(|| verdict.clone())
    }

    fn store(&self, question: Question, allowed_for: Duration, verdict: &Result<(), Denied>) {
        let now = Instant::now();
        let mut cache = self.cache();
        cache.retain(|_, (until, _)| now < *until);
        if cache.len() >= MAX_CACHED {
            // A flood of refused tokens fills the cache; refusals may be dropped.
            cache.retain(|_, (_, verdict)| verdict.is_ok());
        }
        if cache.len() < MAX_CACHED {
            let time = if verdict.is_ok() {
                allowed_for
            } else {
                DENIED_FOR
            };
            cache.insert(question, (now + time, verdict.clone()));
        }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to get a path, and how a user gets it.
fn how_to_get(path: &str) -> String {
    format!(
        "get {path}: bind it to a ClusterRole with nonResourceURLs [{path}] and verbs [get]; the chart has tranche-metrics-reader for \
         /metrics, and tranche-node-usage-reader for /usage"
    )
}

/// Asks whether a user may `get` a path.
fn may_get(user: UserInfo, path: &str) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(path.to_owned()),
            verb: Some("get".to_owned()),
        }),
        ..of(user)
    }
}

/// A question about a user, with all fields that authorizers may use.
#[must_use]
pub fn of(user: UserInfo) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        ..SubjectAccessReviewSpec::default()
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! An API server that knows a few tokens, and counts questions.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Clone, Debug, Default)]
    pub struct Cluster {
        down: Arc<AtomicBool>,
        questions: Arc<AtomicUsize>,
    }

    impl Cluster {
        pub fn is_down(&self) {
            self.down.store(true, Ordering::SeqCst);
        }

        pub fn questions(&self) -> usize {
            self.questions.load(Ordering::SeqCst)
        }

        pub fn client(&self) -> Client {
            let this = self.clone();
            let service = tower::service_fn(move |request: Request<Body>| {
                let this = this.clone();
                async move {
                    this.questions.fetch_add(1, Ordering::SeqCst);
                    let (parts, body) = request.into_parts();
                    let body = body.collect_bytes().await.unwrap();
                    let review = serde_json::from_slice(&body).unwrap();
                    let down = this.down.load(Ordering::SeqCst);
                    let answer = answer(parts.uri.path(), review).filter(|_| !down);
                    let status = if answer.is_some() { 201 } else { 500 };
                    let body = answer.unwrap_or_default().to_string().into_bytes();
                    let response = Response::builder().status(status).body(Body::from(body));
                    Ok::<_, std::io::Error>(response.unwrap())
                }
            });
            Client::new(service, "default")
        }
    }

    fn answer(path: &str, mut review: Value) -> Option<Value> {
        let spec = &review["spec"];
        let status = match path {
            "/apis/authentication.k8s.io/v1/tokenreviews" => {
                let audiences = spec["audiences"].clone();
                let ours = audiences == json!(["metrics.gpu.tranche.dev"]);
                let user = match (spec["token"].as_str()?, ours) {
                    ("of-prometheus", false) | ("of-ours" | "without-audiences", true) => {
                        "system:serviceaccount:monitoring:prometheus"
                    }
                    ("of-a-tenant", false) => "system:serviceaccount:team:tenant",
                    _ => "",
                };
                let known = !user.is_empty() && spec["token"] != "without-audiences";
                json!({
                    "authenticated": !user.is_empty(),
                    "audiences": if known { audiences } else { Value::Null },
                    "user": {"username": user, "uid": "7", "groups": ["g"], "extra": {"k": ["v"]}},
                })
            }
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                // Everything that authorizers may use is passed on.
                assert_eq!(spec["uid"], "7");
                assert_eq!(spec["groups"], json!(["g"]));
                assert_eq!(spec["extra"], json!({"k": ["v"]}));
                let url = &spec["nonResourceAttributes"];
                let resource = json!({"verb": "list", "resource": "claimusages"});
                assert!(url["verb"] == "get" || spec["resourceAttributes"] == resource);
                let is_prometheus = spec["user"] == "system:serviceaccount:monitoring:prometheus";
                json!({"allowed": is_prometheus && (url.is_null() || url["path"] == "/metrics")})
            }
            _ => return None,
        };
        review["status"] = status;
        Some(review)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Cluster;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_cached_for_a_limited_time() {
        let cluster = Cluster::default();
        let access = Access::new(cluster.client());
        for _ in 0..3 {
            access.check(Some("of-prometheus"), PATH).await.unwrap();
            access.check(Some("forged"), PATH).await.unwrap_err();
        }
        // Two requests for each token: for the good one, its owner and the owner's rights; for the forged one, its
        // owner for the API server and for our audience.
        assert_eq!(cluster.questions(), 4);
        cluster.is_down();
        tokio::time::advance(DENIED_FOR).await;
        access.check(Some("of-prometheus"), PATH).await.unwrap();
        assert_eq!(
            access.check(Some("forged"), PATH).await,
            Err(Denied::Unknown)
        );
        tokio::time::advance(ALLOWED_FOR).await;
        let late = access.check(Some("of-prometheus"), PATH).await;
        assert_eq!(
            late,
            Err(Denied::Unknown),
            "without an answer of the API server nobody has access"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_right_to_one_path_is_none_to_another() {
        let access = Access::new(Cluster::default().client());
        access.check(Some("of-prometheus"), PATH).await.unwrap();
        let usage = access.check(Some("of-prometheus"), "/usage").await;
        let Err(Denied::Forbidden { what, .. }) = usage else {
            panic!("{usage:?}")
        };
        assert!(what.contains("nonResourceURLs [/usage]"), "{what}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_for_our_audience_equals_one_for_the_api_server() {
        let access = Access::new(Cluster::default().client());
        access.check(Some("of-ours"), PATH).await.unwrap();
        let other = access.check(Some("without-audiences"), PATH).await;
        assert_eq!(
            other,
            Err(Denied::Unauthenticated),
            "an authenticator that knows no audiences confirms none"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_user_may_is_cached_for_as_long_as_a_refusal() {
        use k8s_openapi::api::authorization::v1::ResourceAttributes;
        let cluster = Cluster::default();
        let access = Access::new(cluster.client());
        let wanted = |user: &str| SubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some("list".into()),
                resource: Some("claimusages".into()),
                ..ResourceAttributes::default()
            }),
            ..of(UserInfo {
                username: Some(user.into()),
                uid: Some("7".into()),
                groups: Some(vec!["g".into()]),
                extra: Some([("k".to_owned(), vec!["v".to_owned()])].into()),
            })
        };
        let allowed = "system:serviceaccount:monitoring:prometheus";
        for _ in 0..3 {
            access.may(wanted(allowed), "list").await.unwrap();
            let refused = access.may(wanted("other"), "list claimusages").await;
            let (user, what) = ("other".to_owned(), "list claimusages".to_owned());
            assert_eq!(refused, Err(Denied::Forbidden { user, what }));
        }
        assert_eq!(cluster.questions(), 2);
        // A token whose text equals a cached question gives no access.
        let forged = serde_json::to_string(&wanted(allowed)).unwrap();
        let forged = access.check(Some(&forged), PATH).await;
        assert_eq!(forged, Err(Denied::Unauthenticated));
        cluster.is_down();
        tokio::time::advance(ALLOWED_AGAIN_FOR).await;
        let late = access.may(wanted(allowed), "list").await;
        assert_eq!(late, Err(Denied::Unknown));
    }

    #[tokio::test(start_paused = true)]
    async fn many_invalid_tokens_do_not_fill_the_cache_or_affect_others() {
        let cluster = Cluster::default();
        let access = Access::new(cluster.client());
        access.check(Some("of-prometheus"), PATH).await.unwrap();
        for n in 0..2 * MAX_CACHED {
            access
                .check(Some(&format!("forged-{n}")), PATH)
                .await
                .unwrap_err();
        }
        assert!(access.cache().len() <= MAX_CACHED);
        let before = cluster.questions();
        access.check(Some("of-prometheus"), PATH).await.unwrap();
        let long = "x".repeat(MAX_TOKEN_BYTES + 1);
        assert_eq!(
            access.check(Some(&long), PATH).await,
            Err(Denied::Unauthenticated)
        );
        assert_eq!(cluster.questions(), before);
    }
}
