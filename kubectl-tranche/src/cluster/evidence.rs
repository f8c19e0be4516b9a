//! Reads what `collect` packs. It reads no Secrets, no ConfigMaps and only the chart's pods.

use futures::future::{join, join_all};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, LogParams};
use tranche_api::names::GROUP;

use super::{Cluster, problem};
use crate::evidence::{Evidence, Log};

/// The newest lines of each log.
const LINES: i64 = 2000;
/// The most bytes of each log.
const BYTES: i64 = 2 << 20;
const EVENTS: u32 = 2000;

impl Cluster {
    /// Reads all that support needs, and names what cannot be read.
    pub async fn evidence(&self) -> Evidence {
        let ((facts, pods), events) = join(Box::pin(self.facts_and_pods()), self.events()).await;
        let mut missing = Vec::new();
        let pods = pods.unwrap_or_else(|why| {
            missing.push(why);
            Vec::new()
        });
        let events = events.unwrap_or_else(|why| {
            missing.push(why);
            Vec::new()
        });
        let containers = pods.iter().flat_map(|pod| {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let pod = pod.metadata.name.clone().unwrap_or_default();
            containers.map(move |it| (pod.clone(), it.name.clone()))
        });
        let logs = join_all(containers.map(|(pod, container)| self.log(pod, container))).await;
        let mut read = Vec::new();
        for log in logs {
            match log {
                Ok(log) => read.push(log),
                Err(why) => missing.push(why),
            }
        }
        missing.extend(facts.snapshot.gaps.iter().map(|gap| gap.message.clone()));
        Evidence {
            facts,
            pods,
            logs: read,
            events,
            missing,
        }
    }

    async fn log(&self, pod: String, container: String) -> Result<Log, String> {
        let params = LogParams {
            container: Some(container.clone()),
            tail_lines: Some(LINES),
            limit_bytes: Some(BYTES),
            timestamps: true,
            ..LogParams::default()
        };
        let pods = Api::<Pod>::namespaced(self.client(), &self.system);
        match pods.logs(&pod, &params).await {
            Ok(text) => Ok(Log {
                pod,
                container,
                text,
            }),
            Err(error) => Err(format!(
                "log of {pod}/{container}: {}",
                problem::root(&error)
            )),
        }
    }

    /// All events of the namespace in which Tranche runs; of other namespaces, events about our kinds or from our components.
    async fn events(&self) -> Result<Vec<Event>, String> {
        let events = Api::<Event>::all(self.client());
        let listed = events.list(&ListParams::default().limit(EVENTS)).await;
        let mut events = listed
            .map_err(|error| format!("events: {}", problem::root(&error)))?
            .items;
        events.retain(|event| {
            let regarding = event.regarding.as_ref();
            let version = regarding.and_then(|it| it.api_version.as_deref());
            let controller = event.reporting_controller.as_deref().unwrap_or_default();
            event.metadata.namespace.as_deref() == Some(&self.system)
                || version.is_some_and(|it| it.starts_with(GROUP))
                || controller.contains("tranche")
        });
        Ok(events)
    }
}
