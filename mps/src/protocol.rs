//! What the node plugin and the supervisor say to each other: one line of JSON each way for each connection.
//!
//! Both sides ignore fields that they do not know. An older supervisor refuses a request of a later version: the refusal names the
//! version and says that the supervisor must be updated. It keeps its daemons.

use serde::{Deserialize, Serialize};

use crate::layout::DeviceId;
use crate::limits::Limits;

/// The version of requests.
pub const VERSION: u32 = 1;

/// The most bytes of a request or an answer.
pub const LONGEST: u64 = 1 << 20;

/// What is asked of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// What to do.
    #[serde(flatten)]
    pub command: Command,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "camelCase")]
pub enum Command {
    /// Ensure that a daemon serves the device with these limits and answers. It may be repeated.
    Ensure { device: DeviceId, limits: Limits },
    /// Ensure that no daemon of Tranche serves the device. It may be repeated.
    End { device: DeviceId },
    /// List the daemons and their state.
    List,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// Done: the daemon that was asked for, or all of them.
    Done(Vec<Daemon>),
    /// Not done.
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Daemon {
    /// The device that it serves.
    pub device: DeviceId,
    pub health: Health,
    /// Its process, in the supervisor's PID namespace; absent while it is not running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    pub limits: Limits,
    /// Whether processes of different users may be its clients at a time.
    pub multi_user: bool,
    /// How often it was started again after it had died.
    pub restarts: u32,
}

/// How a daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Health {
    Ready,
    /// It runs and does not answer. Its clients may work on; new ones wait.
    NotAnswering(String),
    /// It died, or cannot be started. Its clients have failed.
    Dead(String),
}

#[cfg(test)]
mod tests {
    use super::{Answer, Command, Daemon, Health, Limits, Request, VERSION};

    const DEVICE: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

    /// The text is the contract between releases.
    #[test]
    fn requests_and_answers_have_this_form() {
        let limits = Limits {
            thread_percentage: 30,
            memory_mib: Some(4096),
        };
        let device = || DEVICE.to_owned().try_into().unwrap();
        let ensure = Request {
            version: VERSION,
            command: Command::Ensure {
                device: device(),
                limits,
            },
        };
        let text = serde_json::to_string(&ensure).unwrap();
        assert_eq!(
            text,
            format!(
                r#"{{"version":1,"command":"ensure","device":"{DEVICE}","limits":{{"threadPercentage":30,"memoryMiB":4096}}}}"#
            )
        );
        assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), ensure);
        let answer = Answer::Done(vec![Daemon {
            device: device(),
            health: Health::Dead("killed".into()),
            pid: None,
            limits,
            multi_user: true,
            restarts: 2,
        }]);
        let text = serde_json::to_string(&answer).unwrap();
        assert_eq!(
            text,
            format!(
                r#"{{"done":[{{"device":"{DEVICE}","health":{{"dead":"killed"}},"limits":{{"threadPercentage":30,"memoryMiB":4096}},"multiUser":true,"restarts":2}}]}}"#
            )
        );
        assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer);
    }

    #[test]
    fn fields_of_a_later_release_are_ignored() {
        let text = format!(r#"{{"version":1,"command":"end","device":"{DEVICE}","gently":true}}"#);
        assert!(serde_json::from_str::<Request>(&text).is_ok());
    }
}
