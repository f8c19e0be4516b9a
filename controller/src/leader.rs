//! Leader election: a Lease, taken and renewed by compare-and-swap.
//!
//! `kube-lease-manager` was tried first. Its followers look at the lease again only when their copy has
//! expired, so they take a released lease up to a whole duration late; it compares the holder's clock
//! with its own; and it takes an expired lease by a patch without a resourceVersion, so that two
//! followers can both believe they won. This one
//!
//! * writes with the resourceVersion it read, so that of two contenders one gets a conflict,
//! * measures expiry on its own monotonic clock, from when it saw the lease change, as client-go does,
//! * watches the lease, so that a lease released at SIGTERM is taken at once.
//!
//! The lease prevents two replicas from doing the same work. It is not a fence: what keeps a late write
//! harmless is that every write names the version that it was decided on.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a lease is valid without a renewal, unless the command line says otherwise.
pub const DURATION: Duration = Duration::from_secs(15);

/// The times of an election: all follow from the lease's duration.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// How long a lease is valid without a renewal.
    duration: Duration,
    /// How often the leader renews.
    renew: Duration,
    /// How long the leader may write after its last successful renewal began. The rest of the duration covers a
    /// write that is under way.
    tenure: Duration,
    /// How long one request may take.
    deadline: Duration,
    /// The wait after a failed request.
    retry: Duration,
}

impl Times {
    fn of(duration: Duration) -> Self {
        let fifteenths = |count: u32| duration * count / 15;
        Self {
            duration,
            renew: fifteenths(4),
            tenure: fifteenths(10),
            deadline: fifteenths(3),
            retry: fifteenths(1),
        }
    }
}

/// Until when this replica may write; clones follow the election.
#[derive(Clone, Debug)]
pub struct Leadership {
    tenure: watch::Receiver<Option<Instant>>,
    deadline: Duration,
}

impl Leadership {
    /// Whether this replica may write now.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.tenure
            .borrow()
            .is_some_and(|until| Instant::now() < until)
    }

    /// How long a write may take: one that began while this replica could lead has ended when another one can.
    #[must_use]
    pub const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Waits for the next election, renewal or loss. Never returns when the election has ended.
    pub async fn changed(&mut self) {
        if self.tenure.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A candidate for the lease.
#[derive(Debug)]
pub struct Election {
    api: Api<Lease>,
    name: String,
    identity: String,
    times: Times,
    tenure: watch::Sender<Option<Instant>>,
}

/// The lease as it was last seen to change.
#[derive(Clone, Debug, Default)]
struct ObservedLease {
    lease: Option<Lease>,
    at: Option<Instant>,
}

impl ObservedLease {
    fn update(&mut self, lease: Option<Lease>) {
        let version =
            |l: &Option<Lease>| l.as_ref().and_then(|l| l.metadata.resource_version.clone());
        if self.at.is_none() || version(&self.lease) != version(&lease) {
            self.at = Some(Instant::now());
        }
        self.lease = lease;
    }

    /// Who holds it; `None` if anyone may take it at `now`.
    fn holder(&self, now: Instant) -> Option<&str> {
        let spec = self.lease.as_ref()?.spec.as_ref()?;
        let holder = spec.holder_identity.as_deref().filter(|h| !h.is_empty())?;
        (now < self.expiry()?).then_some(holder)
    }

    fn expiry(&self) -> Option<Instant> {
        let spec = self.lease.as_ref()?.spec.as_ref()?;
        let seconds = u64::try_from(spec.lease_duration_seconds?).unwrap_or(0);
        Some(self.at? + Duration::from_secs(seconds))
    }
}

impl Election {
    /// A candidate named `identity` for the lease `name`, which holds for `duration` unless it is renewed, and the
    /// result of the election, for everyone who writes.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        identity: &str,
        duration: Duration,
    ) -> (Self, Leadership) {
        let (tenure, receiver) = watch::channel(None);
        let times = Times::of(duration);
        let leadership = Leadership {
            tenure: receiver,
            deadline: times.duration.saturating_sub(times.tenure),
        };
        let election = Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            times,
            tenure,
        };
        (election, leadership)
    }

    /// Stands for election until `stop`, then releases the lease.
    pub async fn run(self, stop: CancellationToken) {
        let fields = format!("metadata.name={}", self.name);
        let mut events = watcher(self.api.clone(), watcher::Config::default().fields(&fields))
            .default_backoff()
            .map_err(|error| tracing::warn!(%error, "the watch of the lease failed"))
            .boxed();
        let mut seen = ObservedLease::default();
        loop {
            let now = Instant::now();
            let wake = match seen.holder(now) {
                // Nothing was read yet.
                _ if seen.at.is_none() => self.observe(&mut seen).await,
                Some(holder) if holder == self.identity => {
                    // This process held it before it restarted, and takes it again at once.
                    let due = match (*self.tenure.borrow(), seen.at) {
                        (Some(_), Some(at)) => at + self.times.renew,
                        _ => now,
                    };
                    if now >= due {
                        self.take(&mut seen).await
                    } else {
                        due
                    }
                }
                Some(_) => {
                    self.lost();
                    seen.expiry().unwrap_or(now)
                }
                None => self.take(&mut seen).await,
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep_until(wake) => {}
                Some(Ok(event)) = events.next() => match event {
                    watcher::Event::Apply(lease) | watcher::Event::InitApply(lease) => {
                        if is_newer(&lease, &seen) {
                            seen.update(Some(lease));
                        }
                    }
                    watcher::Event::Delete(_) => seen.update(None),
                    watcher::Event::Init | watcher::Event::InitDone => {}
                },
            }
        }
        self.release(&seen).await;
    }

    async fn observe(&self, seen: &mut ObservedLease) -> Instant {
        match tokio::time::timeout(self.times.deadline, self.api.get_opt(&self.name)).await {
            Ok(Ok(lease)) => {
                seen.update(lease);
                Instant::now()
            }
            Ok(Err(error)) => self.failed("read", &error),
            Err(_) => self.failed("read", &"no answer in time"),
        }
    }

    /// Takes or renews the lease that was seen; a conflict means that somebody was faster.
    async fn take(&self, seen: &mut ObservedLease) -> Instant {
        let began = Instant::now();
        let mut lease = claimed(
            seen.lease.as_ref(),
            &self.identity,
            self.times.duration,
            Timestamp::now(),
        );
        lease.metadata.name = Some(self.name.clone());
        let params = PostParams::default();
        let request = async {
            match &seen.lease {
                Some(_) => self.api.replace(&self.name, &params, &lease).await,
                None => self.api.create(&params, &lease).await,
            }
        };
        match tokio::time::timeout(self.times.deadline, request).await {
            Ok(Ok(lease)) => {
                seen.update(Some(lease));
                if self
                    .tenure
                    .send_replace(Some(began + self.times.tenure))
                    .is_none()
                {
                    tracing::info!(lease = self.name, identity = self.identity, "leading");
                }
                Instant::now()
            }
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                *seen = ObservedLease {
                    // Expiry counts from when the lease was seen to change, not from now.
                    at: None,
                    lease: None,
                };
                self.observe(seen).await
            }
            Ok(Err(error)) => self.failed("write", &error),
            Err(_) => self.failed("write", &"no answer in time"),
        }
    }

    /// Lets the other replica lead at once.
    async fn release(&self, seen: &ObservedLease) {
        self.lost();
        let Some(lease) = &seen.lease else { return };
        let Some(spec) = &lease.spec else { return };
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return;
        }
        let mut lease = lease.clone();
        lease.metadata.managed_fields = None;
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..spec.clone()
        });
        let params = PostParams::default();
        let request = self.api.replace(&self.name, &params, &lease);
        match tokio::time::timeout(self.times.deadline, request).await {
            Ok(Ok(_)) => tracing::info!(lease = self.name, "released the lease"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot release the lease; it expires"),
            Err(_) => tracing::warn!("cannot release the lease in time; it expires"),
        }
    }

    fn lost(&self) {
        if self.tenure.send_replace(None).is_some() {
            tracing::info!(lease = self.name, "not leading any more");
        }
    }

    fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Instant {
        let now = Instant::now();
        tracing::warn!(lease = self.name, %error, "cannot {what} the lease");
        if self.tenure.borrow().is_some_and(|until| until <= now) {
            self.lost();
        }
        now + self.times.retry
    }
}

fn is_newer(lease: &Lease, seen: &ObservedLease) -> bool {
    use crate::mirror::version;
    seen.lease
        .as_ref()
        .is_none_or(|known| version(lease) > version(known))
}

/// The lease as `identity` holds it for `duration` from `now` on.
fn claimed(lease: Option<&Lease>, identity: &str, duration: Duration, now: Timestamp) -> Lease {
    let old = lease.and_then(|l| l.spec.clone()).unwrap_or_default();
    let renewal = old.holder_identity.as_deref() == Some(identity);
    Lease {
        metadata: ObjectMeta {
            managed_fields: None,
            ..lease.map(|l| l.metadata.clone()).unwrap_or_default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(identity.to_owned()),
            lease_duration_seconds: i32::try_from(duration.as_secs()).ok(),
            acquire_time: if renewal {
                old.acquire_time
            } else {
                Some(MicroTime(now))
            },
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(
                old.lease_transitions.unwrap_or(0) + i32::from(!renewal && lease.is_some()),
            ),
            ..LeaseSpec::default()
        }),
    }
}
