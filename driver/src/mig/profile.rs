//! The names of profiles.

use std::fmt;
use std::str::FromStr;

/// A profile of GPU instances, as NVML names it: `1g.10gb`, `1g.10gb+me`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct Profile {
    /// Compute slices, at least 1.
    pub compute_slices: u8,
    /// Memory in GB, as in the name; at least 1.
    pub memory_gb: u16,
    /// The instance's other engines.
    pub engines: Engines,
}

/// The media and graphics engines of a GPU instance, as its profile's name shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engines {
    /// Those that come with the slices.
    Usual,
    /// `+me`: media engines that few instances can have.
    Media,
    /// `+gfx`: graphics.
    Graphics,
    /// `+me.all`: all media engines.
    AllMedia,
    /// `-me`: no media engines.
    NoMedia,
}

impl Engines {
    const ALL: [Self; 5] = [
        Self::Usual,
        Self::Media,
        Self::Graphics,
        Self::AllMedia,
        Self::NoMedia,
    ];

    /// As NVML writes it behind the profile.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Usual => "",
            Self::Media => "+me",
            Self::Graphics => "+gfx",
            Self::AllMedia => "+me.all",
            Self::NoMedia => "-me",
        }
    }

    /// As part of a DNS label. NVIDIA's DRA driver also writes `-me` for `+me`.
    const fn label(self) -> &'static str {
        match self {
            Self::Usual => "",
            Self::Media => "-me",
            Self::Graphics => "-gfx",
            Self::AllMedia => "-meall",
            Self::NoMedia => "-nome",
        }
    }
}

/// Text that is not the name of a profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a MIG profile: it must look like 1g.10gb or 1g.10gb+me")]
pub struct ProfileError(String);

impl Profile {
    /// The profile as part of a DNS label: `1g10gb`, `1g10gb-me`. Each profile has its own label.
    #[must_use]
    pub fn label(self) -> String {
        self.spell("", self.engines.label())
    }

    /// Reads [`Self::label`].
    #[must_use]
    pub fn from_label(text: &str) -> Option<Self> {
        let (slices, rest) = text.split_once('g')?;
        let (memory, engines) = rest.split_once("gb")?;
        let engines = Engines::ALL.into_iter().find(|e| e.label() == engines)?;
        Self::read(slices, memory, engines).filter(|profile| profile.label() == text)
    }

    fn read(slices: &str, memory: &str, engines: Engines) -> Option<Self> {
        Some(Self {
            compute_slices: slices.parse().ok().filter(|count| *count > 0)?,
            memory_gb: memory.parse().ok().filter(|gb| *gb > 0)?,
            engines,
        })
    }

    fn spell(self, dot: &str, engines: &str) -> String {
        let Self {
            compute_slices,
            memory_gb,
            ..
        } = self;
        format!("{compute_slices}g{dot}{memory_gb}gb{engines}")
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spell(".", self.engines.suffix()))
    }
}

impl From<Profile> for String {
    fn from(profile: Profile) -> Self {
        profile.to_string()
    }
}

impl TryFrom<String> for Profile {
    type Error = ProfileError;

    fn try_from(text: String) -> Result<Self, ProfileError> {
        text.parse()
    }
}

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let read = || {
            let (slices, rest) = text.split_once("g.")?;
            let (memory, engines) = rest.split_once("gb")?;
            let engines = Engines::ALL.into_iter().find(|e| e.suffix() == engines)?;
            Self::read(slices, memory, engines).filter(|profile| profile.to_string() == text)
        };
        read().ok_or_else(|| ProfileError(text.to_owned()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    pub(crate) fn any_profile() -> impl Strategy<Value = Profile> {
        let engines = prop::sample::select(Engines::ALL.to_vec());
        (1..=u8::MAX, 1..=u16::MAX, engines).prop_map(|(compute_slices, memory_gb, engines)| {
            Profile {
                compute_slices,
                memory_gb,
                engines,
            }
        })
    }

    #[test]
    fn nvidias_names_have_labels_of_their_own() {
        let mut labels = BTreeSet::new();
        for (name, label) in [
            ("1g.10gb", "1g10gb"),
            ("1g.10gb+me", "1g10gb-me"),
            ("1g.24gb+gfx", "1g24gb-gfx"),
            ("2g.48gb+me.all", "2g48gb-meall"),
            ("1g.24gb-me", "1g24gb-nome"),
            ("7g.141gb", "7g141gb"),
        ] {
            let profile: Profile = name.parse().unwrap();
            assert_eq!(profile.to_string(), name);
            assert_eq!(profile.label(), label);
            assert_eq!(Profile::from_label(label), Some(profile));
            assert!(labels.insert(label));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "g.gb",
            "0g.10gb",
            "1g.0gb",
            "01g.10gb",
            "1g.10gb+",
            "1c.1g.10gb",
            "1g.10GB",
        ] {
            assert_eq!(text.parse::<Profile>(), Err(ProfileError(text.to_owned())));
            assert_eq!(Profile::from_label(&text.replace('.', "")), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_profile_is_read_back(profile in any_profile()) {
            prop_assert_eq!(profile.to_string().parse(), Ok(profile));
            prop_assert_eq!(Profile::from_label(&profile.label()), Some(profile));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9]{0,4}g\\.?[0-9]{0,6}gb[+.a-z-]{0,8}|.*") {
            let _ = text.parse::<Profile>();
            let _ = Profile::from_label(&text);
        }
    }
}
