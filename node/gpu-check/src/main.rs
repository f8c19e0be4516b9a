//! Checks that a GPU works: makes a context, allocates memory, lets a kernel write to it, and compares what it wrote.
//!
//! usage: `tranche-gpu-check LIBCUDA`, with the GPU's UUID in `CUDA_VISIBLE_DEVICES`, so that other GPUs do not matter.
//! The exit code is 0 if the GPU works. Otherwise stderr has one line with the reason.
//!
//! It is a program of its own, because a call of a broken GPU's driver may crash or never return. The kernel is PTX, which
//! the driver compiles for whatever GPU it is.
#![allow(unsafe_code)]

mod cuda;

use std::process::ExitCode;

use cuda::{Cuda, Problem};

/// Bytes that the kernel writes.
const BYTES: usize = 16 << 20;
/// Threads of a block.
const BLOCK: u32 = 256;
/// What is written is different from what an earlier check left.
const SEED: u32 = 0x5eed_c0de;

/// Thread `i` writes `i * 2654435761 ^ seed`. The simulator knows the kernel by `sim_hash` in its name.
const KERNEL: &str = "\
.version 5.0
.target sm_50
.address_size 64
.visible .entry tranche_sim_hash(.param .u64 to, .param .u32 seed) {
.reg .u32 %block, %size, %thread, %index, %hash, %seed;
.reg .u64 %to, %offset;
ld.param.u64 %to, [to];
ld.param.u32 %seed, [seed];
cvta.to.global.u64 %to, %to;
mov.u32 %block, %ctaid.x;
mov.u32 %size, %ntid.x;
mov.u32 %thread, %tid.x;
mad.lo.u32 %index, %block, %size, %thread;
mul.lo.u32 %hash, %index, 2654435761;
xor.b32 %hash, %hash, %seed;
mul.wide.u32 %offset, %index, 4;
add.u64 %to, %to, %offset;
st.global.u32 [%to], %hash;
ret;
}
";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(library), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: tranche-gpu-check LIBCUDA");
        return ExitCode::from(2);
    };
    // It shares its memory limit with the node plugin, which must not be the one that is ended. Without /proc it is checked all
    // the same.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    match check(&library) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn check(library: &str) -> Result<(), Problem> {
    let cuda = Cuda::load(library)?;
    let context = cuda.context()?;
    let memory = context.allocate(BYTES)?;
    context.fill_zero(&memory)?;
    let words = u32::try_from(BYTES / 4).unwrap_or(0);
    context.launch(
        KERNEL,
        "tranche_sim_hash",
        [words / BLOCK, BLOCK],
        &memory,
        SEED,
    )?;
    let found = context.read(&memory)?;
    let wrong = (0_u32..)
        .zip(&found)
        .find(|(index, word)| **word != index.wrapping_mul(2_654_435_761) ^ SEED);
    match wrong {
        None => Ok(()),
        Some((index, word)) => Err(Problem::Wrong { index, word: *word }),
    }
}
