//! Names of slices, and the node names from which they are formed.

use std::fmt;

use tranche_api::PciAddress;
use tranche_api::names::{DRIVER, pool};

/// The longest name of an object, and of a pool.
pub(super) const LONGEST: usize = 253;
/// Hexadecimal digits of a 64-bit hash.
const HASH: usize = 16;

/// A node name from which no pool name can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeNameError {
    /// Not the name of a node.
    #[error(
        "node name {name:?} is not a DNS subdomain: lower case letters, digits, '-' and '.', a letter or digit at both ends of every part"
    )]
    NotASubdomain {
        /// The name.
        name: String,
    },
    /// Too long.
    #[error(
        "node name {name:?}: the pool's name, {:?}, would have more than {LONGEST} characters",
        pool(name)
    )]
    TooLong {
        /// The name.
        name: String,
    },
}

/// Checks that the node's name can be part of a pool's.
pub(super) fn check_node(name: &str) -> Result<(), NodeNameError> {
    let part = |part: &str| {
        let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = part.as_bytes();
        bytes.first().is_some_and(alphanumeric)
            && bytes.last().is_some_and(alphanumeric)
            && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
    };
    if !name.split('.').all(part) {
        return Err(NodeNameError::NotASubdomain {
            name: name.to_owned(),
        });
    }
    if pool(name).len() > LONGEST {
        return Err(NodeNameError::TooLong {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// `<position>-<driver>-<node>-<hash>`; the node's name is cut if that would be too long.
///
/// The hash distinguishes nodes whose names begin with the same text, and a node from an earlier
/// one of the same name, whose slices may still exist.
pub(super) fn slice(position: Position, node: &str, node_uid: &str) -> String {
    let hash = fnv1a(&[node, node_uid]);
    let prefix = format!("{position}-{DRIVER}-");
    let room = LONGEST - prefix.len() - 1 - HASH;
    let node = node
        .get(..room)
        .unwrap_or(node)
        .trim_end_matches(['-', '.']);
    format!("{prefix}{node}-{hash:016x}")
}

/// The position of a slice among those of its node, which orders the names.
#[derive(Clone, Copy, Debug)]
pub(super) enum Position {
    /// A slice of counters, by number; before all GPUs.
    Counters(usize),
    /// Devices of the GPU at an address, by the slice's number among those of the GPU.
    Gpu(PciAddress, usize),
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counters(number) => write!(f, "0-{number:03}"),
            Self::Gpu(address, part) => {
                let PciAddress {
                    domain,
                    bus,
                    device,
                    function,
                } = address;
                write!(f, "1-{domain:08x}-{bus:02x}-{device:02x}-{function}")?;
                match part {
                    0 => Ok(()),
                    // After the first one's '-', and before the next GPU.
                    more => write!(f, ".{more:02}"),
                }
            }
        }
    }
}

/// FNV-1a of 64 bits over the texts, each followed by a byte that is in none of them.
fn fnv1a(texts: &[&str]) -> u64 {
    texts
        .iter()
        .flat_map(|text| text.bytes().chain([0]))
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: PciAddress = PciAddress {
        domain: 0,
        bus: 0x1b,
        device: 2,
        function: 0,
    };
    const GPU: Position = Position::Gpu(ADDRESS, 0);

    #[test]
    fn the_hash_is_fnv_1a() {
        // Without the closing zero the published vector for "a" would be af63dc4c8601ec8c.
        assert_eq!(fnv1a(&[]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(
            fnv1a(&["a"]),
            0xaf63_dc4c_8601_ec8c_u64.wrapping_mul(0x0000_0100_0000_01b3)
        );
    }

    #[test]
    fn node_names_are_checked() {
        let longest = format!("{}.{}", "a".repeat(124), "b".repeat(124));
        assert_eq!(longest.len() + "/gpu".len(), LONGEST);
        for good in ["a", "node-a", "10-0-0-1.ec2.internal", &longest] {
            assert_eq!(check_node(good), Ok(()));
        }
        for bad in [
            "", "-a", "a-", "a..b", ".a", "a.", "Node", "a_b", "a/b", "ä",
        ] {
            assert!(
                matches!(check_node(bad), Err(NodeNameError::NotASubdomain { .. })),
                "{bad}"
            );
        }
        assert!(matches!(
            check_node(&format!("{longest}b")),
            Err(NodeNameError::TooLong { .. })
        ));
    }

    #[test]
    fn names_fit_and_differ() {
        let node = format!("{}.{}", "a".repeat(124), "b".repeat(124));
        let other = format!("{}.{}", "a".repeat(124), "c".repeat(124));
        let name = slice(GPU, &node, "1");
        assert_eq!(name.len(), LONGEST);
        assert_ne!(name, slice(GPU, &other, "1"));
        assert_ne!(name, slice(GPU, &node, "2"));
        assert_eq!(
            slice(Position::Counters(7), "node-a", "1"),
            "0-007-gpu.tranche.dev-node-a-cd419d104ed8def8"
        );
        assert_eq!(
            slice(GPU, "node-a", "1"),
            "1-00000000-1b-02-0-gpu.tranche.dev-node-a-cd419d104ed8def8"
        );
    }

    #[test]
    fn the_slices_of_a_gpu_come_one_after_the_other() {
        let next = PciAddress {
            function: 1,
            ..ADDRESS
        };
        let places = [
            Position::Counters(999),
            GPU,
            Position::Gpu(ADDRESS, 1),
            Position::Gpu(ADDRESS, 2),
            Position::Gpu(ADDRESS, 10),
            Position::Gpu(next, 0),
        ];
        let names = places.map(|place| slice(place, "node-a", "1"));
        assert_eq!(
            names[2],
            "1-00000000-1b-02-0.01-gpu.tranche.dev-node-a-cd419d104ed8def8"
        );
        assert!(names.is_sorted(), "{names:?}");
        let mut parts = names.iter().flat_map(|name| name.split('.'));
        assert!(parts.all(|part| check_node(part).is_ok()), "{names:?}");
    }

    #[test]
    fn a_cut_leaves_no_separator_before_the_hash() {
        let node = format!("{}.{}", "a".repeat(213), "b".repeat(30));
        let name = slice(GPU, &node, "1");
        assert!(
            name.split('.').all(|part| check_node(part).is_ok()),
            "{name}"
        );
    }
}
