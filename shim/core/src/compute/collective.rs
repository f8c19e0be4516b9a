//! Recognizes NCCL's collective kernels. Each of them waits on its GPU for the same kernel on all other
//! GPUs of its communicator. A delayed one would block all others while they occupy their GPUs, so these
//! kernels pay and never wait.

/// The prefixes of the names of NCCL's collective kernels: up to 2.19, from then on (`src/device/common.h`),
/// and those on symmetric memory of 2.27 and from 2.28 on (`src/device/symmetric/generate.py`).
const COLLECTIVE: [&[u8]; 4] = [
    b"ncclKernel",
    b"ncclDevKernel",
    b"ncclSymDevKernel",
    b"ncclSymkDevKernel",
];

/// Whether a kernel's name, as it is or as C++ mangles it, is one of NCCL's collective kernels.
#[must_use]
pub fn is_collective(name: &[u8]) -> bool {
    let plain = name.strip_prefix(b"_Z").map_or(name, |rest| {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        rest.get(digits..).unwrap_or(rest)
    });
    COLLECTIVE.iter().any(|prefix| plain.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::is_collective;

    #[test]
    fn nccls_collective_kernels_are_known_by_their_names() {
        for name in [
            // 2.18
            "_Z39ncclKernel_AllReduce_RING_LL_Sum_int8_tP11ncclDevCommmP8ncclWork",
            // 2.19 to 2.30
            "_Z38ncclDevKernel_AllReduce_Sum_f32_RING_LLP11ncclDevCommmP8ncclWork",
            "_Z32ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
            "_Z21ncclDevKernel_Generic24ncclDevKernelArgsStorageILm4096EE",
            "ncclDevKernel_SendRecv",
            // 2.27
            "_Z42ncclSymDevKernel_AllReduce_AGxLL_R_sum_f3214ncclSymDevArgs",
            "_Z29ncclSymDevKernel_AllGather_LL14ncclSymDevArgs",
            // 2.28 to 2.30
            "_Z30ncclSymkDevKernel_AllGather_LL22ncclSymkDevWorkArgs4K",
            "_Z32ncclSymkDevKernel_AllGather_STMC22ncclSymkDevWorkArgs4K",
            "_Z43ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f3222ncclSymkDevWorkArgs4K",
            "_Z52ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf1622ncclSymkDevWorkArgs4K",
            "_Z42ncclSymkDevKernel_ReduceScatter_LD_sum_f1622ncclSymkDevWorkArgs4K",
            "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f8e4m3",
            "ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLDMC_avg_bf16",
            "ncclSymkDevKernel_AllGather_RailRing_LsaSTMC",
        ] {
            assert!(is_collective(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn other_kernels_are_not_collective() {
        for name in [
            "",
            "_Z",
            "_Z14",
            "nccl",
            "_Z13my_ncclKernelPf",
            "ampere_sgemm_128x64_nn",
            // A single GPU's reduction, which does not wait for other GPUs.
            "_ZN43_GLOBAL__N__13oneRankReduceI7FuncSumIfEEEvPvS2_mmb",
        ] {
            assert!(!is_collective(name.as_bytes()), "{name}");
        }
    }
}
