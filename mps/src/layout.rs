//! The files of the daemons, below one folder on a tmpfs: the host, the supervisor and the node plugin have it at the same
//! path.
//!
//! | path | what |
//! |---|---|
//! | `supervisor.sock` | where the supervisor answers |
//! | `<device>/record.json` | what was asked for, and which process it is |
//! | `<device>/pipe/` | the daemon's sockets, which containers get at [`PIPES_IN_CONTAINER`] |
//! | `<device>/shm/` | a tmpfs, which daemon and containers have at [`SHM_IN_CONTAINER`] |
//! | `<device>/log/` | what the daemon writes |
//! | `<device>/driver/` | links to the driver's programs and libcuda, and nothing else of the driver's folders |

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The folder, unless the command line says otherwise.
pub const FOLDER: &str = "/run/tranche/mps";

/// The supervisor's socket in [`FOLDER`].
pub const SOCKET: &str = "supervisor.sock";

/// The default of `CUDA_MPS_PIPE_DIRECTORY` in NVIDIA's driver: a process without the variable finds the daemon too.
pub const PIPES_IN_CONTAINER: &str = "/tmp/nvidia-mps";

/// The driver has this path compiled in: clients and servers of driver 535 share their memory there.
pub const SHM_IN_CONTAINER: &str = "/dev/shm";

/// The CUDA device that a daemon serves: the UUID of a GPU or of a MIG device, as NVML prints it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceId(String);

/// Not a device's UUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("device {0:?}: not a UUID as NVML prints it (`GPU-…` or `MIG-…`)")]
pub struct NotADevice(String);

impl DeviceId {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for DeviceId {
    type Error = NotADevice;

    /// It becomes a folder's name and a variable's value, so only a UUID is accepted.
    fn try_from(text: String) -> Result<Self, NotADevice> {
        let digits = text
            .strip_prefix("GPU-")
            .or_else(|| text.strip_prefix("MIG-"));
        let is_uuid = digits.is_some_and(|digits| {
            let groups = digits.split('-').map(str::len);
            groups.eq([8, 4, 4, 4, 12]) && digits.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
        });
        if is_uuid {
            Ok(Self(text))
        } else {
            Err(NotADevice(text))
        }
    }
}

impl From<DeviceId> for String {
    fn from(device: DeviceId) -> Self {
        device.0
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The files of one daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    pub folder: PathBuf,
}

impl Files {
    /// The files of a device's daemon.
    #[must_use]
    pub fn of(folder: &Path, device: &DeviceId) -> Self {
        Self {
            folder: folder.join(device.as_str()),
        }
    }

    /// What was asked for, and which process it is.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.folder.join("record.json")
    }

    #[must_use]
    pub fn pipes(&self) -> PathBuf {
        self.folder.join("pipe")
    }

    /// The memory that clients and server share.
    #[must_use]
    pub fn shm(&self) -> PathBuf {
        self.folder.join("shm")
    }

    /// The folder of the logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// What the control daemon writes to its standard output.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.logs().join("control.log")
    }

    /// Links to the driver's files.
    #[must_use]
    pub fn driver(&self) -> PathBuf {
        self.folder.join("driver")
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceId;

    #[test]
    fn only_a_uuid_is_a_device() {
        for good in [
            "GPU-00112233-4455-6677-8899-aabbccddeeff",
            "MIG-00112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert_eq!(
                DeviceId::try_from(good.to_owned()).map(String::from),
                Ok(good.to_owned())
            );
        }
        for bad in [
            "",
            "0",
            "GPU-",
            "GPU-../../etc",
            "GPU-00112233-4455-6677-8899-aabbccddeef/",
            "00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeeff,GPU-1",
        ] {
            assert!(DeviceId::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
