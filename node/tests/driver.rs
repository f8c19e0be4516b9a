//! A driver that is installed, removed and restored, with the real search and the real loading of the
//! simulator's NVML.

use crate::common;

use std::fs;
use std::path::{Path, PathBuf};

use common::Host;
use tranche_node::nvml::{Driver as _, NvmlError};
use tranche_node::utilization::{NvmlUtilization, Utilization as _};

#[test]
fn a_driver_that_comes_goes_and_comes_back_is_found_each_time() {
    let mut host = Host::new();
    let driver = host.driver(None);
    let none = driver.traces();
    let error = driver.open().unwrap_err();
    assert!(matches!(error, NvmlError::NotFound { .. }), "{error}");

    // The driver container's root appears.
    host.install("/run/nvidia/driver");
    let there = driver.traces();
    assert_ne!(there, none);
    let opened = driver.open().unwrap();
    assert_eq!(opened.root.on_host(), Path::new("/run/nvidia/driver"));
    assert_eq!(opened.nvml.describe().unwrap().gpus.len(), 2);
    assert_eq!(driver.traces(), there, "looking changes nothing");
    drop(opened);

    // It is renamed away as a whole, and back.
    let away = host.at("/run/nvidia/away");
    fs::rename(host.at("/run/nvidia/driver"), &away).unwrap();
    assert_eq!(driver.traces(), none);
    driver.open().unwrap_err();
    fs::rename(&away, host.at("/run/nvidia/driver")).unwrap();
    assert_eq!(driver.traces(), there);
    assert_eq!(
        driver.open().unwrap().nvml.describe().unwrap().gpus.len(),
        2
    );

    // The same version installed again counts as another driver.
    host.install("/run/nvidia/driver");
    assert_ne!(driver.traces(), there);
}

#[test]
fn the_first_root_whose_library_starts_is_the_drivers() {
    let mut host = Host::new();
    // The remaining files of another driver do not start.
    let left = host.at("/usr/lib64");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("libnvidia-ml.so.1"), "").unwrap();
    let error = host.driver(None).open().unwrap_err();
    assert!(matches!(error, NvmlError::Start { .. }), "{error}");
    host.install("/home/kubernetes/bin/nvidia");
    let opened = host.driver(None).open().unwrap();
    assert_eq!(
        opened.root.on_host(),
        Path::new("/home/kubernetes/bin/nvidia")
    );
    // If a root is given, only that one is searched.
    let error = host.driver(Some("/")).open().unwrap_err();
    assert!(matches!(error, NvmlError::Start { .. }), "{error}");
}

#[test]
fn no_device_node_is_open_between_checks() {
    let mut host = Host::new();
    host.install("/run/nvidia/driver");
    let driver = host.driver(None);
    assert_eq!(host.open_nodes(), [""; 0].map(PathBuf::from));
    let node = |name: &str| host.at("/run/nvidia/driver/dev").join(name);
    let all = [node("nvidia0"), node("nvidia1"), node("nvidiactl")];
    for _ in 0..3 {
        let opened = driver.open().unwrap();
        opened.nvml.describe().unwrap();
        assert_eq!(host.open_nodes(), all);
        drop(opened);
        assert_eq!(host.open_nodes(), [""; 0].map(PathBuf::from));
    }

    // The sampler holds NVML while it has shares to ask for.
    let uuid = driver.open().unwrap().nvml.describe().unwrap().gpus[0]
        .uuid
        .clone();
    let mut utilization = NvmlUtilization::new(Box::new(driver));
    assert!(utilization.whole(&uuid).is_some());
    assert_eq!(host.open_nodes(), all);
    utilization.close();
    assert_eq!(host.open_nodes(), [""; 0].map(PathBuf::from));
}
