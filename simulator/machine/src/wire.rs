//! The handshake over `<ROOT>/run/nvidia-persistenced/socket`.
//!
//! Sequenced packets of 64 bytes, little endian. The library sends a request and the daemon answers once. The answer to
//! [`Request::Observe`] and [`Request::Join`] has the page's file with it. A connection that has joined stays open until
//! the process ends, which the daemon notices by the end of the connection.

use crate::layout::ABI;

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
        /// Its new value.
        value: u32,
    },
    /// Publish an event of a GPU. For root.
    Event {
        /// Index of the GPU.
        gpu: u32,
        /// `nvmlEventType*` bits.
        kind: u32,
        /// The Xid.
        data: u32,
    },
}

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
}

impl Setting {
    fn from_number(number: u32) -> Option<Self> {
        [
            Self::Persistence,
            Self::ComputeMode,
            Self::MigMode,
            Self::Lost,
        ]
        .into_iter()
        .find(|setting| *setting as u32 == number)
    }
}

/// The daemon's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The request was carried out.
    Granted {
        /// The index of the new slot, after a join; otherwise 0.
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
    /// The packet.
    #[must_use]
    pub fn encode(self) -> [u8; PACKET] {
        let [op, a, b, c] = match self {
            Self::Observe => [1, 0, 0, 0],
            Self::Join => [2, 0, 0, 0],
            Self::Set {
                gpu,
                setting,
                value,
            } => [3, gpu, setting as u32, value],
            Self::Event { gpu, kind, data } => [4, gpu, kind, data],
            Self::Reclaim => [5, 0, 0, 0],
        };
        words([MAGIC, ABI, op, a, b, c, 0])
    }

    /// Reads a packet; `None` if it is of another version or invalid.
    #[must_use]
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let [_, _, op, a, b, c, _] = read(packet)?;
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
            _ => None,
        }
    }
}

impl Reply {
    /// The packet.
    #[must_use]
    pub fn encode(self) -> [u8; PACKET] {
        let [status, slot] = match self {
            Self::Granted { slot } => [0, slot],
            Self::Mismatch => [1, 0],
            Self::Full => [2, 0],
            Self::Forbidden => [3, 0],
            Self::Invalid => [4, 0],
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
            Request::Event {
                gpu: 1,
                kind: 8,
                data: 79,
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
