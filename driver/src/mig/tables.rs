//! What drivers report for some models, for tests. Source: NVIDIA's MIG User Guide, "Supported MIG Profiles".
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot be set up fails"
)]

use tranche_api::Quantity;
use tranche_api::mig::{MigEngines, MigGeometry, MigProfile};

/// Name, id, instances, memory slices, placements, MiB, multiprocessors, and copy engines, decoders, encoders, JPEG and
/// OFA engines.
type Row = (
    &'static str,
    u32,
    u32,
    u32,
    &'static [u32],
    u64,
    u32,
    [u32; 5],
);

const H100: [Row; 7] = [
    (
        "1g.10gb",
        19,
        7,
        1,
        &[0, 1, 2, 3, 4, 5, 6],
        9984,
        16,
        [1, 1, 0, 1, 0],
    ),
    (
        "1g.10gb+me",
        20,
        1,
        1,
        &[0, 1, 2, 3, 4, 5, 6],
        9984,
        16,
        [1, 1, 0, 1, 1],
    ),
    (
        "1g.20gb",
        15,
        4,
        2,
        &[0, 2, 4, 6],
        20096,
        26,
        [1, 1, 0, 1, 0],
    ),
    ("2g.20gb", 14, 3, 2, &[0, 2, 4], 20096, 32, [2, 2, 0, 2, 0]),
    ("3g.40gb", 9, 2, 4, &[0, 4], 40448, 60, [3, 3, 0, 3, 0]),
    ("4g.40gb", 5, 1, 4, &[0], 40448, 64, [4, 4, 0, 4, 0]),
    ("7g.80gb", 0, 1, 8, &[0], 81152, 132, [8, 7, 0, 7, 1]),
];

const A30: [Row; 4] = [
    ("1g.6gb", 14, 4, 1, &[0, 1, 2, 3], 5952, 14, [1, 0, 0, 0, 0]),
    (
        "1g.6gb+me",
        21,
        1,
        1,
        &[0, 1, 2, 3],
        5952,
        14,
        [1, 1, 0, 1, 1],
    ),
    ("2g.12gb", 5, 2, 2, &[0, 2], 11968, 28, [2, 2, 0, 0, 0]),
    ("4g.24gb", 0, 1, 4, &[0], 24125, 56, [4, 4, 0, 1, 1]),
];

/// H100 with 80 GB.
#[must_use]
pub fn h100(gpus: &[&str]) -> MigGeometry {
    geometry(gpus, &H100)
}

/// A30.
#[must_use]
pub fn a30(gpus: &[&str]) -> MigGeometry {
    geometry(gpus, &A30)
}

fn geometry(gpus: &[&str], rows: &[Row]) -> MigGeometry {
    let profile = |row: &Row| {
        let (name, id, instances, memory_slices, placements, mib, multiprocessors, engines) = *row;
        let [copy, decoders, encoders, jpeg, ofa] = engines;
        MigProfile {
            name: name.to_owned(),
            id,
            compute_slices: name[..1].parse().unwrap(),
            memory_slices,
            placements: placements.to_vec(),
            memory: Quantity::from_bytes(mib << 20),
            multiprocessors,
            instances,
            engines: MigEngines {
                copy,
                decoders,
                encoders,
                jpeg,
                ofa,
            },
        }
    };
    MigGeometry {
        gpus: gpus.iter().map(ToString::to_string).collect(),
        profiles: rows.iter().map(profile).collect(),
    }
}
