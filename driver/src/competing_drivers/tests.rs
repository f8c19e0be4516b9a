use super::*;
use crate::testing::{gpu, inventory};

fn two() -> Inventory {
    inventory(vec![gpu(0), gpu(1)])
}

fn device(resource: &str, id: String) -> PluginDevice {
    PluginDevice {
        resource: resource.to_owned(),
        id,
    }
}

fn kubelet(kubelet: Kubelet) -> Observations {
    Observations {
        kubelet: Some(Ok(kubelet)),
        ..Observations::default()
    }
}

fn withheld(seen: &Observations) -> Vec<String> {
    let verdict = verdict(&two(), seen);
    assert_eq!(
        verdict.condition.holds,
        verdict.withheld.is_empty(),
        "{verdict:?}"
    );
    assert!(verdict.withheld.iter().all(|w| w.reason == "OtherProvider"));
    verdict.withheld.into_iter().map(|w| w.gpu).collect()
}

fn names(sockets: &[&str]) -> BTreeSet<String> {
    sockets.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn only_the_gpu_that_a_device_plugin_offers_is_withheld() {
    let uuid = gpu(1).uuid;
    for (resource, id, reason) in [
        ("nvidia.com/gpu", uuid.clone(), "NvidiaDevicePlugin"),
        (
            "nvidia.com/gpu.shared",
            format!("{uuid}::7"),
            "NvidiaDevicePlugin",
        ),
        ("nvidia.com/gpu", format!("{uuid}-9"), "Hami"),
        ("example.com/card", uuid.clone(), "DevicePlugin"),
    ] {
        let seen = kubelet(Kubelet {
            offered: vec![device(resource, id)],
            ..Kubelet::default()
        });
        assert_eq!(withheld(&seen), std::slice::from_ref(&uuid));
        let verdict = verdict(&two(), &seen);
        assert_eq!(verdict.condition.reason, reason);
        let message = &verdict.withheld[0].message;
        assert!(message.contains(resource), "{message}");
        assert!(message.contains("Taking over a node"), "{message}");
    }
}

#[test]
fn devices_of_other_hardware_are_nobodys_concern() {
    let uuid = gpu(0).uuid;
    for id in [
        "GPU-other".to_owned(),
        format!("{uuid}0"),
        format!("{uuid}::"),
        format!("{uuid}-x"),
        format!("MIG-{uuid}"),
        String::new(),
    ] {
        let seen = kubelet(Kubelet {
            offered: vec![device("nvidia.com/gpu", id)],
            ..Kubelet::default()
        });
        assert_eq!(withheld(&seen), [""; 0]);
    }
}

#[test]
fn a_gpu_stays_withheld_while_a_gone_plugins_pod_holds_it() {
    let seen = kubelet(Kubelet {
        held: vec![(
            "team/train".to_owned(),
            device("nvidia.com/gpu", gpu(0).uuid),
        )],
        ..Kubelet::default()
    });
    assert_eq!(withheld(&seen), [gpu(0).uuid]);
    let message = verdict(&two(), &seen).withheld[0].message.clone();
    assert!(message.contains("pod team/train holds it"), "{message}");
}

#[test]
fn a_live_plugin_that_the_kubelet_omits_takes_all_gpus() {
    let seen = Observations {
        kubelet: Some(Err("no such file".to_owned())),
        plugin_sockets: names(&["nvidia-gpu.sock"]),
        ..Observations::default()
    };
    assert_eq!(withheld(&seen), [gpu(0).uuid, gpu(1).uuid]);
    let message = verdict(&two(), &seen).withheld[0].message.clone();
    assert!(message.contains("nvidia-gpu.sock"), "{message}");
    // If the kubelet answers, its answer counts: the plugin may serve other GPUs, or none yet.
    let answered = Observations {
        kubelet: Some(Ok(Kubelet::default())),
        ..seen
    };
    assert_eq!(withheld(&answered), [""; 0]);
    // A kubelet that does not answer is not a reason by itself.
    let quiet = Observations {
        kubelet: Some(Err("no such file".to_owned())),
        ..Observations::default()
    };
    assert_eq!(withheld(&quiet), [""; 0]);
}

#[test]
fn nvidias_dra_driver_takes_its_slices_gpus_while_it_runs() {
    let slices = BTreeMap::from([
        ("gpu-1".to_owned(), gpu(1).uuid),
        ("gpu-9".to_owned(), "GPU-of-another-node".to_owned()),
    ]);
    let runs = Observations {
        dra_sockets: names(&["gpu.nvidia.com-reg.sock"]),
        slices: Some(Ok(slices)),
        ..Observations::default()
    };
    assert_eq!(withheld(&runs), [gpu(1).uuid]);
    // Slices that outlive their driver offer nothing: the kubelet removes them.
    let ended = Observations {
        dra_sockets: BTreeSet::new(),
        ..runs.clone()
    };
    assert_eq!(withheld(&ended), [""; 0]);
    let unknown = Observations {
        slices: Some(Err("timeout".to_owned())),
        ..runs
    };
    assert_eq!(withheld(&unknown), [gpu(0).uuid, gpu(1).uuid]);
}

#[test]
fn a_pod_of_nvidias_dra_driver_keeps_its_gpu_or_else_all_gpus() {
    let holds = Kubelet {
        claimed: vec![("team/train".to_owned(), "gpu-1".to_owned())],
        ..Kubelet::default()
    };
    let known = Observations {
        slices: Some(Ok(BTreeMap::from([("gpu-1".to_owned(), gpu(1).uuid)]))),
        ..kubelet(holds.clone())
    };
    assert_eq!(withheld(&known), [gpu(1).uuid]);
    assert_eq!(withheld(&kubelet(holds)), [gpu(0).uuid, gpu(1).uuid]);
}

#[test]
fn several_providers_are_all_named() {
    let mut seen = kubelet(Kubelet {
        offered: vec![device("nvidia.com/gpu", gpu(0).uuid)],
        ..Kubelet::default()
    });
    seen.dra_sockets = names(&["gpu.nvidia.com-uid-reg.sock"]);
    seen.slices = Some(Ok(BTreeMap::from([("gpu-0".to_owned(), gpu(0).uuid)])));
    let verdict = verdict(&two(), &seen);
    assert_eq!(verdict.withheld.len(), 1);
    assert_eq!(verdict.condition.reason, "SeveralProviders");
    for text in [&verdict.withheld[0].message, &verdict.condition.message] {
        assert!(
            text.contains("NVIDIA's device plugin") && text.contains("NVIDIA's DRA driver"),
            "{text}"
        );
    }
}
