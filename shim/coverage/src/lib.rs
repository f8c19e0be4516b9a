//! How the shim handles each function of the driver's libraries: the rows of `cuda/symbols.txt` and
//! `nvml/symbols.txt`, with the descriptions of `subjects.txt`.
//!
//! ```text
//!  headers, drivers ──► shim/symbols ──► symbols.txt ┐              ┌─► build.rs of both libraries
//!                           a person ──► subjects.txt ┴─► Coverage ──┼─► docs/reference/{cuda,nvml}-coverage.md
//!                                                                    └─► kubelet-plugin: does the node's driver have more?
//! ```
//!
//! A row is `NAME CLASS SINCE SUBJECT`: a [`Class`], the CUDA version that added the function, and a
//! subject, which `subjects.txt` describes. [`Coverage::parse`] refuses a function without a class, so that
//! no function is passed on by mistake.
#![forbid(unsafe_code)]

mod page;

pub use page::{Page, pages};

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// How the shim handles a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Allocates or frees device memory, and is charged.
    Accounts,
    /// Takes GPU time, and may have to wait.
    Launches,
    /// Is answered with the share's values.
    Queries,
    /// Initializes: refuses if the share's pages are invalid.
    Initialises,
    /// Returns pointers to other functions.
    Resolves,
    /// Is passed to the driver.
    Passes,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Accounts,
        Self::Launches,
        Self::Queries,
        Self::Initialises,
        Self::Resolves,
        Self::Passes,
    ];

    /// Its name in a row.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accounts => "accounts",
            Self::Launches => "launches",
            Self::Queries => "queries",
            Self::Initialises => "initialises",
            Self::Resolves => "resolves",
            Self::Passes => "passes",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Class {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == text)
            .ok_or(())
    }
}

/// A CUDA version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// The number before the dot.
    pub major: u32,
    /// The number after it.
    pub minor: u32,
}

impl Release {
    /// In the form of `cuGetProcAddress`: 12.4 is 12040.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.major * 1000 + self.minor * 10
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for Release {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (major, minor) = text.split_once('.').ok_or(())?;
        let number = |text: &str| text.parse().map_err(drop);
        Ok(Self {
            major: number(major)?,
            minor: number(minor)?,
        })
    }
}

/// One function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// Its name in the symbol table.
    pub symbol: &'a str,
    /// What is done with it.
    pub class: Class,
    /// The CUDA version that added it, if a header declares it.
    pub since: Option<Release>,
    /// Its subject; together with the class it is the key of an entry of `subjects.txt`.
    pub subject: &'a str,
}

/// All functions of one library of the driver.
#[derive(Clone, Debug)]
pub struct Coverage<'a> {
    rows: Vec<Row<'a>>,
    subjects: BTreeMap<(Class, &'a str), &'a str>,
}

/// An invalid line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoverageError {
    /// Not four words, or an unknown class or version.
    #[error(
        "symbols.txt: {0:?}: must be NAME CLASS SINCE SUBJECT, with a class of accounts, launches, queries, \
         initialises, resolves, passes; a new symbol is unclassified until a person gives it one"
    )]
    Row(String),
    /// Out of order, or twice.
    #[error("symbols.txt: {0}: rows must be sorted by name, each name once")]
    Order(String),
    /// Not a class, a subject and a text.
    #[error("subjects.txt: {0:?}: must be CLASS SUBJECT and a sentence, each pair once")]
    Subject(String),
    /// A class and subject without a description.
    #[error(
        "{symbol}: subjects.txt does not say what is done with `{class} {subject}`: add a line"
    )]
    Undescribed {
        /// The first symbol of that kind.
        symbol: String,
        /// Its class.
        class: Class,
        /// Its subject.
        subject: String,
    },
    /// A description that no symbol uses.
    #[error("subjects.txt: no symbol is `{class} {subject}`: remove the line")]
    Unused {
        /// The class.
        class: Class,
        /// The subject.
        subject: String,
    },
}

const CUDA: [&str; 2] = [
    include_str!("../../cuda/symbols.txt"),
    include_str!("../../cuda/subjects.txt"),
];
const NVML: [&str; 2] = [
    include_str!("../../nvml/symbols.txt"),
    include_str!("../../nvml/subjects.txt"),
];

impl Coverage<'static> {
    /// The functions of `libcuda.so.1`.
    pub fn cuda() -> Result<Self, CoverageError> {
        Self::parse(CUDA[0], CUDA[1])
    }

    /// The functions of `libnvidia-ml.so.1`.
    pub fn nvml() -> Result<Self, CoverageError> {
        Self::parse(NVML[0], NVML[1])
    }
}

impl<'a> Coverage<'a> {
    /// Reads both files of a library.
    pub fn parse(symbols: &'a str, subjects: &'a str) -> Result<Self, CoverageError> {
        let rows = symbols
            .lines()
            .map(|line| row(line).ok_or_else(|| CoverageError::Row(line.to_owned())))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(pair) = rows
            .windows(2)
            .find(|pair| pair[0].symbol >= pair[1].symbol)
        {
            return Err(CoverageError::Order(pair[1].symbol.to_owned()));
        }
        let mut described = BTreeMap::new();
        for line in subjects.lines() {
            let refuse = || CoverageError::Subject(line.to_owned());
            let (class, subject, text) = description(line).ok_or_else(refuse)?;
            if described.insert((class, subject), text).is_some() {
                return Err(refuse());
            }
        }
        let used: BTreeSet<_> = rows.iter().map(|row| (row.class, row.subject)).collect();
        if let Some(row) = rows
            .iter()
            .find(|row| !described.contains_key(&(row.class, row.subject)))
        {
            return Err(CoverageError::Undescribed {
                symbol: row.symbol.to_owned(),
                class: row.class,
                subject: row.subject.to_owned(),
            });
        }
        if let Some((class, subject)) = described.keys().find(|key| !used.contains(key)) {
            return Err(CoverageError::Unused {
                class: *class,
                subject: (*subject).to_owned(),
            });
        }
        Ok(Self {
            rows,
            subjects: described,
        })
    }

    /// The functions, by name.
    #[must_use]
    pub fn rows(&self) -> &[Row<'a>] {
        &self.rows
    }

    /// Whether there is a row for this function.
    #[must_use]
    pub fn knows(&self, symbol: &str) -> bool {
        self.rows
            .binary_search_by(|row| row.symbol.cmp(symbol))
            .is_ok()
    }

    /// The description of a class and subject.
    #[must_use]
    pub fn description(&self, row: &Row<'_>) -> &'a str {
        self.subjects
            .get(&(row.class, row.subject))
            .copied()
            .unwrap_or_default()
    }
}

fn row(line: &str) -> Option<Row<'_>> {
    let mut words = line.split(' ');
    let row = Row {
        symbol: words.next()?,
        class: words.next()?.parse().ok()?,
        since: match words.next()? {
            "-" => None,
            release => Some(release.parse().ok()?),
        },
        subject: words.next()?,
    };
    words.next().is_none().then_some(row)
}

fn description(line: &str) -> Option<(Class, &str, &str)> {
    let (class, rest) = line.split_once(' ')?;
    let (subject, text) = rest.split_once(' ')?;
    Some((class.parse().ok()?, subject, text))
}

#[cfg(test)]
mod tests;
