//! Why there is no verdict about claims.

use super::selector::Fault;

/// The claims neither fit nor do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The scheduler stops with an error: the pod waits, even if devices are free.
    #[error("{0}")]
    Stops(String),
    /// The scheduler has a verdict, but this program has none.
    #[error("cannot judge: {0}")]
    Unjudged(String),
}

impl Problem {
    pub(super) fn stops(message: impl Into<String>) -> Self {
        Self::Stops(message.into())
    }

    #[allow(
        clippy::needless_pass_by_value,
        reason = "an argument of map_err, which gives the error away"
    )]
    pub(super) fn unjudged(message: impl ToString) -> Self {
        Self::Unjudged(message.to_string())
    }

    /// A selector's fault, with the place of the selector.
    pub(super) fn of_selector(place: &str, fault: Fault) -> Self {
        match fault {
            Fault::Runtime(message) => {
                Self::Stops(format!("{place}: CEL runtime error: {message}"))
            }
            Fault::Unjudged(message) => Self::Unjudged(format!("{place}: {message}")),
        }
    }
}
