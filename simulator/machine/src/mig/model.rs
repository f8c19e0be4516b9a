//! The MIG geometry of GPU models.
//!
//! Profiles, engines and counts are those of NVIDIA's MIG User Guide, "Supported MIG Profiles". Ids, multiprocessors,
//! memory and placements are the output of `nvidia-smi mig -lgip` and `-lgipp` on such GPUs, as the guide and NVIDIA's
//! repositories mig-parted and gpu-operator show it. Memory depends on the driver's version by some hundred MiB.

use serde::Deserialize;

/// A GPU model with MIG, as machine files name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum ModelName {
    /// A30, 24 GB.
    #[serde(rename = "A30")]
    A30 = 1,
    /// A100, 40 GB.
    #[serde(rename = "A100-40")]
    A100Gb40 = 2,
    /// A100, 80 GB.
    #[serde(rename = "A100-80")]
    A100Gb80 = 3,
    /// H100, 80 GB.
    #[serde(rename = "H100-80")]
    H100 = 4,
    /// H200, 141 GB.
    #[serde(rename = "H200")]
    H200 = 5,
    /// B200, 180 GB.
    #[serde(rename = "B200")]
    B200 = 6,
    /// RTX PRO 6000 Blackwell, 96 GB.
    #[serde(rename = "RTX-PRO-6000")]
    RtxPro6000 = 7,
}

/// The geometry of a model.
#[derive(Debug)]
pub struct Model {
    pub name: ModelName,
    /// The GPU instance profiles, as `nvidia-smi mig -lgip` lists them.
    pub profiles: &'static [GpuProfile],
    /// Multiprocessors of a compute slice that is a part of a larger GPU instance.
    pub slice_multiprocessors: u32,
}

/// A GPU instance profile.
#[derive(Debug, PartialEq, Eq)]
pub struct GpuProfile {
    /// `NVML_GPU_INSTANCE_PROFILE_*`.
    pub kind: u32,
    /// Its id in `nvidia-smi mig`.
    pub id: u32,
    /// Its name, `1g.10gb+me`.
    pub name: &'static str,
    /// Compute slices.
    pub slices: u32,
    /// Instances of this profile on an empty GPU.
    pub instances: u32,
    pub multiprocessors: u32,
    /// Copy engines, decoders, encoders, JPEG decoders and optical flow accelerators.
    pub engines: Engines,
    pub memory_mib: u64,
    /// Places of the GPU's memory that an instance takes.
    pub size: u32,
    /// The first of these places, for each possible placement, in the order in which the driver tries them if the caller
    /// does not choose one.
    pub starts: &'static [u32],
}

/// Numbers of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Engines {
    /// Copy engines.
    pub copy: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG decoders.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub optical_flow: u32,
}

/// A compute instance profile of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`, which is also its id in `nvidia-smi mig`.
    pub kind: u32,
    /// Compute slices.
    pub slices: u32,
    /// Instances of this profile in an empty GPU instance.
    pub instances: u32,
    pub multiprocessors: u32,
}

// NVML_GPU_INSTANCE_PROFILE_*, nvml.h.
const SLICE_1: u32 = 0;
const SLICE_2: u32 = 1;
const SLICE_3: u32 = 2;
const SLICE_4: u32 = 3;
const SLICE_7: u32 = 4;
const SLICE_1_REV1: u32 = 7;
const SLICE_2_REV1: u32 = 8;
const SLICE_1_REV2: u32 = 9;
const SLICE_1_GFX: u32 = 10;
const SLICE_2_GFX: u32 = 11;
const SLICE_4_GFX: u32 = 12;
const SLICE_1_NO_ME: u32 = 13;
const SLICE_2_NO_ME: u32 = 14;
const SLICE_1_ALL_ME: u32 = 15;
const SLICE_2_ALL_ME: u32 = 16;

/// `NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1`: a slice with more multiprocessors than others.
const COMPUTE_1_REV1: u32 = 7;

/// A row of `nvidia-smi mig -lgip`: slices, instances and multiprocessors, then the engines in its order: decoders,
/// encoders, copy engines, JPEG, OFA.
const fn row(
    (kind, id, name): (u32, u32, &'static str),
    [slices, instances, multiprocessors]: [u32; 3],
    [decoders, encoders, copy, jpeg, optical_flow]: [u32; 5],
    memory_mib: u64,
    (starts, size): (&'static [u32], u32),
) -> GpuProfile {
    GpuProfile {
        kind,
        id,
        name,
        slices,
        instances,
        multiprocessors,
        engines: Engines {
            copy,
            decoders,
            encoders,
            jpeg,
            optical_flow,
        },
        memory_mib,
        size,
        starts,
    }
}

type Places = (&'static [u32], u32);
// For GPUs with eight memory slices and seven compute slices. The order follows from the ids in the guide's examples and in
// published logs: instances of 1g get the ids 13, 11, 12, 7, 8, 9, 10, those of 2g 5, 3, 4 and those of 3g 2, 1.
const SEVENTH: Places = (&[6, 4, 5, 0, 1, 2, 3], 1);
const WIDE_SEVENTH: Places = (&[4, 0, 2, 6], 2);
const TWO_SEVENTHS: Places = (&[4, 0, 2], 2);
const THREE_SEVENTHS: Places = (&[4, 0], 4);
const FOUR_SEVENTHS: Places = (&[0], 4);
const ALL_OF_8: Places = (&[0], 8);
// For the A30, which has four of each.
const QUARTER: Places = (&[0, 1, 2, 3], 1);
const HALF: Places = (&[0, 2], 2);
const ALL_OF_4: Places = (&[0], 4);
// For the RTX PRO 6000, whose memory has twelve places.
const QUARTER_OF_12: Places = (&[0, 3, 6, 9], 3);
const HALF_OF_12: Places = (&[0, 6], 6);
const ALL_OF_12: Places = (&[0], 12);

#[rustfmt::skip]
static A30: Model = Model {
    name: ModelName::A30,
    slice_multiprocessors: 14,
    profiles: &[
        row((SLICE_1, 14, "1g.6gb"), [1, 4, 14], [0, 0, 1, 0, 0], 5_952, QUARTER),
        row((SLICE_1_REV1, 21, "1g.6gb+me"), [1, 1, 14], [1, 0, 1, 1, 1], 5_952, QUARTER),
        row((SLICE_2, 5, "2g.12gb"), [2, 2, 28], [2, 0, 2, 0, 0], 11_968, HALF),
        row((SLICE_2_REV1, 6, "2g.12gb+me"), [2, 1, 28], [2, 0, 2, 1, 1], 11_968, HALF),
        row((SLICE_4, 0, "4g.24gb"), [4, 1, 56], [4, 0, 4, 1, 1], 24_000, ALL_OF_4),
    ],
};

#[rustfmt::skip]
static A100_40: Model = Model {
    name: ModelName::A100Gb40,
    slice_multiprocessors: 14,
    profiles: &[
        row((SLICE_1, 19, "1g.5gb"), [1, 7, 14], [0, 0, 1, 0, 0], 4_864, SEVENTH),
        row((SLICE_1_REV1, 20, "1g.5gb+me"), [1, 1, 14], [1, 0, 1, 1, 1], 4_864, SEVENTH),
        row((SLICE_1_REV2, 15, "1g.10gb"), [1, 4, 14], [1, 0, 1, 0, 0], 9_984, WIDE_SEVENTH),
        row((SLICE_2, 14, "2g.10gb"), [2, 3, 28], [1, 0, 2, 0, 0], 9_984, TWO_SEVENTHS),
        row((SLICE_3, 9, "3g.20gb"), [3, 2, 42], [2, 0, 3, 0, 0], 20_096, THREE_SEVENTHS),
        row((SLICE_4, 5, "4g.20gb"), [4, 1, 56], [2, 0, 4, 0, 0], 20_096, FOUR_SEVENTHS),
        row((SLICE_7, 0, "7g.40gb"), [7, 1, 98], [5, 0, 7, 1, 1], 40_448, ALL_OF_8),
    ],
};

#[rustfmt::skip]
static A100_80: Model = Model {
    name: ModelName::A100Gb80,
    slice_multiprocessors: 14,
    profiles: &[
        row((SLICE_1, 19, "1g.10gb"), [1, 7, 14], [0, 0, 1, 0, 0], 9_728, SEVENTH),
        row((SLICE_1_REV1, 20, "1g.10gb+me"), [1, 1, 14], [1, 0, 1, 1, 1], 9_728, SEVENTH),
        row((SLICE_1_REV2, 15, "1g.20gb"), [1, 4, 14], [1, 0, 1, 0, 0], 19_968, WIDE_SEVENTH),
        row((SLICE_2, 14, "2g.20gb"), [2, 3, 28], [1, 0, 2, 0, 0], 19_968, TWO_SEVENTHS),
        row((SLICE_3, 9, "3g.40gb"), [3, 2, 42], [2, 0, 3, 0, 0], 40_192, THREE_SEVENTHS),
        row((SLICE_4, 5, "4g.40gb"), [4, 1, 56], [2, 0, 4, 0, 0], 40_192, FOUR_SEVENTHS),
        row((SLICE_7, 0, "7g.80gb"), [7, 1, 98], [5, 0, 7, 1, 1], 80_896, ALL_OF_8),
    ],
};

#[rustfmt::skip]
static H100: Model = Model {
    name: ModelName::H100,
    slice_multiprocessors: 16,
    profiles: &[
        row((SLICE_1, 19, "1g.10gb"), [1, 7, 16], [1, 0, 1, 1, 0], 9_984, SEVENTH),
        row((SLICE_1_REV1, 20, "1g.10gb+me"), [1, 1, 16], [1, 0, 1, 1, 1], 9_984, SEVENTH),
        row((SLICE_1_REV2, 15, "1g.20gb"), [1, 4, 26], [1, 0, 1, 1, 0], 20_096, WIDE_SEVENTH),
        row((SLICE_2, 14, "2g.20gb"), [2, 3, 32], [2, 0, 2, 2, 0], 20_096, TWO_SEVENTHS),
        row((SLICE_3, 9, "3g.40gb"), [3, 2, 60], [3, 0, 3, 3, 0], 40_448, THREE_SEVENTHS),
        row((SLICE_4, 5, "4g.40gb"), [4, 1, 64], [4, 0, 4, 4, 0], 40_448, FOUR_SEVENTHS),
        row((SLICE_7, 0, "7g.80gb"), [7, 1, 132], [7, 0, 8, 7, 1], 81_152, ALL_OF_8),
    ],
};

#[rustfmt::skip]
static H200: Model = Model {
    name: ModelName::H200,
    slice_multiprocessors: 16,
    profiles: &[
        row((SLICE_1, 19, "1g.18gb"), [1, 7, 16], [1, 0, 1, 1, 0], 16_384, SEVENTH),
        row((SLICE_1_REV1, 20, "1g.18gb+me"), [1, 1, 16], [1, 0, 1, 1, 1], 16_384, SEVENTH),
        row((SLICE_1_REV2, 15, "1g.35gb"), [1, 4, 26], [1, 0, 1, 1, 0], 33_024, WIDE_SEVENTH),
        row((SLICE_2, 14, "2g.35gb"), [2, 3, 32], [2, 0, 2, 2, 0], 33_024, TWO_SEVENTHS),
        row((SLICE_3, 9, "3g.71gb"), [3, 2, 60], [3, 0, 3, 3, 0], 71_168, THREE_SEVENTHS),
        row((SLICE_4, 5, "4g.71gb"), [4, 1, 64], [4, 0, 4, 4, 0], 71_168, FOUR_SEVENTHS),
        row((SLICE_7, 0, "7g.141gb"), [7, 1, 132], [7, 0, 8, 7, 1], 143_360, ALL_OF_8),
    ],
};

// The multiprocessors of 3g and the memory of 3g, 4g and 7g are assumed from the proportions of an H200.
#[rustfmt::skip]
static B200: Model = Model {
    name: ModelName::B200,
    slice_multiprocessors: 18,
    profiles: &[
        row((SLICE_1, 19, "1g.23gb"), [1, 7, 18], [1, 0, 2, 1, 0], 22_528, SEVENTH),
        row((SLICE_1_REV1, 20, "1g.23gb+me"), [1, 1, 18], [1, 0, 2, 1, 1], 22_528, SEVENTH),
        row((SLICE_1_REV2, 15, "1g.45gb"), [1, 4, 30], [1, 0, 2, 1, 0], 45_312, WIDE_SEVENTH),
        row((SLICE_2, 14, "2g.45gb"), [2, 3, 36], [2, 0, 4, 2, 0], 45_312, TWO_SEVENTHS),
        row((SLICE_3, 9, "3g.90gb"), [3, 2, 70], [3, 0, 6, 3, 0], 91_136, THREE_SEVENTHS),
        row((SLICE_4, 5, "4g.90gb"), [4, 1, 72], [4, 0, 8, 4, 0], 91_136, FOUR_SEVENTHS),
        row((SLICE_7, 0, "7g.180gb"), [7, 1, 148], [7, 0, 16, 7, 1], 182_784, ALL_OF_8),
    ],
};

#[rustfmt::skip]
static RTX_PRO_6000: Model = Model {
    name: ModelName::RtxPro6000,
    slice_multiprocessors: 46,
    profiles: &[
        row((SLICE_1, 14, "1g.24gb"), [1, 4, 46], [1, 1, 1, 1, 0], 24_192, QUARTER_OF_12),
        row((SLICE_1_REV1, 21, "1g.24gb+me"), [1, 1, 46], [1, 1, 1, 1, 1], 24_192, QUARTER_OF_12),
        row((SLICE_1_GFX, 47, "1g.24gb+gfx"), [1, 4, 46], [1, 1, 1, 1, 0], 24_192, QUARTER_OF_12),
        row((SLICE_1_ALL_ME, 65, "1g.24gb+me.all"), [1, 1, 46], [4, 4, 1, 4, 1], 24_192, QUARTER_OF_12),
        row((SLICE_1_NO_ME, 67, "1g.24gb-me"), [1, 4, 46], [0, 0, 1, 0, 0], 24_192, QUARTER_OF_12),
        row((SLICE_2, 5, "2g.48gb"), [2, 2, 94], [2, 2, 2, 2, 0], 48_512, HALF_OF_12),
        row((SLICE_2_GFX, 35, "2g.48gb+gfx"), [2, 2, 94], [2, 2, 2, 2, 0], 48_512, HALF_OF_12),
        row((SLICE_2_ALL_ME, 64, "2g.48gb+me.all"), [2, 1, 94], [4, 4, 2, 4, 1], 48_512, HALF_OF_12),
        row((SLICE_2_NO_ME, 66, "2g.48gb-me"), [2, 2, 94], [0, 0, 2, 0, 0], 48_512, HALF_OF_12),
        row((SLICE_4, 0, "4g.96gb"), [4, 1, 188], [4, 4, 4, 4, 1], 97_280, ALL_OF_12),
        row((SLICE_4_GFX, 32, "4g.96gb+gfx"), [4, 1, 188], [4, 4, 4, 4, 1], 97_280, ALL_OF_12),
    ],
};

static MODELS: [&Model; 7] = [&A30, &A100_40, &A100_80, &H100, &H200, &B200, &RTX_PRO_6000];

impl Model {
    /// The geometry of `name`.
    #[must_use]
    pub fn of(name: ModelName) -> &'static Self {
        match name {
            ModelName::A30 => &A30,
            ModelName::A100Gb40 => &A100_40,
            ModelName::A100Gb80 => &A100_80,
            ModelName::H100 => &H100,
            ModelName::H200 => &H200,
            ModelName::B200 => &B200,
            ModelName::RtxPro6000 => &RTX_PRO_6000,
        }
    }

    /// The model with a number of [`ModelName`]; `None` for 0 and for unknown numbers.
    #[must_use]
    pub fn of_number(number: u32) -> Option<&'static Self> {
        let is_it = |model: &&&'static Self| model.name as u32 == number;
        MODELS.iter().find(is_it).copied()
    }

    /// The profile with NVML's number `kind`.
    #[must_use]
    pub fn profile(&'static self, kind: u32) -> Option<&'static GpuProfile> {
        self.profiles.iter().find(|profile| profile.kind == kind)
    }

    /// The profile of the whole GPU.
    #[must_use]
    pub fn whole(&'static self) -> &'static GpuProfile {
        let all = self.profiles.iter();
        // Every model has one.
        all.max_by_key(|profile| (profile.slices, std::cmp::Reverse(profile.kind)))
            .unwrap_or(&self.profiles[0])
    }

    /// The most MIG devices of a GPU.
    #[must_use]
    pub fn most_devices(&'static self) -> u32 {
        self.whole().slices
    }

    /// The compute instance profiles of a GPU instance, as `nvidia-smi mig -lcip` lists them.
    #[must_use]
    pub fn compute_profiles(&self, of: &GpuProfile) -> Vec<ComputeProfile> {
        if of.slices == 1 {
            let is_wide = of.multiprocessors > self.slice_multiprocessors;
            return vec![ComputeProfile {
                kind: if is_wide { COMPUTE_1_REV1 } else { 0 },
                slices: 1,
                instances: 1,
                multiprocessors: of.multiprocessors,
            }];
        }
        // Profiles of 1, 2, 3, 4 and 7 slices have the numbers 0 to 4.
        let sizes = (0..).zip([1, 2, 3, 4, 7]);
        sizes
            .filter(|(_, slices)| *slices <= of.slices && !(of.slices == 4 && *slices == 3))
            .map(|(kind, slices)| ComputeProfile {
                kind,
                slices,
                instances: of.slices / slices,
                multiprocessors: if slices == of.slices {
                    of.multiprocessors
                } else {
                    slices * self.slice_multiprocessors
                },
            })
            .collect()
    }
}

impl GpuProfile {
    /// Whether instances can run graphics.
    #[must_use]
    pub fn has_graphics(&self) -> bool {
        matches!(self.kind, SLICE_1_GFX | SLICE_2_GFX | SLICE_4_GFX)
    }

    /// The id that a GPU instance gets at `start`. Each placement has its own id, so an instance that is made again at the
    /// same place has the same id: 0 for the whole GPU, 1 and 2 for its halves, 3 to 6 for its quarters and 7
    /// to 14 for its eighths. On real GPUs, the place of an id also depends on which units of the chip are switched off.
    #[must_use]
    pub fn instance_id(&self, whole: &Self, start: u32) -> u32 {
        let parts = whole.size / self.size;
        let first = match parts {
            1 => 0,
            2 => 1,
            4 => 3,
            _ => 7,
        };
        first + start / self.size
    }
}

impl ComputeProfile {
    /// The first compute slices of the possible placements.
    pub fn starts(&self) -> impl Iterator<Item = u32> {
        let size = if self.slices == 3 { 4 } else { self.slices };
        (0..self.instances).map(move |nth| nth * size)
    }

    /// The name in the GPU instance `of`: `1c.3g.20gb`, or `3g.20gb` for all of it.
    #[must_use]
    pub fn name(&self, of: &GpuProfile) -> String {
        if self.slices == of.slices {
            of.name.to_owned()
        } else {
            format!("{}c.{}", self.slices, of.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::{Description, MIB};

    #[test]
    fn every_table_is_consistent() {
        for model in MODELS {
            let whole = model.whole();
            assert_eq!(whole.id, 0, "{:?}", model.name);
            assert_eq!(Model::of(model.name).name, model.name);
            assert_eq!(
                Model::of_number(model.name as u32).unwrap().name,
                model.name
            );
            let mut ids = std::collections::BTreeSet::new();
            for profile in model.profiles {
                let label = format!("{:?} {}", model.name, profile.name);
                assert!(ids.insert(profile.id) && ids.len() <= model.profiles.len());
                assert_eq!(model.profile(profile.kind), Some(profile), "{label}");
                assert!(profile.name.starts_with(&format!("{}g.", profile.slices)));
                let last = profile.starts.iter().max().unwrap();
                assert!(last + profile.size <= whole.size, "{label}");
                assert!(
                    profile.instances as usize <= profile.starts.len(),
                    "{label}"
                );
                assert!(profile.slices * profile.instances <= whole.slices);
                let most = u64::from(profile.instances);
                assert!(profile.memory_mib * most <= whole.memory_mib, "{label}");
                let sum = profile.multiprocessors * profile.instances;
                assert!(sum <= whole.multiprocessors, "{label}");
                for compute in model.compute_profiles(profile) {
                    let sum = compute.multiprocessors * compute.instances;
                    assert!(sum <= profile.multiprocessors, "{label}");
                    let ends = compute.starts().map(|start| start + compute.slices);
                    assert!(ends.max().unwrap() <= profile.slices, "{label}");
                }
            }
        }
    }

    #[test]
    fn machine_files_and_tables_are_of_the_same_boards() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../machines");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let machine = Description::read(&entry.unwrap().path()).unwrap();
            for gpu in machine.gpus {
                let Some(name) = gpu.mig else { continue };
                let whole = Model::of(name).whole();
                assert!(whole.memory_mib * MIB <= gpu.memory_mib * MIB);
                assert!(whole.memory_mib * 20 >= gpu.memory_mib * 19, "{}", gpu.name);
                assert!(whole.multiprocessors <= gpu.multiprocessors);
                seen += 1;
            }
        }
        assert_eq!(seen, 8);
    }

    #[test]
    fn placements_have_the_ids_of_the_guide() {
        let id = |kind, start| {
            let profile = A100_40.profile(kind).unwrap();
            profile.instance_id(A100_40.whole(), start)
        };
        assert_eq!((id(SLICE_7, 0), id(SLICE_3, 0), id(SLICE_3, 4)), (0, 1, 2));
        assert_eq!((id(SLICE_2, 2), id(SLICE_2, 4)), (4, 5));
        assert_eq!((id(SLICE_1, 0), id(SLICE_1, 6)), (7, 13));
    }

    #[test]
    fn compute_profiles_are_those_of_the_guide() {
        let of_3g = A100_40.compute_profiles(A100_40.profile(SLICE_3).unwrap());
        let rows: Vec<_> = of_3g
            .iter()
            .map(|p| (p.kind, p.instances, p.multiprocessors))
            .collect();
        assert_eq!(rows, [(0, 3, 14), (1, 1, 28), (2, 1, 42)]);
        let wide = H100.compute_profiles(H100.profile(SLICE_1_REV2).unwrap());
        assert_eq!((wide[0].kind, wide[0].multiprocessors), (7, 26));
    }
}
