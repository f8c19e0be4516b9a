//! The suite's clock, which runs only while the machine makes progress.
//!
//! A tick is a tenth of a second and then an answer of the API server. A machine that stands still, or is too busy to answer, does
//! not tick. So a limit in ticks ends a wait for a product that does not work, but not a wait for a machine that makes no progress.

use std::future::pending;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client, Config};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::limits::Limit;

const TICK: Duration = Duration::from_millis(100);
const TICKS_A_SECOND: u64 = 10;
/// After this time an answer counts as lost.
const LOST: Duration = Duration::from_secs(10);

/// The number of ticks until now.
#[derive(Clone, Debug)]
struct Pulse(watch::Receiver<u64>);

impl Pulse {
    /// The pulse of the machine, of all tests of this process: it has a thread of its own.
    fn of_the_machine() -> Self {
        static PULSE: OnceLock<Pulse> = OnceLock::new();
        let start = || {
            let (ticks, pulse) = watch::channel(0);
            std::thread::spawn(move || {
                if let Err(error) = tick_by_the_api_server(&ticks) {
                    eprintln!("no pulse: {error:#}");
                }
            });
            Self(pulse)
        };
        PULSE.get_or_init(start).clone()
    }

    fn ticks(&self) -> u64 {
        *self.0.borrow()
    }

    /// Returns when the limit is over.
    async fn over(mut self, limit: Limit) {
        let last = self.ticks() + limit.seconds() * TICKS_A_SECOND;
        let ticked = async {
            if self.0.wait_for(|now| *now >= last).await.is_err() {
                // The pulse's thread has ended, so only the ceiling can end the wait.
                pending::<()>().await;
            }
        };
        let _ = timeout(limit.ceiling(), ticked).await;
    }

    /// The result of `work`, unless the limit is over first.
    async fn within<T>(self, limit: Limit, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.over(limit) => None,
        }
    }
}

/// The result of `work`, unless the limit is over first.
pub async fn within<T>(limit: Limit, work: impl Future<Output = T>) -> Option<T> {
    Pulse::of_the_machine().within(limit, Box::pin(work)).await
}

/// How long something takes, by the clock and by the pulse.
#[derive(Debug)]
pub struct Stopwatch {
    pulse: Pulse,
    began: Instant,
    ticks: u64,
}

impl Stopwatch {
    /// Begins now.
    #[must_use]
    pub fn start() -> Self {
        let pulse = Pulse::of_the_machine();
        let ticks = pulse.ticks();
        Self {
            pulse,
            began: Instant::now(),
            ticks,
        }
    }

    /// The time since then by the clock.
    #[must_use]
    pub fn by_the_clock(&self) -> Duration {
        self.began.elapsed()
    }

    /// The time since then by the pulse.
    #[must_use]
    pub fn by_the_pulse(&self) -> Duration {
        Duration::from_millis((self.pulse.ticks() - self.ticks) * 1000 / TICKS_A_SECOND)
    }

    /// The time in which the machine stood still.
    #[must_use]
    pub fn stalled(&self) -> Duration {
        self.by_the_clock().saturating_sub(self.by_the_pulse())
    }
}

fn tick_by_the_api_server(ticks: &watch::Sender<u64>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = Client::try_from(Config::infer().await?)?;
        let namespaces: Api<Namespace> = Api::all(client);
        tick(ticks, async || {
            namespaces.get_metadata("default").await.is_ok()
        })
        .await;
        Ok(())
    })
}

/// Ticks each time that `ask` has an answer, as long as there is a receiver.
async fn tick(ticks: &watch::Sender<u64>, ask: impl AsyncFn() -> bool) {
    while !ticks.is_closed() {
        sleep(TICK).await;
        if timeout(LOST, ask()).await == Ok(true) {
            ticks.send_modify(|ticks| *ticks += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::USUAL;

    /// How long a wait for something that never happens lasts with answers of `ask`.
    async fn waits(ask: impl AsyncFn() -> bool) -> Duration {
        let (ticks, pulse) = watch::channel(0);
        let began = tokio::time::Instant::now();
        tokio::select! {
            over = Pulse(pulse).within(USUAL, pending::<()>()) => assert_eq!(over, None),
            () = tick(&ticks, ask) => {}
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn on_a_quick_machine_a_limit_is_its_seconds() {
        assert_eq!(waits(async || true).await.as_secs(), USUAL.seconds());
    }

    #[tokio::test(start_paused = true)]
    async fn while_the_machine_stands_still_a_limit_does_too() {
        let stalled = Duration::from_millis(300);
        let slow = async || {
            sleep(stalled).await;
            true
        };
        assert_eq!(waits(slow).await.as_secs(), 4 * USUAL.seconds());
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_never_answers_ends_a_wait_at_the_ceiling() {
        assert_eq!(waits(async || false).await, USUAL.ceiling());
        assert_eq!(waits(pending).await, USUAL.ceiling());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_done_in_time_is_returned() {
        let (_ticks, pulse) = watch::channel(0);
        assert_eq!(Pulse(pulse).within(USUAL, async { 7 }).await, Some(7));
    }
}
