//! The paths of the pages and the real driver in a capped container. They are constants, so that
//! nothing in the container (an environment variable, a configuration file) can redirect the shim.

/// One folder per share, named after the device key, with the files [`CAP`] and [`ACCOUNT`], [`RESIDENT`] if memory is
/// oversubscribed, and [`LOAD`] if the share's priority is high or low.
pub const SHARES: &str = "/usr/lib/tranche/shares";

/// The cap page's file name in a share's folder. On a read-only mount of a tmpfs.
pub const CAP: &str = "cap";

/// The account page's file name in a share's folder; missing if the cap page has no limit.
pub const ACCOUNT: &str = "account";

/// The file name of the second account page of a share whose memory is oversubscribed, for memory that cannot move to the
/// host. Missing in any other share's folder.
pub const RESIDENT: &str = "resident";

/// The file name of the load page of the share's GPU or partition: writable for a share of high priority, read-only for
/// one of low priority.
pub const LOAD: &str = "load";

/// The node's own `libcuda.so.1`, to which the shim forwards.
pub const REAL_CUDA: &core::ffi::CStr = c"/usr/lib/tranche/driver/libcuda.so.1";

/// The node's own `libnvidia-ml.so.1`, to which the shim forwards.
pub const REAL_NVML: &core::ffi::CStr = c"/usr/lib/tranche/driver/libnvidia-ml.so.1";

/// The sockets of the GPU's MPS daemon, in a container with a concurrent share: the driver's own default path.
pub const MPS_PIPES: &core::ffi::CStr = c"/tmp/nvidia-mps";

/// The socket at which the daemon takes clients.
pub const MPS_CONTROL: &core::ffi::CStr = c"/tmp/nvidia-mps/control";

/// The most shares of one container; more are refused.
pub const MAX_SHARES: usize = 64;
