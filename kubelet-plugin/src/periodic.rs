//! Blocking work that is repeated at an interval.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Calls `round` with `state` on a blocking thread, at once and then every `interval`, and passes its result
/// to `then`, until cancelled. A round that takes longer delays the next one.
pub async fn run<S: Send + 'static, R: Send + 'static>(
    mut state: S,
    interval: Duration,
    stop: &CancellationToken,
    round: impl Fn(&mut S) -> R + Copy + Send + 'static,
    then: impl Fn(&S, R),
) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let work = tokio::task::spawn_blocking(move || {
            let result = round(&mut state);
            (state, result)
        });
        // Fails only at shutdown, when the runtime accepts no more blocking work.
        let Ok((back, result)) = work.await else {
            return;
        };
        then(&back, result);
        state = back;
    }
}
