//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Parser;
use tranche_serving::LogFormat;

/// Makes the GPUs of one node ready for the ResourceClaims that were allocated there.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Args {
    /// The node this runs on
    #[arg(long, env = "NODE_NAME", value_parser = not_empty)]
    pub node_name: String,
    /// Where the host's root is mounted in this process's view
    #[arg(long, default_value = "/")]
    pub host_root: PathBuf,
    /// The folder of the host that has the NVIDIA driver, as the host sees it; `auto` searches the usual
    /// places
    #[arg(long, default_value = "auto", value_parser = driver_root)]
    pub driver_root: DriverRootArg,
    /// DRA socket, journal and the files that containers get mounted; the same path as on the host
    #[arg(long, default_value = "/var/lib/kubelet/plugins/gpu.tranche.dev")]
    pub plugin_dir: PathBuf,
    /// The hook and its ldconfig, which container runtimes execute in containers' namespaces. The same path as on
    /// the host. Every user must be able to enter it, or pods with `hostUsers: false` do not start: only root may
    /// enter the kubelet's folders. If its file system is mounted noexec, the plugin dir is used
    #[arg(long, default_value = "/var/lib/tranche")]
    pub hook_dir: PathBuf,
    /// Where the kubelet watches for registration sockets
    #[arg(long, default_value = "/var/lib/kubelet/plugins_registry")]
    pub registry_dir: PathBuf,
    /// Where device plugins have their sockets: other plugins that serve GPUs are detected there
    #[arg(long, default_value = "/var/lib/kubelet/device-plugins")]
    pub device_plugins_dir: PathBuf,
    /// The kubelet's pod resources socket, which lists the claims that its pods use (without it the API
    /// server is asked every few hours), and the devices that device plugins offer and pods hold
    #[arg(long, default_value = "/var/lib/kubelet/pod-resources/kubelet.sock")]
    pub pod_resources_socket: PathBuf,
    /// Share pages, on tmpfs; the same path as on the host
    #[arg(long, default_value = "/run/tranche")]
    pub run_dir: PathBuf,
    /// Where the container runtime reads CDI specs
    #[arg(long, default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Shim, hook and ldconfig in the image, to be installed into the plugin dir and the hook dir
    #[arg(long, default_value = "/usr/lib/tranche")]
    pub image_lib_dir: PathBuf,
    /// Serves /healthz and /readyz without authorization
    #[arg(long, default_value = "[::]:8085")]
    pub http_endpoint: SocketAddr,
    /// Serves /metrics over TLS, to readers whom the API server allows to get that path
    #[arg(long, default_value = "[::]:8443")]
    pub metrics_endpoint: SocketAddr,
    /// The host's /proc, to find the share of each process that NVML reports; with another /proc the
    /// GPU's time is known only for all of its shares together
    #[arg(long, default_value = "/proc")]
    pub proc: PathBuf,
    /// The host's /sys, writable: GPUs for virtual machines change their kernel driver there
    #[arg(long, default_value = "/sys")]
    pub sysfs: PathBuf,
    /// Whether /metrics has the sensors of whole GPUs (temperature, power, clocks, NVLink) under the names of dcgm-exporter;
    /// false where dcgm-exporter runs
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub gpu_sensors: bool,
    /// The most files of 8 MiB that the audit trail takes in the plugin dir; it needs at least 2
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub audit_files: u32,
    /// How often the GPUs are described again where nothing tells that one has changed, in seconds. Without nvidia-persistenced
    /// each time powers idle GPUs up for about a second
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub describe_seconds: u64,
    /// The program that checks a GPU after a fault
    #[arg(long, default_value = "/usr/bin/tranche-gpu-check")]
    pub gpu_check: PathBuf,
    /// The format of log lines; RUST_LOG selects what is logged (default info)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Where to search the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverRootArg {
    /// In the usual places ([`tranche_node::layouts::ROOTS`]).
    Auto,
    /// In this folder of the host.
    Folder(PathBuf),
}

impl DriverRootArg {
    /// The folder, if one is given.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Auto => None,
            Self::Folder(folder) => Some(folder),
        }
    }
}

fn driver_root(value: &str) -> Result<DriverRootArg, String> {
    match value {
        "auto" => Ok(DriverRootArg::Auto),
        path if path.starts_with('/') => Ok(DriverRootArg::Folder(path.into())),
        _ => Err("it must be `auto` or an absolute path".into()),
    }
}

fn not_empty(value: &str) -> Result<String, String> {
    if value.is_empty() {
        return Err(
            "empty: give the node's name, in a pod by the downward API (spec.nodeName)".into(),
        );
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_driver_root_is_a_folder_of_the_host_or_searched() {
        let parse = |args: &[&str]| {
            let args = ["x", "--node-name", "n"].iter().chain(args);
            Args::try_parse_from(args).map(|args| args.driver_root)
        };
        assert_eq!(parse(&[]).unwrap(), DriverRootArg::Auto);
        let given = parse(&["--driver-root=/run/nvidia/driver"]).unwrap();
        assert_eq!(given.folder(), Some(Path::new("/run/nvidia/driver")));
        let error = parse(&["--driver-root=driver"]).unwrap_err().to_string();
        assert!(error.contains("absolute path"), "{error}");
    }

    #[test]
    fn an_empty_node_name_is_refused_with_the_way_out() {
        let error =
            Args::try_parse_from(["tranche-kubelet-plugin", "--node-name", ""]).unwrap_err();
        assert!(error.to_string().contains("downward API"), "{error}");
    }
}
