//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use tranche_api::Quantity;
use tranche_api::share_config::ComputeMode;

use crate::shares::TAKEN;

/// A part of a GPU for a command, on this machine
#[derive(Debug, Parser)]
#[command(name = "tranche", version)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs a command in a capped share of a GPU
    Run(Run),
    #[command(hide = true)]
    Supervise(Supervise),
    /// Prints the root of the installed driver and the folder of its libraries, one a line
    #[command(hide = true)]
    Driver {
        /// The root [default: the usual ones]
        #[arg(long, value_name = "DIR")]
        driver_root: Option<PathBuf>,
    },
    /// Reclaims what dead processes hold in an account page
    #[command(hide = true)]
    Reclaim { account: PathBuf },
}

/// The options of `tranche run`.
#[derive(Clone, Debug, clap::Args)]
pub struct Run {
    /// GPU memory of all processes of the share together, such as 20Gi
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub memory: Option<u64>,
    /// Percent of the GPU's time, 1 to 100 [default: 100]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub cores: Option<u8>,
    /// Whether idle GPU time may be used beyond the cores [default: strict]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// The GPU, by UUID or by its index in nvidia-smi; required if there are several
    #[arg(long, value_name = "UUID|INDEX")]
    pub gpu: Option<String>,
    /// Joins the share of this name, or creates it: all its commands share its memory and cores
    #[arg(long, value_name = "NAME", value_parser = share_name)]
    pub share: Option<String>,
    /// Memory of one CUDA context, for which the share has room beside its memory [default: as
    /// measured on this machine; 512Mi before the first measurement]
    #[arg(long, value_name = "SIZE", value_parser = bytes_or_none)]
    pub context_memory: Option<u64>,
    /// Root of the NVIDIA driver's files, for a driver that is not installed on the host itself
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub driver_root: PathBuf,
    /// Folder of Tranche's libcuda.so.1 and libnvidia-ml.so.1 [default: searched beside this
    /// program]
    #[arg(long, value_name = "DIR")]
    pub shim: Option<PathBuf>,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}

/// How the limit on cores is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Never more than the cores, even on an idle GPU
    Strict,
    /// More than the cores while the GPU is idle
    WorkConserving,
}

impl From<Mode> for ComputeMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Strict => Self::Strict,
            Mode::WorkConserving => Self::WorkConserving,
        }
    }
}

/// The supervisor's options; the request comes from its stdin.
#[derive(Debug, clap::Args)]
pub struct Supervise {
    /// The share's name, for lists of processes.
    pub share: String,
    /// Whether it runs without a parent that waits for it.
    #[arg(long)]
    pub detached: bool,
}

/// Bytes, as a Kubernetes quantity.
fn bytes_or_none(text: &str) -> Result<u64, String> {
    let way_out = "give it in bytes or as 20Gi, 512Mi";
    let amount: Quantity = text.parse().map_err(|e| format!("{e}; {way_out}"))?;
    amount.to_count().map_err(|e| format!("{e}; {way_out}"))
}

fn bytes(text: &str) -> Result<u64, String> {
    match bytes_or_none(text)? {
        0 => Err("a share needs memory: give at least 1Mi".to_owned()),
        bytes => Ok(bytes),
    }
}

/// A name that is valid as a folder, as a claim's UID and as a part of a CDI device's name.
fn share_name(name: &str) -> Result<String, String> {
    if TAKEN.contains(&name) {
        return Err("this name is reserved: give another".to_owned());
    }
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let framed = !name.starts_with('-') && !name.ends_with('-');
    if (1..=48).contains(&name.len()) && framed && name.bytes().all(inner) {
        return Ok(name.to_owned());
    }
    Err("a share's name is 1 to 48 letters, digits and inner dashes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(args: &[&str]) -> String {
        let args = ["tranche", "run"].iter().chain(args).chain(&["true"]);
        Args::try_parse_from(args).unwrap_err().to_string()
    }

    #[test]
    fn the_command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn the_commands_own_options_are_left_to_it() {
        for separator in [&["--"][..], &[]] {
            let line = ["tranche", "run", "--memory", "1Gi"]
                .iter()
                .chain(separator);
            let args = Args::try_parse_from(line.chain(&["ls", "--memory", "-l", "--"])).unwrap();
            let Command::Run(run) = args.command else {
                panic!("{args:?}")
            };
            assert_eq!(run.memory, Some(1 << 30));
            assert_eq!(run.command, ["ls", "--memory", "-l", "--"]);
        }
    }

    #[test]
    fn errors_name_the_option_the_value_and_the_valid_values() {
        for (args, words) in [
            (["--memory", "20G1"], ["--memory", "20G1", "20Gi"]),
            (["--memory", "0"], ["--memory", "0", "1Mi"]),
            (["--memory", "0.5"], ["--memory", "0.5", "bytes"]),
            (["--cores", "101"], ["--cores", "101", "1..=100"]),
            (["--cores", "0"], ["--cores", "0", "1..=100"]),
            (["--share", "../x"], ["--share", "../x", "inner dashes"]),
            (["--share", "lock"], ["--share", "lock", "give another"]),
            (
                ["--share", "sampler"],
                ["--share", "sampler", "give another"],
            ),
            (["--mode", "lazy"], ["--mode", "lazy", "work-conserving"]),
        ] {
            let error = refused(&args);
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
