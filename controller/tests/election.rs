//! Two replicas and one lease, in virtual time.

use crate::support;

use std::time::Duration;

use support::cluster::Cluster;
use tokio::time::{Instant, sleep};

const SOON: Duration = Duration::from_mins(1);

/// A cluster published by a replica, with another following.
async fn led() -> (
    Cluster,
    support::cluster::Replica,
    support::cluster::Replica,
) {
    let cluster = Cluster::new();
    cluster.node("a");
    cluster.register("a", 2);
    let leader = cluster.replica("one");
    cluster.settle(SOON).await;
    let follower = cluster.replica("two");
    cluster.settle(SOON).await;
    assert_eq!(holder(&cluster), "one");
    (cluster, leader, follower)
}

fn holder(cluster: &Cluster) -> String {
    let lease = cluster.api.one("leases", "lease");
    lease["spec"]["holderIdentity"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn until_held_by(cluster: &Cluster, name: &str) -> Duration {
    let begun = Instant::now();
    while holder(cluster) != name {
        sleep(Duration::from_millis(10)).await;
        assert!(begun.elapsed() < SOON, "held by {:?}", holder(cluster));
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn two_replicas_write_no_more_than_one() {
    let (cluster, _leader, _follower) = led().await;
    let before = cluster.api.write_count();
    cluster.gpus("a", &[0, 1, 2]);
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    // Four slices and the record.
    assert_eq!(cluster.api.write_count() - before, 5);
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_taken_at_once_when_it_is_given_back() {
    let (cluster, leader, _follower) = led().await;
    leader.stop().await;
    let took = until_held_by(&cluster, "two").await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    cluster.bump("a");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_cut_off_is_replaced_and_stops_writing() {
    let (cluster, leader, _follower) = led().await;
    leader.cut_off();
    let took = until_held_by(&cluster, "two").await;
    assert!(took < Duration::from_secs(20), "{took:?}");
    cluster.gpus("a", &[0, 1, 2]);
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
}

#[tokio::test(start_paused = true)]
async fn a_leader_keeps_its_lease() {
    let (cluster, _leader, _follower) = led().await;
    for _ in 0..600 {
        sleep(Duration::from_secs(6)).await;
        assert_eq!(holder(&cluster), "one");
    }
    let lease = cluster.api.one("leases", "lease");
    assert_eq!(lease["spec"]["leaseTransitions"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_restart_under_the_same_name_leads_at_once() {
    let (cluster, leader, follower) = led().await;
    follower.stop().await;
    leader.cut_off();
    let _again = cluster.replica("one");
    cluster.bump("a");
    let took = cluster.settle(SOON).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    cluster.assert_whole("a");
}
