//! The hook's command line, as in our CDI specs.

use std::path::{Component, Path, PathBuf};

use tranche_cdi_hook::compat::DriverVersion;
use tranche_cdi_hook::cover::{Cover, StandIn};

/// A link to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub target: String,
    /// Its path, from the container's root.
    pub path: PathBuf,
}

/// A library for the loader's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedLibrary {
    /// What programs ask for.
    pub name: String,
    /// Its path, from the container's root.
    pub path: PathBuf,
}

/// The hook's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Make links.
    CreateLinks {
        /// The links, in the order in which they are made.
        links: Vec<Link>,
    },
    /// Cover every copy of the driver's libraries in the image with the shim.
    CoverLibraries {
        /// What to cover with what.
        cover: Cover,
    },
    /// Make the loader find the image's libcuda for forward compatibility, if it is to be used.
    EnableCudaCompat {
        /// The version of the node's driver.
        node: Option<DriverVersion>,
        /// If this file exists, `cover-libraries` does it.
        unless: PathBuf,
    },
    /// Make the loader's cache.
    UpdateLdcache {
        /// Folders with the driver's libraries, from the container's root.
        folders: Vec<PathBuf>,
        /// The driver's libraries; the container may have some of them only.
        libraries: Vec<CachedLibrary>,
        /// The host's ldconfig, linked statically.
        ldconfig: PathBuf,
    },
}

/// Why the command line is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// No command, or an unknown one.
    #[error(
        "usage: tranche-cdi-hook COMMAND…, where COMMAND is create-links --link TARGET::PATH… | cover-libraries \
         --shim STEM::PATH… --companion STEM::PATH… --real-cuda PATH --host-driver-version VERSION | \
         enable-cuda-compat --host-driver-version VERSION --unless PATH | update-ldcache --folder FOLDER… \
         --library NAME::PATH… --ldconfig PROGRAM"
    )]
    Usage,
    /// An option that is not known, or has no value.
    #[error("option {0:?} is unknown or has no value")]
    Option(String),
    /// Not of the form NAME::PATH.
    #[error("{0:?} is not NAME::PATH")]
    Pair(String),
    /// An invalid path.
    #[error("path {0:?} must be absolute, without `..`")]
    Path(String),
}

impl Command {
    /// Reads the arguments after the program's name: commands, each with its options.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Vec<Self>, ArgsError> {
        let mut commands: Vec<(String, Options)> = Vec::new();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            if !arg.starts_with("--") {
                commands.push((arg, Vec::new()));
                continue;
            }
            let (_, options) = commands.last_mut().ok_or(ArgsError::Usage)?;
            match args.next() {
                Some(value) => options.push((arg, value)),
                None => return Err(ArgsError::Option(arg)),
            }
        }
        if commands.is_empty() {
            return Err(ArgsError::Usage);
        }
        commands
            .into_iter()
            .map(|(name, options)| Self::of(&name, options))
            .collect()
    }

    fn of(name: &str, options: Options) -> Result<Self, ArgsError> {
        match name {
            "create-links" => create_links(options),
            "cover-libraries" => cover_libraries(options),
            "enable-cuda-compat" => enable_cuda_compat(options),
            "update-ldcache" => update_ldcache(options),
            _ => Err(ArgsError::Usage),
        }
    }
}

type Options = Vec<(String, String)>;

fn create_links(options: Options) -> Result<Command, ArgsError> {
    let links = options.into_iter().map(|(option, value)| {
        if option != "--link" {
            return Err(ArgsError::Option(option));
        }
        let (target, path) = pair(&value)?;
        Ok(Link { target, path })
    });
    Ok(Command::CreateLinks {
        links: links.collect::<Result<_, _>>()?,
    })
}

fn cover_libraries(options: Options) -> Result<Command, ArgsError> {
    let (mut shims, mut companions) = (Vec::new(), Vec::new());
    let (mut real_cuda, mut node) = (None, None);
    for (option, value) in options {
        let stand_in = || pair(&value).map(|(stem, path)| StandIn { stem, path });
        match option.as_str() {
            "--shim" => shims.push(stand_in()?),
            "--companion" => companions.push(stand_in()?),
            "--real-cuda" => real_cuda = Some(absolute(&value)?),
            "--host-driver-version" => node = Some(DriverVersion::parse(&value)),
            _ => return Err(ArgsError::Option(option)),
        }
    }
    if shims.is_empty() {
        return Err(ArgsError::Usage);
    }
    Ok(Command::CoverLibraries {
        cover: Cover {
            shims,
            companions,
            real_cuda: real_cuda.ok_or(ArgsError::Usage)?,
            node: node.ok_or(ArgsError::Usage)?,
        },
    })
}

fn enable_cuda_compat(options: Options) -> Result<Command, ArgsError> {
    let (mut node, mut unless) = (None, None);
    for (option, value) in options {
        match option.as_str() {
            "--host-driver-version" => node = Some(DriverVersion::parse(&value)),
            "--unless" => unless = Some(absolute(&value)?),
            _ => return Err(ArgsError::Option(option)),
        }
    }
    Ok(Command::EnableCudaCompat {
        node: node.ok_or(ArgsError::Usage)?,
        unless: unless.ok_or(ArgsError::Usage)?,
    })
}

fn update_ldcache(options: Options) -> Result<Command, ArgsError> {
    let (mut folders, mut libraries, mut ldconfig) = (Vec::new(), Vec::new(), None);
    for (option, value) in options {
        match option.as_str() {
            "--folder" => folders.push(absolute(&value)?),
            "--library" => {
                let (name, path) = pair(&value)?;
                libraries.push(CachedLibrary { name, path });
            }
            "--ldconfig" => ldconfig = Some(absolute(&value)?),
            _ => return Err(ArgsError::Option(option)),
        }
    }
    let ldconfig = ldconfig.ok_or(ArgsError::Usage)?;
    Ok(Command::UpdateLdcache {
        folders,
        libraries,
        ldconfig,
    })
}

/// A name and the path of a file.
fn pair(value: &str) -> Result<(String, PathBuf), ArgsError> {
    let (name, path) = value
        .split_once("::")
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| ArgsError::Pair(value.to_owned()))?;
    let path = absolute(path)?;
    if path.file_name().is_none() {
        return Err(ArgsError::Pair(value.to_owned()));
    }
    Ok((name.to_owned(), path))
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

    fn parse_all(args: &[&str]) -> Result<Vec<Command>, ArgsError> {
        Command::parse(args.iter().map(ToString::to_string))
    }

    fn parse(args: &[&str]) -> Result<Command, ArgsError> {
        parse_all(args).map(|commands| {
            let [command] = <[_; 1]>::try_from(commands).expect("one command");
            command
        })
    }

    #[test]
    fn commands_are_read_in_their_order() {
        let links = Command::CreateLinks {
            links: vec![Link {
                target: "a".into(),
                path: "/b".into(),
            }],
        };
        let cache = Command::UpdateLdcache {
            folders: vec!["/a".into()],
            libraries: Vec::new(),
            ldconfig: "/l".into(),
        };
        let args = [
            "create-links",
            "--link",
            "a::/b",
            "update-ldcache",
            "--folder",
            "/a",
            "--ldconfig",
            "/l",
        ];
        assert_eq!(parse_all(&args), Ok(vec![links, cache]));
        let wrong = ["create-links", "--link", "a::/b", "remove"];
        assert_eq!(parse_all(&wrong), Err(ArgsError::Usage));
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
                "--library",
                "libx.so.1::/b/libx.so.1",
                "--ldconfig",
                "/l"
            ]),
            Ok(Command::UpdateLdcache {
                folders: vec!["/a".into(), "/b".into()],
                libraries: vec![CachedLibrary {
                    name: "libx.so.1".into(),
                    path: "/b/libx.so.1".into()
                }],
                ldconfig: "/l".into()
            })
        );
    }

    #[test]
    fn what_covers_what_is_read() {
        let stand_in = |stem: &str, path: &str| StandIn {
            stem: stem.into(),
            path: path.into(),
        };
        let node = DriverVersion::parse("535.261.03");
        assert_eq!(
            parse(&[
                "cover-libraries",
                "--shim",
                "libcuda.so::/t/libcuda.so.1",
                "--companion",
                "libx.so::/d/libx.so.5",
                "--real-cuda",
                "/t/driver/libcuda.so.1",
                "--host-driver-version",
                "535.261.03",
            ]),
            Ok(Command::CoverLibraries {
                cover: Cover {
                    shims: vec![stand_in("libcuda.so", "/t/libcuda.so.1")],
                    companions: vec![stand_in("libx.so", "/d/libx.so.5")],
                    real_cuda: "/t/driver/libcuda.so.1".into(),
                    node: node.clone(),
                }
            })
        );
        let unless = PathBuf::from("/t/x");
        let compat = |version| {
            let args = [
                "enable-cuda-compat",
                "--host-driver-version",
                version,
                "--unless",
                "/t/x",
            ];
            parse(&args)
        };
        for (version, node) in [("535.261.03", node), ("unknown", None)] {
            let unless = unless.clone();
            assert_eq!(
                compat(version),
                Ok(Command::EnableCudaCompat { node, unless })
            );
        }
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for (args, expected) in [
            (&[][..], ArgsError::Usage),
            (&["remove"], ArgsError::Usage),
            (&["--link", "a::/b"], ArgsError::Usage),
            (&["update-ldcache", "--folder", "/a"], ArgsError::Usage),
            (&["enable-cuda-compat", "--unless", "/a"], ArgsError::Usage),
            (&["cover-libraries", "--shim", "a::/b"], ArgsError::Usage),
            (
                &[
                    "cover-libraries",
                    "--real-cuda",
                    "/a",
                    "--host-driver-version",
                    "1.1",
                ],
                ArgsError::Usage,
            ),
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
                ArgsError::Pair("a:/b".into()),
            ),
            (
                &["create-links", "--link", "::/b"],
                ArgsError::Pair("::/b".into()),
            ),
            (
                &["create-links", "--link", "a::/"],
                ArgsError::Pair("a::/".into()),
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
