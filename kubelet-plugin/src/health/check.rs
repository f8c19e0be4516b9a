//! Runs the check of a GPU: a context, an allocation, a kernel, and a comparison of what it wrote.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tranche_node::nvml::search::InstalledDriver;

/// How long a check may take: the driver compiles the kernel.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often it is asked whether the check has ended.
const POLL: Duration = Duration::from_millis(50);

/// Checks GPUs.
pub trait Check: Send + Sync + std::fmt::Debug {
    /// Checks a GPU that nobody uses. An error says why it does not work. It may take a minute.
    fn check(&self, gpu_uuid: &str) -> Result<(), String>;
}

/// The program `tranche-gpu-check`, with the driver's libcuda.
#[derive(Debug)]
pub struct CheckProgram {
    pub program: PathBuf,
    pub driver: InstalledDriver,
}

impl Check for CheckProgram {
    fn check(&self, gpu_uuid: &str) -> Result<(), String> {
        let cuda = self.driver.cuda().map_err(|error| error.to_string())?;
        let folder = cuda.parent().map(PathBuf::from).unwrap_or_default();
        let mut child = Command::new(&self.program)
            .arg(&cuda)
            .env_clear()
            // The driver's compiler lies beside libcuda.
            .env("LD_LIBRARY_PATH", folder)
            .env("CUDA_VISIBLE_DEVICES", gpu_uuid)
            // Nothing is left in a folder that the container does not have.
            .env("CUDA_CACHE_DISABLE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{} does not start: {error}", self.program.display()))?;
        let end = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < end => std::thread::sleep(POLL),
                Ok(None) => {
                    let _ = child.kill();
                    // A process whose call of the driver hangs ends when that returns.
                    std::thread::spawn(move || child.wait());
                    return Err(format!("no result within {} s", PATIENCE.as_secs()));
                }
                Err(error) => return Err(error.to_string()),
            }
        };
        if status.success() {
            return Ok(());
        }
        let mut said = String::new();
        if let Some(mut pipe) = child.stderr.take() {
            // Without it the status says enough.
            let _ = pipe.read_to_string(&mut said);
        }
        match said.trim() {
            "" => Err(format!("the check ended with {status}")),
            said => Err(said.to_owned()),
        }
    }
}
