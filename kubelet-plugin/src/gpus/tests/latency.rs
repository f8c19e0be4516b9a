//! What Tranche adds to the time of the driver's own calls.

use std::time::Instant;

use super::*;
use crate::testing::{Given, capped, timeshared};

/// How long the driver takes for each change of a GPU.
const CALL: Duration = Duration::from_millis(20);
const SAMPLES: usize = 11;
/// The order of magnitude, without optimization and beside other tests.
const MOST: Duration = Duration::from_millis(100);

/// The time that Prepares of this device take beyond the driver's calls, sorted.
async fn added(given: &Given) -> Vec<Duration> {
    let mut times = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let world = World::new();
        let plugin = world.start();
        world.api.put(claim("a", std::slice::from_ref(given)));
        world.mig.slow_down(CALL);
        let start = Instant::now();
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        times.push(start.elapsed().saturating_sub(world.mig.taken()));
    }
    times.sort_unstable();
    times
}

#[tokio::test]
async fn a_prepare_adds_little_to_the_drivers_calls_in_every_tier() {
    for given in [
        whole("x", 0),
        capped("x", 0, "20Gi", 25),
        timeshared("x", 0),
        concurrent("x", 0, "20Gi", 25),
        partition("x", 0, "1g10gb-6"),
    ] {
        let times = added(&given).await;
        let (median, last) = (times[SAMPLES / 2], times[SAMPLES - 1]);
        println!("{given:?}: added {median:?}, at most {last:?}");
        assert!(median < MOST, "{given:?}: {times:?}");
    }
}
