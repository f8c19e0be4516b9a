//! An MPS supervisor in memory, whose calls are calls of the plugin's file system, so that a plugin that dies there changes
//! nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use tranche_mps::client::ClientError;
use tranche_mps::limits::Limits;
use tranche_mps::protocol::{Daemon, Health};

use crate::gpu::mps::{Daemons, MpsError};
use crate::host::fs::Fs;

/// The supervisor, which outlives a plugin. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Supervisor {
    state: Arc<Mutex<State>>,
    /// Signals that a daemon does not sleep any more.
    awake: Arc<Condvar>,
}

#[derive(Debug, Default)]
struct State {
    /// The GPUs and MIG devices that have a daemon.
    serving: BTreeSet<String>,
    /// The devices whose daemon has died.
    dead: BTreeSet<String>,
    is_away: bool,
    /// No daemon can be started.
    all_die: bool,
    /// How often a daemon was asked for.
    ensured: u32,
    /// The devices whose daemon does not answer until it is woken.
    asleep: BTreeSet<String>,
}

impl Supervisor {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn serving(&self) -> Vec<String> {
        self.state().serving.iter().cloned().collect()
    }

    pub fn ensured(&self) -> u32 {
        self.state().ensured
    }

    /// Ends all daemons.
    pub fn reboot(&self) {
        *self.state() = State::default();
    }

    pub fn goes_away(&self, is_away: bool) {
        self.state().is_away = is_away;
    }

    pub fn dies(&self, gpu: &str, is_dead: bool) {
        let mut state = self.state();
        if is_dead {
            state.dead.insert(gpu.to_owned());
        } else {
            state.dead.remove(gpu);
        }
    }

    /// From now on the daemon of a device does not answer, until it is woken.
    pub fn sleeps(&self, device: &str, is_asleep: bool) {
        let mut state = self.state();
        if is_asleep {
            state.asleep.insert(device.to_owned());
        } else {
            state.asleep.remove(device);
            self.awake.notify_all();
        }
    }

    pub fn all_die(&self, do_they: bool) {
        self.state().all_die = do_they;
    }

    fn answering(&self) -> Result<MutexGuard<'_, State>, MpsError> {
        let state = self.state();
        if state.is_away {
            return Err(refused("No such file or directory").into());
        }
        Ok(state)
    }
}

fn refused(reason: &str) -> ClientError {
    ClientError::Unreachable {
        path: PathBuf::from("/run/tranche/mps/supervisor.sock"),
        source: std::io::Error::other(reason.to_owned()),
    }
}

/// The supervisor for one plugin.
#[derive(Clone, Debug)]
pub struct MortalClient {
    pub supervisor: Supervisor,
    pub fs: Arc<dyn Fs>,
    /// Any folder that exists.
    pub folder: PathBuf,
}

impl MortalClient {
    /// An error once the plugin is dead.
    fn is_alive(&self) -> Result<(), MpsError> {
        let alive = self.fs.create_dir(&self.folder);
        Ok(alive.map_err(|error| refused(&error.to_string()))?)
    }
}

impl Daemons for MortalClient {
    fn ensure(&self, device_uuid: &str) -> Result<(), MpsError> {
        self.is_alive()?;
        let mut state = self.supervisor.answering()?;
        state.ensured += 1;
        let is_asleep = |state: &mut State| state.asleep.contains(device_uuid);
        let mut state = self.supervisor.awake.wait_while(state, is_asleep).unwrap();
        if state.all_die || state.dead.contains(device_uuid) {
            let reason = "the MPS control daemon cannot be started".to_owned();
            return Err(ClientError::Refused(reason).into());
        }
        state.serving.insert(device_uuid.to_owned());
        Ok(())
    }

    fn end(&self, device_uuid: &str) -> Result<(), MpsError> {
        self.is_alive()?;
        self.supervisor.answering()?.serving.remove(device_uuid);
        Ok(())
    }

    fn list(&self) -> Result<Vec<Daemon>, MpsError> {
        let state = self.supervisor.answering()?;
        let daemon = |gpu: &String| Daemon {
            device: gpu.clone().try_into().unwrap(),
            health: if state.dead.contains(gpu) {
                Health::Dead("its process 7 ended".into())
            } else {
                Health::Ready
            },
            pid: Some(7),
            limits: Limits {
                thread_percentage: 100,
                memory_mib: None,
            },
            multi_user: true,
            restarts: 0,
        };
        Ok(state.serving.iter().map(daemon).collect())
    }
}
