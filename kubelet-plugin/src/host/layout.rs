//! The plugin's paths on the node.

use std::path::{Path, PathBuf};

use tranche_driver::cdi::{self, NodePaths};
use tranche_driver::preparation::Account;

use crate::args::Args;

/// The folders, all with the same path in the pod and on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sockets, lock, journal, files that are mounted into containers.
    pub plugin: PathBuf,
    /// The hook and its ldconfig, which container runtimes execute.
    pub hooks: PathBuf,
    /// Where the kubelet watches for registration sockets.
    pub registry: PathBuf,
    /// Share pages.
    pub shares: PathBuf,
    /// CDI specs.
    pub cdi: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharePaths {
    pub claim: PathBuf,
    pub device: PathBuf,
    pub cap: PathBuf,
    pub account: PathBuf,
    /// The second account page, which shares of a GPU whose memory is oversubscribed have.
    pub resident: PathBuf,
}

impl SharePaths {
    /// The page of an account.
    #[must_use]
    pub const fn page_of(&self, account: Account) -> &PathBuf {
        match account {
            Account::Memory => &self.account,
            Account::Resident => &self.resident,
        }
    }
}

impl Layout {
    /// From the command line.
    #[must_use]
    pub fn of(args: &Args) -> Self {
        Self {
            plugin: args.plugin_dir.clone(),
            hooks: args.hook_dir.clone(),
            registry: args.registry_dir.clone(),
            shares: args.run_dir.join("shares"),
            cdi: args.cdi_dir.clone(),
        }
    }

    /// One journal per claim.
    #[must_use]
    pub fn claims(&self) -> PathBuf {
        self.plugin.join("claims")
    }

    #[must_use]
    pub fn audit(&self) -> PathBuf {
        self.plugin.join("audit")
    }

    /// One record per GPU that Tranche has changed.
    #[must_use]
    pub fn gpus(&self) -> PathBuf {
        self.plugin.join("gpus")
    }

    /// Our files that are mounted into containers: a folder for each version of the shim.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.plugin.join("lib")
    }

    /// The socket on which the kubelet asks for devices.
    #[must_use]
    pub fn dra_socket(&self) -> PathBuf {
        self.plugin.join("dra.sock")
    }

    /// The measured sizes of contexts.
    #[must_use]
    pub fn contexts(&self) -> PathBuf {
        self.plugin.join("contexts.json")
    }

    /// The faults of the GPUs.
    #[must_use]
    pub fn faults(&self) -> PathBuf {
        self.plugin.join("faults.json")
    }

    /// The GPUs that the watchdog watches. The file lies beside the pages, on a file system that a boot empties, because a
    /// boot frees the memory of all GPUs.
    #[must_use]
    pub fn watched(&self) -> PathBuf {
        self.shares.with_file_name("watched.json")
    }

    /// What containers can read of their devices: a folder per claim, a file per request.
    #[must_use]
    pub fn metadata(&self) -> PathBuf {
        self.shares.with_file_name("metadata")
    }

    /// The files of the MPS supervisor and its daemons. The plugin's default folders give the supervisor's default.
    #[must_use]
    pub fn mps(&self) -> PathBuf {
        self.shares.with_file_name("mps")
    }

    /// The load pages of GPUs and MIG devices: a folder for each.
    #[must_use]
    pub fn load(&self) -> PathBuf {
        self.shares.with_file_name("load")
    }

    /// The lock of the one active instance on this node.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.plugin.join("lock")
    }

    /// The registration socket.
    ///
    /// The kubelet's client sends the percent-encoded path as HTTP/2 `:authority`. A `%` is legal
    /// there only before an `@`, so the name contains one (ADR 0001).
    #[must_use]
    pub fn registration_socket(&self) -> PathBuf {
        self.registry
            .join(format!("{}@reg.sock", tranche_api::names::DRIVER))
    }

    /// The CDI spec of the devices of all claims.
    #[must_use]
    pub fn claims_spec(&self) -> PathBuf {
        self.cdi.join(cdi::claims_file_name())
    }

    /// The driver's CDI spec.
    #[must_use]
    pub fn driver_spec(&self) -> PathBuf {
        self.cdi.join(cdi::driver_file_name())
    }

    #[must_use]
    pub fn share(&self, uid: &str, key: &str) -> SharePaths {
        let claim = self.shares.join(uid);
        let device = claim.join(key);
        SharePaths {
            cap: device.join(tranche_shim_core::paths::CAP),
            account: device.join(tranche_shim_core::paths::ACCOUNT),
            resident: device.join(tranche_shim_core::paths::RESIDENT),
            device,
            claim,
        }
    }

    /// The paths for CDI specs; `dev_root` is the root of the device nodes, as the host sees it.
    #[must_use]
    pub fn node_paths(&self, dev_root: &Path) -> NodePaths {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        NodePaths {
            shares: text(&self.shares),
            hooks: text(&self.hooks),
            metadata: Some(text(&self.metadata())),
            mps: text(&self.mps()),
            load: text(&self.load()),
            dev_root: text(dev_root),
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Everything below one folder.
    pub fn below(root: &Path) -> Layout {
        Layout {
            plugin: root.join("plugin"),
            hooks: root.join("hooks"),
            registry: root.join("registry"),
            shares: root.join("run/shares"),
            cdi: root.join("cdi"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does what grpc-go's `encodeAuthority` does: escapes everything but unreserved characters and
    /// those that may stand in an authority.
    fn encode_authority(path: &str) -> String {
        path.bytes()
            .map(|b| match b {
                b'a'..=b'z'
                | b'A'..=b'Z'
                | b'0'..=b'9'
                | b'-'
                | b'_'
                | b'.'
                | b'~'
                | b'!'
                | b'$'
                | b'&'
                | b'\''
                | b'('
                | b')'
                | b'*'
                | b'+'
                | b','
                | b';'
                | b'='
                | b':'
                | b'['
                | b']'
                | b'@' => char::from(b).to_string(),
                other => format!("%{other:02X}"),
            })
            .collect()
    }

    #[test]
    fn the_kubelet_sends_the_registration_socket_as_authority() {
        let args = <Args as clap::Parser>::parse_from(["x", "--node-name", "n"]);
        let socket = Layout::of(&args).registration_socket();
        let sent = encode_authority(socket.to_str().unwrap());
        assert!(
            sent.starts_with("%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2F"),
            "{sent}"
        );
        sent.parse::<http::uri::Authority>().unwrap();
        // Without the @ no HTTP/2 server accepts it.
        let plain = encode_authority("/var/lib/kubelet/plugins_registry/gpu.tranche.dev-reg.sock");
        plain.parse::<http::uri::Authority>().unwrap_err();
    }
}
