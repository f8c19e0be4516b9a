//! Asks the API server whether a token's owner may read the metrics, and caches the answer.

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

use crate::PATH;

/// How long a permission is cached. Two scrapes 30 s apart, as usual, need one request.
const ALLOWED_FOR: Duration = Duration::from_mins(1);
/// How long a refusal is cached: short, so that a new right takes effect soon.
const DENIED_FOR: Duration = Duration::from_secs(10);
/// The most tokens in the cache.
const MAX_CACHED: usize = 128;
/// The most concurrent requests, so that a flood of invalid tokens does not reach the API server.
const MAX_CONCURRENT: usize = 4;
/// The time limit for both requests.
const DEADLINE: Duration = Duration::from_secs(10);
/// The longest token that is checked.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// Why a reader may not read the metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The request has no bearer token.
    #[error("send a ServiceAccount's token: Authorization: Bearer TOKEN")]
    NoToken,
    /// The API server does not know the token.
    #[error("the API server does not accept this token")]
    Unauthenticated,
    /// Its owner does not have the right.
    #[error(
        "{user} may not get {PATH}: bind it to a ClusterRole with nonResourceURLs [{PATH}] and verbs [get], such as tranche-metrics-reader"
    )]
    Forbidden {
        /// The owner's name.
        user: String,
    },
    /// The API server did not answer.
    #[error("the API server did not answer whether this token may get {PATH}; see the log")]
    Unknown,
}

/// By token: until when the answer is valid, and the answer.
type Cache = HashMap<String, (Instant, Result<(), Denied>)>;

/// Asks the API server whose a token is and what its owner may do.
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

    /// Whether the owner of `token` may read the metrics.
    pub async fn check(&self, token: Option<&str>) -> Result<(), Denied> {
        let token = token.ok_or(Denied::NoToken)?;
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Denied::Unauthenticated);
        }
        if let Some(known) = self.cached(token) {
            return known;
        }
        let asked = async {
            // The semaphore is never closed.
            let _turn = self.questions.acquire().await;
            if let Some(known) = self.cached(token) {
                return Ok(known);
            }
            self.ask(token).await
        };
        let problem = match tokio::time::timeout(DEADLINE, asked).await {
            Ok(Ok(verdict)) => {
                self.store(token, &verdict);
                return verdict;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", DEADLINE.as_secs()),
        };
        warn!(
            problem,
            "cannot check who may read the metrics; check that the service account may create tokenreviews and subjectaccessreviews"
        );
        Err(Denied::Unknown)
    }

    async fn ask(&self, token: &str) -> kube::Result<Result<(), Denied>> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        let reviews = Api::<TokenReview>::all(self.client.clone());
        let status = reviews
            .create(&PostParams::default(), &review)
            .await?
            .status;
        let Some(user) = status
            .filter(|status| status.authenticated == Some(true))
            .and_then(|status| status.user)
        else {
            return Ok(Err(Denied::Unauthenticated));
        };
        let name = user.username.clone().unwrap_or_default();
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let review = reviews
            .create(&PostParams::default(), &may_get(user))
            .await?;
        let allowed = review
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if allowed {
            Ok(())
        } else {
            Err(Denied::Forbidden { user: name })
        })
    }

    fn cached(&self, token: &str) -> Option<Result<(), Denied>> {
        let cache = self.cache();
        let (until, verdict) = cache.get(token)?;
        (Instant::now() < *until).then(|| verdict.clone())
    }

    fn store(&self, token: &str, verdict: &Result<(), Denied>) {
        let now = Instant::now();
        let mut cache = self.cache();
        cache.retain(|_, (until, _)| now < *until);
        if cache.len() >= MAX_CACHED {
            // Only a flood of refused tokens fills the cache; refusals may be dropped.
            cache.retain(|_, (_, verdict)| verdict.is_ok());
        }
        if cache.len() < MAX_CACHED {
            let time = if verdict.is_ok() {
                ALLOWED_FOR
            } else {
                DENIED_FOR
            };
            cache.insert(token.to_owned(), (now + time, verdict.clone()));
        }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks whether a user may `get` the metrics' path.
fn may_get(user: UserInfo) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(PATH.to_owned()),
                verb: Some("get".to_owned()),
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
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
                let user = match spec["token"].as_str()? {
                    "of-prometheus" => "system:serviceaccount:monitoring:prometheus",
                    "of-a-tenant" => "system:serviceaccount:team:tenant",
                    _ => "",
                };
                json!({
                    "authenticated": !user.is_empty(),
                    "user": {"username": user, "uid": "7", "groups": ["g"], "extra": {"k": ["v"]}},
                })
            }
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                // Everything that authorizers may use is passed on.
                assert_eq!(spec["uid"], "7");
                assert_eq!(spec["groups"], json!(["g"]));
                assert_eq!(spec["extra"], json!({"k": ["v"]}));
                let wanted = json!({"path": "/metrics", "verb": "get"});
                assert_eq!(spec["nonResourceAttributes"], wanted);
                json!({"allowed": spec["user"] == "system:serviceaccount:monitoring:prometheus"})
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
            access.check(Some("of-prometheus")).await.unwrap();
            access.check(Some("forged")).await.unwrap_err();
        }
        // Two requests for the first token, one for the other.
        assert_eq!(cluster.questions(), 3);
        cluster.is_down();
        tokio::time::advance(DENIED_FOR).await;
        access.check(Some("of-prometheus")).await.unwrap();
        assert_eq!(access.check(Some("forged")).await, Err(Denied::Unknown));
        tokio::time::advance(ALLOWED_FOR).await;
        let late = access.check(Some("of-prometheus")).await;
        assert_eq!(
            late,
            Err(Denied::Unknown),
            "without an answer of the API server nobody has access"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_invalid_tokens_does_not_fill_the_cache_or_affect_others() {
        let cluster = Cluster::default();
        let access = Access::new(cluster.client());
        access.check(Some("of-prometheus")).await.unwrap();
        for n in 0..2 * MAX_CACHED {
            access
                .check(Some(&format!("forged-{n}")))
                .await
                .unwrap_err();
        }
        assert!(access.cache().len() <= MAX_CACHED);
        let before = cluster.questions();
        access.check(Some("of-prometheus")).await.unwrap();
        let long = "x".repeat(MAX_TOKEN_BYTES + 1);
        assert_eq!(
            access.check(Some(&long)).await,
            Err(Denied::Unauthenticated)
        );
        assert_eq!(cluster.questions(), before);
    }
}
