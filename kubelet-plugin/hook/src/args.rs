//! The command line, as our CDI specs write it.

use std::path::{Component, Path, PathBuf};

/// A link to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it says.
    pub target: String,
    /// Where it is, from the container's root.
    pub path: PathBuf,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Make links.
    CreateLinks {
        /// In this order.
        links: Vec<Link>,
    },
    /// Make the loader's cache.
    UpdateLdcache {
        /// Folders with the driver's libraries, from the container's root.
        folders: Vec<PathBuf>,
        /// The host's ldconfig, linked statically.
        ldconfig: PathBuf,
    },
}

/// Why the command line is not one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// None or another.
    #[error(
        "usage: tranche-cdi-hook create-links --link TARGET::PATH… | update-ldcache --folder FOLDER… --ldconfig PROGRAM"
    )]
    Usage,
    /// An option that is not known, or has no value.
    #[error("option {0:?} is unknown or has no value")]
    Option(String),
    /// A link that is none.
    #[error("link {0:?} is not TARGET::PATH")]
    Link(String),
    /// A path that may not be one.
    #[error("path {0:?} must be absolute, without `..`")]
    Path(String),
}

impl Command {
    /// Reads the arguments after the program's name.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, ArgsError> {
        let mut args = args.into_iter();
        let name = args.next().ok_or(ArgsError::Usage)?;
        let mut options = Vec::new();
        while let Some(option) = args.next() {
            match args.next() {
                Some(value) => options.push((option, value)),
                None => return Err(ArgsError::Option(option)),
            }
        }
        match name.as_str() {
            "create-links" => {
                let links = options
                    .into_iter()
                    .map(|(option, value)| match option.as_str() {
                        "--link" => link(&value),
                        _ => Err(ArgsError::Option(option)),
                    })
                    .collect::<Result<_, _>>()?;
                Ok(Self::CreateLinks { links })
            }
            "update-ldcache" => {
                let (mut folders, mut ldconfig) = (Vec::new(), None);
                for (option, value) in options {
                    match option.as_str() {
                        "--folder" => folders.push(absolute(&value)?),
                        "--ldconfig" => ldconfig = Some(absolute(&value)?),
                        _ => return Err(ArgsError::Option(option)),
                    }
                }
                let ldconfig = ldconfig.ok_or(ArgsError::Usage)?;
                Ok(Self::UpdateLdcache { folders, ldconfig })
            }
            _ => Err(ArgsError::Usage),
        }
    }
}

fn link(value: &str) -> Result<Link, ArgsError> {
    let (target, path) = value
        .split_once("::")
        .filter(|(target, _)| !target.is_empty())
        .ok_or_else(|| ArgsError::Link(value.to_owned()))?;
    let path = absolute(path)?;
    if path.file_name().is_none() {
        return Err(ArgsError::Link(value.to_owned()));
    }
    Ok(Link {
        target: target.to_owned(),
        path,
    })
}

/// A line break would become a line of the loader's configuration.
fn absolute(value: &str) -> Result<PathBuf, ArgsError> {
    let path = Path::new(value);
    let plain = path
        .components()
        .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if path.is_absolute() && plain && !value.contains(char::is_control) {
        Ok(path.to_owned())
    } else {
        Err(ArgsError::Path(value.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Command, ArgsError> {
        Command::parse(args.iter().map(ToString::to_string))
    }

    #[test]
    fn our_specs_commands_are_read() {
        assert_eq!(
            parse(&[
                "create-links",
                "--link",
                "libcuda.so.1::/usr/lib/libcuda.so"
            ]),
            Ok(Command::CreateLinks {
                links: vec![Link {
                    target: "libcuda.so.1".into(),
                    path: "/usr/lib/libcuda.so".into()
                }]
            })
        );
        assert_eq!(
            parse(&[
                "update-ldcache",
                "--folder",
                "/a",
                "--folder",
                "/b",
                "--ldconfig",
                "/l"
            ]),
            Ok(Command::UpdateLdcache {
                folders: vec!["/a".into(), "/b".into()],
                ldconfig: "/l".into()
            })
        );
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for (args, expected) in [
            (&[][..], ArgsError::Usage),
            (&["remove"], ArgsError::Usage),
            (&["update-ldcache", "--folder", "/a"], ArgsError::Usage),
            (
                &["create-links", "--link"],
                ArgsError::Option("--link".into()),
            ),
            (
                &["create-links", "--folder", "/a"],
                ArgsError::Option("--folder".into()),
            ),
            (
                &["create-links", "--link", "a:/b"],
                ArgsError::Link("a:/b".into()),
            ),
            (
                &["create-links", "--link", "::/b"],
                ArgsError::Link("::/b".into()),
            ),
            (
                &["create-links", "--link", "a::/"],
                ArgsError::Link("a::/".into()),
            ),
            (
                &["create-links", "--link", "a::b"],
                ArgsError::Path("b".into()),
            ),
            (
                &["create-links", "--link", "a::/../b"],
                ArgsError::Path("/../b".into()),
            ),
            (
                &["update-ldcache", "--folder", "/a\n/b", "--ldconfig", "/l"],
                ArgsError::Path("/a\n/b".into()),
            ),
        ] {
            assert_eq!(parse(args), Err(expected), "{args:?}");
        }
    }
}
