//! Calls of the API server: each has an end.

use std::time::Duration;

/// How long one call may take. The kubelet gives a whole Prepare 45 s; and a connection of which only
/// one side is left must not hold anybody up for ever. The client must not retry behind our back
/// (`Config::default_retry` off), so this holds.
const DEADLINE: Duration = Duration::from_secs(10);

/// The API server did not answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the API server did not answer within {} s", DEADLINE.as_secs())]
pub struct Silent;

/// What the API server answers, if it does.
pub async fn within<T>(
    call: impl Future<Output = kube::Result<T>>,
) -> Result<kube::Result<T>, Silent> {
    tokio::time::timeout(DEADLINE, call)
        .await
        .map_err(|_| Silent)
}
