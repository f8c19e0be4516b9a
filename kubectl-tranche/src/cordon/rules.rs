//! Reads, makes and deletes DeviceTaintRules.

use k8s_openapi::api::resource::v1::{
    DeviceTaint, DeviceTaintRule, DeviceTaintRuleSpec, DeviceTaintSelector,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use tranche_api::names::taint;

use super::{Error, NAMES};
use crate::cluster::{Cluster, list, root};
use crate::snapshot::Resource;

/// All DeviceTaintRules.
pub async fn existing(cluster: &Cluster) -> Result<Vec<DeviceTaintRule>, Error> {
    let rules = Api::<DeviceTaintRule>::all(cluster.client());
    let read = list(Resource::DeviceTaintRules, &rules, &ListParams::default()).await;
    match read.gap {
        Some(gap) => Err(Error::Gap(gap)),
        None => Ok(read.objects),
    }
}

/// Makes a rule for each selector, and deletes rules by name.
pub async fn apply(
    cluster: &Cluster,
    missing: &[DeviceTaintSelector],
    superfluous: &[String],
) -> Result<(), Error> {
    let rules = Api::<DeviceTaintRule>::all(cluster.client());
    for selector in missing {
        let made = rules.create(&PostParams::default(), &rule(selector)).await;
        made.map_err(|error| Error::Write {
            verb: "create",
            name: String::new(),
            why: root(&error),
        })?;
    }
    for name in superfluous {
        match rules.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                return Err(Error::Write {
                    verb: "delete",
                    name: format!(" {name}"),
                    why: root(&error),
                });
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Without `timeAdded`, which the API server sets.
pub(super) fn rule(selector: &DeviceTaintSelector) -> DeviceTaintRule {
    DeviceTaintRule {
        metadata: ObjectMeta {
            generate_name: Some(NAMES.to_owned()),
            ..ObjectMeta::default()
        },
        spec: DeviceTaintRuleSpec {
            device_selector: Some(selector.clone()),
            taint: DeviceTaint {
                key: taint::CORDONED.to_owned(),
                effect: "NoSchedule".to_owned(),
                ..DeviceTaint::default()
            },
        },
        status: None,
    }
}
