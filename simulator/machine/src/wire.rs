//! The handshake over `<ROOT>/run/nvidia-persistenced/socket`.
//!
//! Sequenced packets of 64 bytes, little endian. The library sends a request and the daemon answers once. The answer to
//! [`Request::Observe`] and [`Request::Join`] has the page's file with it. A connection that has joined stays open until
//! the process ends, which the daemon notices by the end of the connection.

use crate::layout::{ABI, NvLinkCounter};

/// Length of every packet.
pub const PACKET: usize = 64;
const MAGIC: u32 = u32::from_le_bytes(*b"TRSM");

/// A request of a library or a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Get the page for reading (NVML).
    Observe,
    /// Get the page for writing, and a slot in it (CUDA).
    Join,
    /// Free the memory of processes that have ended, before the answer.
    Reclaim,
    /// Change a GPU's setting. For root.
    Set {
        /// Index of the GPU.
        gpu: u32,
        /// The setting to change.
        setting: Setting,
        value: u32,
    },
    /// Publish an event of a GPU. For root.
    Event {
        /// Index of the GPU.
        gpu: u32,
        /// `nvmlEventType*` bits.
        kind: u32,
        data: u32,
    },
    /// Add to a counter of a GPU's NVLinks. For root.
    CountNvLink {
        /// Index of the GPU.
        gpu: u32,
        counter: NvLinkCounter,
        /// What is added.
        amount: u32,
    },
    /// Create a GPU instance. The answer has its id.
    CreateGpuInstance {
        /// Index of the GPU.
        gpu: u32,
        /// `NVML_GPU_INSTANCE_PROFILE_*`.
        kind: u32,
        /// The first of its places; the driver chooses without it.
        start: Option<u32>,
    },
    /// Destroy a GPU instance.
    DestroyGpuInstance {
        /// Index of the GPU.
        gpu: u32,
        /// Id of the GPU instance.
        instance: u32,
    },
    /// Create a compute instance. The answer has its id.
    CreateComputeInstance {
        /// Index of the GPU.
        gpu: u32,
        /// Id of the GPU instance.
        instance: u32,
        /// `NVML_COMPUTE_INSTANCE_PROFILE_*`.
        kind: u32,
        /// The first of its compute slices; the driver chooses without it.
        start: Option<u32>,
    },
    /// Destroy a compute instance.
    DestroyComputeInstance {
        /// Index of the GPU.
        gpu: u32,
        /// Id of the GPU instance.
        instance: u32,
        /// Id of the compute instance.
        compute: u32,
    },
}

/// The value that lets the driver place an instance.
const ANYWHERE: u32 = u32::MAX;

/// A setting that [`Request::Set`] changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Persistence mode, 0 or 1.
    Persistence = 1,
    /// `nvmlComputeMode_t`.
    ComputeMode = 2,
    /// MIG mode, 0 or 1.
    MigMode = 3,
    /// Whether the GPU has fallen off the bus, 0 or 1.
    Lost = 4,
    /// A reset of the GPU: its value has no meaning. All MIG instances are destroyed, and a pending MIG mode takes effect.
    Reset = 5,
    /// The length of time slices: 0 the driver's own, 1 short, 2 medium, 3 long.
    TimeSlice = 6,
    /// Whether NVIDIA's kernel driver has the GPU, 0 or 1. A change resets the GPU and switches persistence
    /// mode off.
    Driver = 7,
}

impl Setting {
    fn from_number(number: u32) -> Option<Self> {
        [
            Self::Persistence,
            Self::ComputeMode,
            Self::MigMode,
            Self::Lost,
            Self::Reset,
            Self::TimeSlice,
            Self::Driver,
        ]
        .into_iter()
        .find(|setting| *setting as u32 == number)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The request was carried out.
    Granted {
        /// The index of the new slot, after a join; the id of a new MIG instance; otherwise 0.
        slot: u32,
    },
    /// The request is of another version of the simulator.
    Mismatch,
    /// No slot is free.
    Full,
    /// The request is for root only.
    Forbidden,
    /// There is no such GPU, setting or value.
    Invalid,
    /// A process uses the GPU or the MIG instance, or it has compute instances.
    InUse,
    /// No slices or engines are left for a MIG instance.
    InsufficientResources,
    /// There is no such MIG instance.
    NotFound,
    /// The GPU is not in MIG mode, or has no such profile.
    NotSupported,
}

fn words(values: [u32; 7]) -> [u8; PACKET] {
    let mut packet = [0; PACKET];
    for (chunk, value) in packet.chunks_exact_mut(4).zip(values) {
        chunk.copy_from_slice(&value.to_le_bytes());
    }
    packet
}

fn read(packet: &[u8]) -> Option<[u32; 7]> {
    if packet.len() != PACKET {
        return None;
    }
    let mut values = [0; 7];
    for (value, chunk) in values.iter_mut().zip(packet.chunks_exact(4)) {
        *value = u32::from_le_bytes(chunk.try_into().ok()?);
    }
    (values[0] == MAGIC && values[1] == ABI).then_some(values)
}

impl Request {
    #[must_use]
    pub fn encode(self) -> [u8; PACKET] {
        let place = |start: Option<u32>| start.unwrap_or(ANYWHERE);
        let [op, a, b, c, d] = match self {
            Self::Observe => [1, 0, 0, 0, 0],
            Self::Join => [2, 0, 0, 0, 0],
            Self::Set {
                gpu,
                setting,
                value,
            } => [3, gpu, setting as u32, value, 0],
            Self::Event { gpu, kind, data } => [4, gpu, kind, data, 0],
            Self::Reclaim => [5, 0, 0, 0, 0],
            Self::CreateGpuInstance { gpu, kind, start } => [6, gpu, kind, place(start), 0],
            Self::DestroyGpuInstance { gpu, instance } => [7, gpu, instance, 0, 0],
            Self::CreateComputeInstance {
                gpu,
                instance,
                kind,
                start,
            } => [8, gpu, instance, kind, place(start)],
            Self::DestroyComputeInstance {
                gpu,
                instance,
                compute,
            } => [9, gpu, instance, compute, 0],
            Self::CountNvLink {
                gpu,
                counter,
                amount,
            } => [10, gpu, counter as u32, amount, 0],
        };
        words([MAGIC, ABI, op, a, b, c, d])
    }

    /// Reads a packet; `None` if it is of another version or invalid.
    #[must_use]
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let [_, _, op, a, b, c, d] = read(packet)?;
        let place = |start| (start != ANYWHERE).then_some(start);
        match op {
            1 => Some(Self::Observe),
            2 => Some(Self::Join),
            3 => Some(Self::Set {
                gpu: a,
                setting: Setting::from_number(b)?,
                value: c,
            }),
            4 => Some(Self::Event {
                gpu: a,
                kind: b,
                data: c,
            }),
            5 => Some(Self::Reclaim),
            6 => Some(Self::CreateGpuInstance {
                gpu: a,
                kind: b,
                start: place(c),
            }),
            7 => Some(Self::DestroyGpuInstance {
                gpu: a,
                instance: b,
            }),
            8 => Some(Self::CreateComputeInstance {
                gpu: a,
                instance: b,
                kind: c,
                start: place(d),
            }),
            9 => Some(Self::DestroyComputeInstance {
                gpu: a,
                instance: b,
                compute: c,
            }),
            10 => Some(Self::CountNvLink {
                gpu: a,
                counter: *NvLinkCounter::ALL.get(b as usize)?,
                amount: c,
            }),
            _ => None,
        }
    }
}

impl Reply {
    #[must_use]
    pub fn encode(self) -> [u8; PACKET] {
        let [status, slot] = match self {
            Self::Granted { slot } => [0, slot],
            Self::Mismatch => [1, 0],
            Self::Full => [2, 0],
            Self::Forbidden => [3, 0],
            Self::Invalid => [4, 0],
            Self::InUse => [5, 0],
            Self::InsufficientResources => [6, 0],
            Self::NotFound => [7, 0],
            Self::NotSupported => [8, 0],
        };
        words([MAGIC, ABI, status, slot, 0, 0, 0])
    }

    /// Reads a packet; `None` if it is of another version or invalid.
    #[must_use]
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let [_, _, status, slot, ..] = read(packet)?;
        Some(match status {
            0 => Self::Granted { slot },
            1 => Self::Mismatch,
            2 => Self::Full,
            3 => Self::Forbidden,
            4 => Self::Invalid,
            5 => Self::InUse,
            6 => Self::InsufficientResources,
            7 => Self::NotFound,
            8 => Self::NotSupported,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packets_are_decoded_as_they_were_encoded() {
        for request in [
            Request::Observe,
            Request::Join,
            Request::Reclaim,
            Request::Set {
                gpu: 3,
                setting: Setting::ComputeMode,
                value: 2,
            },
            Request::Set {
                gpu: 0,
                setting: Setting::MigMode,
                value: 1,
            },
            Request::Set {
                gpu: 0,
                setting: Setting::Lost,
                value: 1,
            },
            Request::Set {
                gpu: 2,
                setting: Setting::TimeSlice,
                value: 3,
            },
            Request::Event {
                gpu: 1,
                kind: 8,
                data: 79,
            },
            Request::CountNvLink {
                gpu: 1,
                counter: NvLinkCounter::Recoveries,
                amount: u32::MAX,
            },
            Request::CreateGpuInstance {
                gpu: 1,
                kind: 9,
                start: None,
            },
            Request::CreateGpuInstance {
                gpu: 1,
                kind: 0,
                start: Some(0),
            },
            Request::DestroyGpuInstance {
                gpu: 1,
                instance: 14,
            },
            Request::CreateComputeInstance {
                gpu: 1,
                instance: 2,
                kind: 7,
                start: Some(3),
            },
            Request::DestroyComputeInstance {
                gpu: 1,
                instance: 2,
                compute: 6,
            },
        ] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for reply in [
            Reply::Granted { slot: 7 },
            Reply::Mismatch,
            Reply::Full,
            Reply::Forbidden,
            Reply::Invalid,
            Reply::InUse,
            Reply::InsufficientResources,
            Reply::NotFound,
            Reply::NotSupported,
        ] {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
    }

    proptest! {
        #[test]
        fn decoding_never_panics(packet in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Request::decode(&packet);
            let _ = Reply::decode(&packet);
        }
    }
}
