//! kube-scheduler's allocator of devices, as a process that answers for one node.
//!
//! The program in `scheduler/` consists of the scheduler's own Go packages. It applies the API server's defaults and
//! validation to slices, classes and claims, keeps allocations in the scheduler's claim tracker, and allocates with the
//! features that the release enables by default. `driver/allocator-oracle/build` builds it.
//!
//! `tests/` compare it with the slices that `tranche_driver::slices` plans, `kubectl-tranche/scheduler-rules` with its
//! copy of the rules.
#![forbid(unsafe_code)]

pub mod geometry;

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde::{Deserialize, Serialize};

const PROGRAM: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../target/allocator-oracle/scheduler"
);
/// The chart as `helm template` renders it; `make lint` compares it with the chart.
const CHART: &str = include_str!("../../../deploy/helm/rendered.yaml");

/// The factor by which `TRANCHE_STORIES` makes the tests longer: 1 if it is not set. `make nightly` sets it.
///
/// # Panics
/// If it is not a number above 0.
#[must_use]
pub fn stories_factor() -> u32 {
    let Ok(text) = std::env::var("TRANCHE_STORIES") else {
        return 1;
    };
    let factor = text.parse().ok().filter(|factor| *factor > 0);
    factor.unwrap_or_else(|| panic!("TRANCHE_STORIES={text:?}: it is not a number above 0"))
}

/// A running program.
#[derive(Debug)]
pub struct Scheduler {
    program: Child,
    requests: Option<BufWriter<ChildStdin>>,
    answers: BufReader<ChildStdout>,
}

/// What the scheduler answers for the claims of one pod.
#[derive(Debug)]
pub enum Outcome {
    /// One result for each claim.
    Allocated(Vec<AllocationResult>),
    /// The pod stays pending, with this message.
    Unschedulable(String),
}

/// Which claims the allocator knows while it allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// All claims, as in the scheduler. The new ones are added.
    All,
    /// No claims: it allocates as on an empty node and forgets the new claims.
    None,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program cannot be started.
    #[error("{PROGRAM}: {0}: run driver/allocator-oracle/build")]
    Start(io::Error),
    /// The program has ended.
    #[error("talk to {PROGRAM}: {0}")]
    Pipe(#[from] io::Error),
    /// A line that is not a valid answer.
    #[error("the answer of {PROGRAM}: {0}")]
    Answer(#[from] serde_json::Error),
    /// The API server would refuse the object, or the scheduler cannot handle it.
    #[error("{0}")]
    Refused(String),
    /// The allocator has searched for 10 seconds: the scheduler gives up on the node, whether or not the claims fit.
    #[error("the allocator has no result after 10 seconds")]
    TimedOut,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Request<'a> {
    Classes {
        items: &'a [DeviceClass],
    },
    Slices {
        node: &'a str,
        labels: &'a BTreeMap<String, String>,
        items: &'a [ResourceSlice],
    },
    Allocate {
        claims: &'a [ResourceClaim],
        forgetful: bool,
    },
    Release {
        claims: &'a [String],
    },
    Reset {},
    #[serde(rename_all = "camelCase")]
    Metadata {
        file: &'a str,
        driver: &'a str,
        claim: &'a str,
        pod_claim_name: &'a str,
        request: &'a str,
    },
}

/// A container's file about its devices, as Kubernetes' package reads it.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// `DeviceMetadata` of the version `v1beta1`.
    pub object: serde_json::Value,
    /// Where a program in the container searches for the file.
    pub path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    allocations: Option<Vec<AllocationResult>>,
    metadata: Option<Metadata>,
    unschedulable: Option<String>,
    #[serde(default)]
    timed_out: bool,
    error: Option<String>,
}

impl Scheduler {
    /// Starts the program and installs the chart's DeviceClasses.
    pub fn start() -> Result<Self, Error> {
        let mut program = Command::new(PROGRAM)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::Start)?;
        let requests = program.stdin.take().map(BufWriter::new);
        let answers = program.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut scheduler = Self {
            program,
            requests,
            answers: BufReader::new(answers),
        };
        let items = &chart_classes()?;
        scheduler.replace_classes(items)?;
        Ok(scheduler)
    }

    /// Replaces the DeviceClasses.
    pub fn replace_classes(&mut self, items: &[DeviceClass]) -> Result<(), Error> {
        self.ask(&Request::Classes { items }).map(|_| ())
    }

    /// Deletes all claims.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.ask(&Request::Reset {}).map(|_| ())
    }

    /// Replaces the slices. The node has no labels. Claims stay as they are.
    pub fn publish(&mut self, node: &str, items: &[ResourceSlice]) -> Result<(), Error> {
        self.publish_to(node, &BTreeMap::new(), items)
    }

    /// Like [`Scheduler::publish`], for a node with labels.
    pub fn publish_to(
        &mut self,
        node: &str,
        labels: &BTreeMap<String, String>,
        items: &[ResourceSlice],
    ) -> Result<(), Error> {
        let request = Request::Slices {
            node,
            labels,
            items,
        };
        self.ask(&request).map(|_| ())
    }

    /// Schedules a pod with these claims.
    pub fn allocate(
        &mut self,
        claims: &[ResourceClaim],
        knowledge: Knowledge,
    ) -> Result<Outcome, Error> {
        let answer = self.ask(&Request::Allocate {
            claims,
            forgetful: knowledge == Knowledge::None,
        })?;
        Ok(match answer.unschedulable {
            Some(why) => Outcome::Unschedulable(why),
            None => Outcome::Allocated(answer.allocations.unwrap_or_default()),
        })
    }

    /// Deletes claims, named `namespace/name`.
    pub fn release(&mut self, claims: &[String]) -> Result<(), Error> {
        self.ask(&Request::Release { claims }).map(|_| ())
    }

    /// Reads a container's file about the devices of a request, with Kubernetes' validation. `pod_claim_name` is empty for a
    /// claim that is not from a template.
    pub fn read_metadata(
        &mut self,
        file: &str,
        driver: &str,
        claim: &str,
        pod_claim_name: &str,
        request: &str,
    ) -> Result<Metadata, Error> {
        let answer = self.ask(&Request::Metadata {
            file,
            driver,
            claim,
            pod_claim_name,
            request,
        })?;
        let missing = || Error::Refused("the answer has no metadata".to_owned());
        answer.metadata.ok_or_else(missing)
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Answer, Error> {
        let requests = self
            .requests
            .as_mut()
            .ok_or(io::ErrorKind::BrokenPipe)
            .map_err(io::Error::from)?;
        serde_json::to_writer(&mut *requests, request)?;
        requests.write_all(b"\n")?;
        requests.flush()?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let answer: Answer = serde_json::from_str(&line)?;
        match answer.error {
            Some(error) => Err(Error::Refused(error)),
            None if answer.timed_out => Err(Error::TimedOut),
            None => Ok(answer),
        }
    }
}

impl From<io::ErrorKind> for Error {
    fn from(kind: io::ErrorKind) -> Self {
        Self::Pipe(kind.into())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // The program ends when its input ends.
        self.requests = None;
        let _ = self.program.wait();
    }
}

/// The DeviceClasses that the chart installs.
pub fn chart_classes() -> Result<Vec<DeviceClass>, Error> {
    let documents = CHART.split("\n---\n");
    let classes = documents
        .filter(|document| document.contains("\nkind: DeviceClass\n"))
        .map(serde_saphyr::from_str);
    classes
        .collect::<Result<_, _>>()
        .map_err(|error| Error::Refused(format!("a DeviceClass of the chart: {error}")))
}
