//! The container's root and environment, from the state that the runtime writes to stdin.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use tranche_cdi_hook::libraries::Process;
use tranche_cdi_hook::rootfs::LONGEST_FILE;

/// More than most configurations have, in bytes.
const USUAL_CONFIG: usize = 64 << 10;

/// A container that is being created.
#[derive(Debug)]
pub struct Container {
    /// Its root on the host.
    pub root: PathBuf,
    pub process: Process,
}

/// Why the container could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The state cannot be read.
    #[error("cannot read the container's state from stdin: {0}")]
    Stdin(#[source] io::Error),
    /// The state is invalid.
    #[error("stdin is not an OCI state: {0}: run it as an OCI hook")]
    State(#[source] serde_json::Error),
    /// The configuration cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    /// The configuration is invalid.
    #[error("{path} is not an OCI configuration: {source}")]
    Config {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// The root would be the host's.
    #[error("{path}: root.path is {root:?}, which is not the root of a container")]
    NoRoot {
        path: PathBuf,
        /// What is there.
        root: PathBuf,
    },
}

#[derive(Deserialize)]
struct State {
    bundle: PathBuf,
}

#[derive(Deserialize)]
struct Config {
    root: Root,
    // Optional in the OCI runtime specification.
    #[serde(default)]
    process: ProcessConfig,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ProcessConfig {
    cwd: PathBuf,
    env: Vec<String>,
}

#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

/// The container with this state.
pub fn read(state: &[u8]) -> Result<Container, ContainerError> {
    let State { bundle } = serde_json::from_slice(state).map_err(ContainerError::State)?;
    let path = bundle.join("config.json");
    // One read, not one for each doubling of the buffer.
    let mut text = Vec::with_capacity(USUAL_CONFIG);
    File::open(&path)
        .and_then(|file| file.take(LONGEST_FILE).read_to_end(&mut text))
        .map_err(|source| ContainerError::Read {
            path: path.clone(),
            source,
        })?;
    let config: Config =
        serde_json::from_slice(&text).map_err(|source| ContainerError::Config {
            path: path.clone(),
            source,
        })?;
    let root = bundle.join(&config.root.path);
    match std::fs::canonicalize(&root) {
        Ok(real) if real != Path::new("/") && !config.root.path.as_os_str().is_empty() => {
            Ok(Container {
                root: real,
                process: Process {
                    cwd: config.process.cwd,
                    env: config.process.env,
                },
            })
        }
        Ok(_) => Err(ContainerError::NoRoot { path, root }),
        Err(source) => Err(ContainerError::Read { path: root, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root_with(path: &str) -> (tempfile::TempDir, Result<PathBuf, ContainerError>) {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::create_dir(bundle.path().join("rootfs")).unwrap();
        let config = serde_json::json!({"ociVersion": "1.2.0", "root": {"path": path}});
        std::fs::write(bundle.path().join("config.json"), config.to_string()).unwrap();
        let state = serde_json::json!({
            "ociVersion": "1.2.0", "id": "x", "status": "creating", "bundle": bundle.path(),
        });
        let root = read(state.to_string().as_bytes()).map(|container| container.root);
        (bundle, root)
    }

    #[test]
    fn a_relative_root_is_in_the_bundle_and_an_absolute_one_is_not() {
        let (bundle, root) = root_with("rootfs");
        let expected = bundle.path().canonicalize().unwrap().join("rootfs");
        assert_eq!(root.unwrap(), expected);
        let other = tempfile::tempdir().unwrap();
        let (_bundle, root) = root_with(other.path().to_str().unwrap());
        assert_eq!(root.unwrap(), other.path().canonicalize().unwrap());
    }

    #[test]
    fn the_hosts_root_is_refused() {
        for path in ["/", "/..", "../../../../../../../..", ""] {
            let (_bundle, root) = root_with(path);
            let error = root.unwrap_err().to_string();
            assert!(
                error.contains("not the root of a container"),
                "{path}: {error}"
            );
        }
    }

    #[test]
    fn the_environment_is_read() {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::create_dir(bundle.path().join("rootfs")).unwrap();
        let config = serde_json::json!({
            "root": {"path": "rootfs"},
            "process": {"cwd": "/work", "env": ["LD_LIBRARY_PATH=/a:/b", "EMPTY="], "args": ["sh"]},
        });
        std::fs::write(bundle.path().join("config.json"), config.to_string()).unwrap();
        let state = serde_json::json!({"bundle": bundle.path()}).to_string();
        let process = read(state.as_bytes()).unwrap().process;
        assert_eq!(process.cwd, Path::new("/work"));
        assert_eq!(process.env, ["LD_LIBRARY_PATH=/a:/b", "EMPTY="]);
    }

    #[test]
    fn what_is_no_state_or_no_configuration_is_named() {
        assert!(matches!(read(b""), Err(ContainerError::State(_))));
        assert!(matches!(
            read(b"{\"bundle\": 7}"),
            Err(ContainerError::State(_))
        ));
        let error = read(b"{\"bundle\": \"/nowhere\"}").unwrap_err().to_string();
        assert!(error.contains("/nowhere/config.json"), "{error}");
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("config.json"), "{}").unwrap();
        let state = serde_json::json!({"bundle": bundle.path()}).to_string();
        let error = read(state.as_bytes()).unwrap_err();
        assert!(matches!(error, ContainerError::Config { .. }), "{error}");
    }
}
