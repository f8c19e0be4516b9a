//! Reads the use of GPUs every few seconds, with the user's rights: its API has no watch.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::snapshot::Scope;
use crate::usage::UsageResult;

/// Time between two readings.
const EVERY: Duration = Duration::from_secs(5);
/// After a slow reading, the pause is this many times as long as the reading.
const PAUSE: u32 = 4;

/// Reads until the receiver is dropped.
pub(super) async fn follow(cluster: Cluster, readings: Sender<UsageResult>) {
    loop {
        let began = Instant::now();
        let usage = Box::pin(cluster.usage(&Scope::All)).await;
        if readings.send(usage).await.is_err() {
            return;
        }
        tokio::time::sleep(pause(began.elapsed())).await;
    }
}

fn pause(took: Duration) -> Duration {
    EVERY.max(took.saturating_mul(PAUSE))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::World;

    #[test]
    fn a_slow_cluster_is_asked_less_often() {
        assert_eq!(pause(Duration::from_millis(80)), EVERY);
        assert_eq!(pause(Duration::from_secs(3)), Duration::from_secs(12));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_read_again_and_again_and_what_fails_is_told() {
        let mut world = World::new();
        let path = "/apis/usage.gpu.tranche.dev/v1alpha1/nodeusages";
        world
            .others
            .insert(path.into(), json!({"metadata": {}, "items": []}));
        let asked = world.asked.clone();
        let (send, mut readings) = tokio::sync::mpsc::channel(1);
        let task = tokio::spawn(follow(world.cluster(), send));
        for _ in 0..3 {
            assert!(readings.recv().await.unwrap().is_ok());
        }
        assert!(asked.lock().unwrap().len() >= 3);
        drop(readings);
        task.await.unwrap();

        let (send, mut readings) = tokio::sync::mpsc::channel(1);
        tokio::spawn(follow(World::new().cluster(), send));
        let line = readings.recv().await.unwrap().unwrap_err();
        assert!(line.starts_with("usage is not shown: "), "{line}");
    }
}
