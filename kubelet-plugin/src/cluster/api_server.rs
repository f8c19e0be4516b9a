//! Calls of the API server, each with a time limit.

use std::time::Duration;

/// How long one call may take. The kubelet allows 45 s for a whole Prepare, and a half-open
/// connection must not block a call for ever. The client must not retry by itself
/// (`Config::default_retry` off).
const DEADLINE: Duration = Duration::from_secs(10);

/// The API server did not answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the API server did not answer within {} s", DEADLINE.as_secs())]
pub struct NoAnswer;

/// The API server's answer, if there is one in time.
pub async fn within<T>(
    call: impl Future<Output = kube::Result<T>>,
) -> Result<kube::Result<T>, NoAnswer> {
    tokio::time::timeout(DEADLINE, call)
        .await
        .map_err(|_| NoAnswer)
}
