//! The cap page: what a share may use. Written once by the node, read-only in the container.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `TRANCHEC` |
//! | 8 | 4 | layout version, [`ABI`] |
//! | 12 | 4 | compute policy: 1 strict, 2 work-conserving |
//! | 16 | 8 | memory limit in bytes, `u64::MAX` for none |
//! | 24 | 4 | cores in percent of the GPU's time, 0 for no limit |
//! | 28 | 4 | percent of the GPU's threads of each MPS client, 0 for a share without MPS |
//! | 32 | 8 | bytes that one CUDA context takes on this GPU, 0 if unknown |
//! | 40 | 8 | bytes of the memory limit for memory that cannot move from the GPU, 0 if memory is not oversubscribed |
//! | 48 | 4 | priority: 0 normal, 1 high, 2 low |
//! | 52 | 4 | for low priority: the percent of the cores that the share keeps while shares of high priority have work, else 0 |
//! | 64 | 64 | GPU UUID as NVML prints it |
//! | 128 | 64 | UID of the claim |
//! | 192 | 256 | device key: the share's folder name |
//! | 1016 | 8 | checksum (FNV-1a, 64 bit) of bytes 0 to 1016 |
//! | 1024 | 3072 | the compute share's refill, [`crate::compute::refill`], which the checksum does not cover; zero at first |
//!
//! Integers are little endian, texts UTF-8 padded with zeros, all else zero. Every change of
//! meaning needs a new version; a reader knows exactly one.

use crate::error::PageError;
use crate::uuid::GpuUuid;

/// Bytes of a cap page.
pub const LEN: usize = 4096;

/// Bytes of a cap page for the limits, including their checksum. The compute share's refill follows, which
/// the node writes repeatedly: see [`crate::compute::refill`].
pub const LIMITS_LEN: usize = 1024;

/// The layout's version. The account page has the same, because a claim has both.
pub const ABI: u32 = 1;

const MAGIC: [u8; 8] = *b"TRANCHEC";
const NO_LIMIT: u64 = u64::MAX;

const AT_ABI: usize = 8;
const AT_POLICY: usize = 12;
const AT_MEMORY: usize = 16;
const AT_CORES: usize = 24;
const AT_MPS_THREADS: usize = 28;
const AT_CONTEXT: usize = 32;
const AT_RESIDENT: usize = 40;
const AT_PRIORITY: usize = 48;
const AT_FLOOR: usize = 52;
const AT_UUID: usize = 64;
const AT_CLAIM: usize = 128;
const AT_KEY: usize = 192;
const AT_CHECKSUM: usize = 1016;

const UUID_LEN: usize = 64;
const CLAIM_LEN: usize = 64;
const KEY_LEN: usize = 256;

/// Whether a share may use more GPU time than its cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePolicy {
    /// Never more than the cores, even on an idle GPU.
    Strict,
    /// At least the cores under contention, more if others leave time unused.
    WorkConserving,
}

/// Whose launches come first on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// It neither waits for other shares' work nor lets them wait.
    #[default]
    Normal,
    /// While it has work, shares with low priority launch no more than their floor.
    High,
    /// It waits while shares with high priority have work.
    Low {
        /// Percent of its cores that it keeps meanwhile, 0 to 100.
        floor: u8,
    },
}

impl Priority {
    const fn encode(self) -> (u32, u32) {
        match self {
            Self::Normal => (0, 0),
            Self::High => (1, 0),
            Self::Low { floor } => (2, floor as u32),
        }
    }

    fn decode(found: u32, floor: u32) -> Result<Self, PageError> {
        match (found, u8::try_from(floor)) {
            (0, Ok(0)) => Ok(Self::Normal),
            (1, Ok(0)) => Ok(Self::High),
            (2, Ok(floor @ 0..=100)) => Ok(Self::Low { floor }),
            _ => Err(PageError::Priority { found, floor }),
        }
    }
}

/// The content of a cap page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapPage<'a> {
    /// The GPU of the share, with the UUID as NVML prints it (`GPU-…`).
    pub gpu_uuid: &'a str,
    /// The most device memory all processes of the share hold together, in bytes, at least 1;
    /// `None` for a device without a cap (exclusive, timeshared).
    pub memory_limit: Option<u64>,
    /// If the GPU's memory is oversubscribed: how much of the limit may be memory that the driver cannot move to the host,
    /// in bytes, from 1 to the limit. `None` for all of the limit.
    pub resident_limit: Option<u64>,
    /// Bytes that one CUDA context takes on this GPU, 0 if unknown. The share has room
    /// for one context beside its memory: its first context is free, every further one is charged
    /// this much.
    pub context_memory: u64,
    /// Share of the GPU's time in percent, 1 to 100; `None` for no limit.
    pub cores: Option<u8>,
    /// Percent of the GPU's threads that each process of the share may use as a client of the GPU's MPS
    /// daemon, 1 to 100; `None` for a share without MPS.
    pub mps_threads: Option<u8>,
    /// Strict or work-conserving.
    pub compute_policy: ComputePolicy,
    /// Whose launches come first.
    pub priority: Priority,
    /// UID of the `ResourceClaim`.
    pub claim_uid: &'a str,
    /// Name of the share within the container; its folder's name below [`crate::paths::SHARES`].
    pub device_key: &'a str,
}

impl<'a> CapPage<'a> {
    /// The page's bytes.
    pub fn encode(&self) -> Result<[u8; LEN], PageError> {
        if GpuUuid::parse(self.gpu_uuid).is_none() {
            return Err(PageError::Uuid);
        }
        let memory = match self.memory_limit {
            Some(0 | NO_LIMIT) => return Err(PageError::MemoryLimit),
            Some(bytes) => bytes,
            None => NO_LIMIT,
        };
        let resident = self.resident_limit.unwrap_or(0);
        if self.resident_limit == Some(0) || !self.has_resident_within_limit() {
            return Err(PageError::ResidentLimit);
        }
        let cores = encode_percent(self.cores).map_err(|found| PageError::Cores { found })?;
        let mps_threads =
            encode_percent(self.mps_threads).map_err(|found| PageError::MpsThreads { found })?;
        let policy: u32 = match self.compute_policy {
            ComputePolicy::Strict => 1,
            ComputePolicy::WorkConserving => 2,
        };
        let (priority, floor) = self.priority.encode();
        Priority::decode(priority, floor)?;
        let mut page = [0; LEN];
        page[..MAGIC.len()].copy_from_slice(&MAGIC);
        put(&mut page, AT_ABI, &ABI.to_le_bytes());
        put(&mut page, AT_POLICY, &policy.to_le_bytes());
        put(&mut page, AT_MEMORY, &memory.to_le_bytes());
        put(&mut page, AT_CORES, &cores.to_le_bytes());
        put(&mut page, AT_MPS_THREADS, &mps_threads.to_le_bytes());
        put(&mut page, AT_CONTEXT, &self.context_memory.to_le_bytes());
        put(&mut page, AT_RESIDENT, &resident.to_le_bytes());
        put(&mut page, AT_PRIORITY, &priority.to_le_bytes());
        put(&mut page, AT_FLOOR, &floor.to_le_bytes());
        put_text(
            &mut page,
            AT_UUID,
            UUID_LEN,
            self.gpu_uuid,
            "the GPU's UUID",
        )?;
        put_text(
            &mut page,
            AT_CLAIM,
            CLAIM_LEN,
            self.claim_uid,
            "the claim's UID",
        )?;
        put_text(
            &mut page,
            AT_KEY,
            KEY_LEN,
            self.device_key,
            "the device key",
        )?;
        let sum = checksum(&page[..AT_CHECKSUM]);
        put(&mut page, AT_CHECKSUM, &sum.to_le_bytes());
        Ok(page)
    }

    /// Reads a page's bytes; refuses a page that [`encode`](Self::encode) cannot have written.
    pub fn decode(page: &'a [u8]) -> Result<Self, PageError> {
        if page.len() != LEN {
            return Err(PageError::Length {
                expected: LEN,
                found: page.len(),
            });
        }
        if page[..MAGIC.len()] != MAGIC {
            return Err(PageError::Magic);
        }
        let abi = get_u32(page, AT_ABI);
        if abi != ABI {
            return Err(PageError::Abi {
                supported: ABI,
                found: abi,
            });
        }
        if get_u64(page, AT_CHECKSUM) != checksum(&page[..AT_CHECKSUM]) {
            return Err(PageError::Checksum);
        }
        let gpu_uuid = get_text(page, AT_UUID, UUID_LEN, "the GPU's UUID")?;
        if GpuUuid::parse(gpu_uuid).is_none() {
            return Err(PageError::Uuid);
        }
        let memory_limit = match get_u64(page, AT_MEMORY) {
            0 => return Err(PageError::MemoryLimit),
            NO_LIMIT => None,
            bytes => Some(bytes),
        };
        let cores =
            decode_percent(get_u32(page, AT_CORES)).map_err(|found| PageError::Cores { found })?;
        let mps_threads = decode_percent(get_u32(page, AT_MPS_THREADS))
            .map_err(|found| PageError::MpsThreads { found })?;
        let compute_policy = match get_u32(page, AT_POLICY) {
            1 => ComputePolicy::Strict,
            2 => ComputePolicy::WorkConserving,
            found => return Err(PageError::ComputePolicy { found }),
        };
        let resident = get_u64(page, AT_RESIDENT);
        let read = Self {
            gpu_uuid,
            memory_limit,
            resident_limit: (resident > 0).then_some(resident),
            context_memory: get_u64(page, AT_CONTEXT),
            cores,
            mps_threads,
            compute_policy,
            priority: Priority::decode(get_u32(page, AT_PRIORITY), get_u32(page, AT_FLOOR))?,
            claim_uid: get_text(page, AT_CLAIM, CLAIM_LEN, "the claim's UID")?,
            device_key: get_text(page, AT_KEY, KEY_LEN, "the device key")?,
        };
        if read.has_resident_within_limit() {
            Ok(read)
        } else {
            Err(PageError::ResidentLimit)
        }
    }

    fn has_resident_within_limit(&self) -> bool {
        let limit = self.memory_limit.unwrap_or(0);
        self.resident_limit.is_none_or(|bytes| bytes <= limit)
    }

    /// The GPU's UUID as 16 bytes; `None` if [`gpu_uuid`](Self::gpu_uuid) is invalid, which never happens in a
    /// decoded page.
    #[must_use]
    pub fn gpu(&self) -> Option<GpuUuid> {
        GpuUuid::parse(self.gpu_uuid)
    }
}

/// 0 for none, or 1 to 100; any other number is the error.
fn encode_percent(percent: Option<u8>) -> Result<u32, u32> {
    match percent {
        None => Ok(0),
        Some(percent @ 1..=100) => Ok(u32::from(percent)),
        Some(other) => Err(u32::from(other)),
    }
}

fn decode_percent(found: u32) -> Result<Option<u8>, u32> {
    match u8::try_from(found) {
        Ok(0) => Ok(None),
        Ok(percent @ 1..=100) => Ok(Some(percent)),
        _ => Err(found),
    }
}

fn put(page: &mut [u8; LEN], at: usize, value: &[u8]) {
    page[at..at + value.len()].copy_from_slice(value);
}

fn put_text(
    page: &mut [u8; LEN],
    at: usize,
    capacity: usize,
    value: &str,
    field: &'static str,
) -> Result<(), PageError> {
    if value.is_empty() || value.len() > capacity || value.contains('\0') {
        return Err(PageError::Text { field, capacity });
    }
    put(page, at, value.as_bytes());
    Ok(())
}

fn get_text<'a>(
    page: &'a [u8],
    at: usize,
    capacity: usize,
    field: &'static str,
) -> Result<&'a str, PageError> {
    let bytes = &page[at..at + capacity];
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(capacity);
    if len == 0 || bytes[len..].iter().any(|&byte| byte != 0) {
        return Err(PageError::Text { field, capacity });
    }
    core::str::from_utf8(&bytes[..len]).map_err(|_| PageError::Text { field, capacity })
}

pub(crate) fn get_u32(page: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&page[at..at + 4]);
    u32::from_le_bytes(bytes)
}

pub(crate) fn get_u64(page: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// FNV-1a, against accidents (a truncated file, a wrong file). The read-only mount protects against
/// forgery.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::string::String;

    use proptest::prelude::*;

    use super::{ABI, AT_ABI, AT_CHECKSUM, CapPage, ComputePolicy, LEN, Priority, checksum, put};
    use crate::error::PageError;

    const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

    fn page() -> CapPage<'static> {
        CapPage {
            gpu_uuid: UUID,
            memory_limit: Some(20 << 30),
            resident_limit: None,
            context_memory: 512 << 20,
            cores: Some(25),
            mps_threads: None,
            compute_policy: ComputePolicy::Strict,
            priority: Priority::Normal,
            claim_uid: "5f0c2b9e-0000-4000-8000-000000000001",
            device_key: "gpu-0",
        }
    }

    #[test]
    fn a_resident_limit_is_within_the_memory_limit() {
        let limits = |memory_limit, resident| CapPage {
            memory_limit,
            resident_limit: Some(resident),
            ..page()
        };
        let memory = Some(20 << 30);
        for wrong in [
            limits(memory, 0),
            limits(memory, (20 << 30) + 1),
            limits(None, 1),
        ] {
            assert_eq!(wrong.encode(), Err(PageError::ResidentLimit));
        }
        assert!(limits(memory, 20 << 30).encode().is_ok());
    }

    #[test]
    fn fields_out_of_range_are_refused() {
        for (bad, error) in [
            (
                CapPage {
                    gpu_uuid: "0",
                    ..page()
                },
                PageError::Uuid,
            ),
            (
                CapPage {
                    memory_limit: Some(0),
                    ..page()
                },
                PageError::MemoryLimit,
            ),
            (
                CapPage {
                    memory_limit: Some(u64::MAX),
                    ..page()
                },
                PageError::MemoryLimit,
            ),
            (
                CapPage {
                    cores: Some(0),
                    ..page()
                },
                PageError::Cores { found: 0 },
            ),
            (
                CapPage {
                    cores: Some(101),
                    ..page()
                },
                PageError::Cores { found: 101 },
            ),
            (
                CapPage {
                    mps_threads: Some(101),
                    ..page()
                },
                PageError::MpsThreads { found: 101 },
            ),
            (
                CapPage {
                    priority: Priority::Low { floor: 101 },
                    ..page()
                },
                PageError::Priority {
                    found: 2,
                    floor: 101,
                },
            ),
            (
                CapPage {
                    claim_uid: "",
                    ..page()
                },
                PageError::Text {
                    field: "the claim's UID",
                    capacity: 64,
                },
            ),
            (
                CapPage {
                    device_key: "a\0b",
                    ..page()
                },
                PageError::Text {
                    field: "the device key",
                    capacity: 256,
                },
            ),
        ] {
            assert_eq!(bad.encode(), Err(error));
        }
        let long: String = core::iter::repeat_n('x', 257).collect();
        assert!(
            CapPage {
                device_key: &long,
                ..page()
            }
            .encode()
            .is_err()
        );
        assert!(
            CapPage {
                device_key: &long[..256],
                ..page()
            }
            .encode()
            .is_ok()
        );
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = page().encode().unwrap();
        put(&mut bytes, AT_ABI, &(ABI + 1).to_le_bytes());
        assert_eq!(
            CapPage::decode(&bytes),
            Err(PageError::Abi {
                supported: ABI,
                found: ABI + 1
            })
        );
    }

    #[test]
    fn a_short_page_is_refused() {
        let bytes = page().encode().unwrap();
        assert_eq!(
            CapPage::decode(&bytes[..LEN - 1]),
            Err(PageError::Length {
                expected: LEN,
                found: LEN - 1
            })
        );
        assert_eq!(CapPage::decode(&[0; LEN]), Err(PageError::Magic));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            (memory, resident) in prop::option::of(1..u64::MAX).prop_flat_map(|memory| {
                let most = memory.unwrap_or(1);
                let resident = prop::option::of(1..=most).prop_map(move |it| it.filter(|_| memory.is_some()));
                (Just(memory), resident)
            }),
            context_memory: u64,
            cores in prop::option::of(1u8..=100),
            mps_threads in prop::option::of(1u8..=100),
            strict: bool,
            priority in prop_oneof![
                Just(Priority::Normal), Just(Priority::High), (0..=100u8).prop_map(|floor| Priority::Low { floor }),
            ],
            claim in "[a-z0-9-]{1,64}",
            key in "[a-zA-Z0-9._-]{1,256}",
        ) {
            let page = CapPage {
                gpu_uuid: UUID,
                memory_limit: memory,
                resident_limit: resident,
                context_memory,
                cores,
                mps_threads,
                compute_policy: if strict { ComputePolicy::Strict } else { ComputePolicy::WorkConserving },
                priority,
                claim_uid: &claim,
                device_key: &key,
            };
            let bytes = page.encode().unwrap();
            prop_assert_eq!(CapPage::decode(&bytes), Ok(page));
        }

        #[test]
        fn any_changed_byte_is_noticed(at in 0..AT_CHECKSUM + 8, by in 1u8..) {
            let mut bytes = page().encode().unwrap();
            bytes[at] ^= by;
            prop_assert!(CapPage::decode(&bytes).is_err());
        }

        /// Even with a matching checksum, no content panics or is read as something else.
        #[test]
        fn any_content_is_read_exactly_or_refused(at in 8..AT_CHECKSUM, content: [u8; 8]) {
            let mut bytes = page().encode().unwrap();
            let end = (at + 8).min(AT_CHECKSUM);
            bytes[at..end].copy_from_slice(&content[..end - at]);
            let sum = checksum(&bytes[..AT_CHECKSUM]);
            put(&mut bytes, AT_CHECKSUM, &sum.to_le_bytes());
            if let Ok(read) = CapPage::decode(&bytes) {
                prop_assert!(read.encode().is_ok());
            }
        }
    }
}
