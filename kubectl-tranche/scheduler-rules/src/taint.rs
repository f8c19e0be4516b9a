//! Taints of devices: rules add them, requests tolerate them.

use k8s_openapi::api::resource::v1::{
    Device, DeviceTaint, DeviceTaintRule, DeviceToleration, ResourceSlice,
};

use super::verdict::{DeviceReport, Obstacle, Report};

/// Adds to each device the taints of the rules that select it, after its own taints.
pub fn add_rules(rules: &[DeviceTaintRule], slices: &mut [ResourceSlice]) {
    for slice in slices {
        let (driver, pool) = (&slice.spec.driver, &slice.spec.pool.name);
        for device in slice.spec.devices.iter_mut().flatten() {
            let device_name = &device.name;
            let selected = rules
                .iter()
                .filter(|rule| selects(rule, driver, pool, device_name));
            let added: Vec<DeviceTaint> = selected.map(|rule| rule.spec.taint.clone()).collect();
            if !added.is_empty() {
                device.taints.get_or_insert_default().extend(added);
            }
        }
    }
}

fn selects(rule: &DeviceTaintRule, driver: &str, pool: &str, device: &str) -> bool {
    // A rule without a selector selects nothing.
    let Some(selector) = &rule.spec.device_selector else {
        return false;
    };
    let same = |wanted: &Option<String>, own: &str| wanted.as_ref().is_none_or(|it| it == own);
    same(&selector.driver, driver) && same(&selector.pool, pool) && same(&selector.device, device)
}

/// Adds to the taints of a report the names of the rules that they come from.
pub fn name_rules(rules: &[DeviceTaintRule], report: &mut Report) {
    let devices = report.requests.iter_mut().flat_map(|it| &mut it.devices);
    for DeviceReport { device, obstacle } in devices {
        let Some(Obstacle::Taint {
            key,
            value,
            effect,
            rule,
        }) = obstacle
        else {
            continue;
        };
        let is_same = |it: &&DeviceTaintRule| {
            let taint = &it.spec.taint;
            let own = taint.value.as_ref().filter(|value| !value.is_empty());
            (&taint.key, own, &taint.effect) == (key, value.as_ref(), effect)
                && selects(it, &device.driver, &device.pool, &device.device)
        };
        let found = rules.iter().find(is_same);
        *rule = found.and_then(|it| it.metadata.name.clone());
    }
}

/// The first taint of a device that the request does not tolerate.
pub(super) fn untolerated<'a>(
    device: &'a Device,
    tolerations: &[DeviceToleration],
) -> Option<&'a DeviceTaint> {
    let mut taints = device.taints.iter().flatten();
    taints.find(|taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && !tolerations.iter().any(|it| tolerates(it, taint))
    })
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    fn given(text: Option<&String>) -> Option<&String> {
        text.filter(|text| !text.is_empty())
    }
    let effect = given(toleration.effect.as_ref());
    if effect.is_some_and(|effect| *effect != taint.effect) {
        return false;
    }
    let key = given(toleration.key.as_ref());
    if key.is_some_and(|key| *key != taint.key) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => given(toleration.value.as_ref()) == given(taint.value.as_ref()),
        "Exists" => true,
        _ => false,
    }
}
