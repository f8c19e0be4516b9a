//! Recognizes collective kernels by their names. Each of them waits on its GPU for the same kernel on all other GPUs of
//! its communicator. A delayed one would block all others while they occupy their GPUs, so these kernels pay and never
//! wait.

/// The prefixes of the names of NCCL's collective kernels: up to 2.19, from then on (`src/device/common.h`),
/// and those on symmetric memory of 2.27 and from 2.28 on (`src/device/symmetric/generate.py`).
const NCCL: [&[u8]; 4] = [
    b"ncclKernel",
    b"ncclDevKernel",
    b"ncclSymDevKernel",
    b"ncclSymkDevKernel",
];

/// What the names of other projects' collective kernels contain, in lower case. They are templates in namespaces, and so
/// are mangled. A single GPU's reduction has other names.
const OTHERS: [&[u8]; 7] = [
    // vLLM and SGLang, `custom_all_reduce.cuh`.
    b"cross_device_reduce_",
    // PyTorch's symmetric memory, `CUDASymmetricMemoryOps.cu`: one shot, two shots, and with multicast.
    b"shot_all_reduce_kernel",
    b"multimem_",
    // TensorRT-LLM, `customAllReduceKernels.cu`, and FlashInfer, which has its kernels, too.
    b"shotallreduce",
    b"allreduce_fusion_kernel",
    b"nvshmem",
    // DeepEP's dispatch and combine.
    b"deep_ep",
];

/// Whether a kernel's name, as it is or as C++ mangles it, is one of a collective kernel.
#[must_use]
pub fn is_collective(name: &[u8]) -> bool {
    let plain = name.strip_prefix(b"_Z").map_or(name, |rest| {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        rest.get(digits..).unwrap_or(rest)
    });
    NCCL.iter().any(|prefix| plain.starts_with(prefix))
        || OTHERS.iter().any(|part| contains(name, part))
}

fn contains(name: &[u8], part: &[u8]) -> bool {
    name.windows(part.len())
        .any(|window| window.eq_ignore_ascii_case(part))
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
    fn other_projects_collective_kernels_are_known() {
        for name in [
            "_ZN4vllm26cross_device_reduce_1stageI6__halfLi8EEEvPNS_8RankDataENS_11RankSignalsEPNS_6SignalEPT_ii",
            "_ZN6sglang26cross_device_reduce_2stageI13__nv_bfloat16Li4EEEvPNS_8RankDataE",
            "_ZN55_GLOBAL__N__c9b1e6d6_26_CUDASymmetricMemoryOps_cu_a2d8a23334two_shot_all_reduce_kernel_inplaceIN3c108BFloat16ELi16ELi2EEEvPPT_mmPPjmm",
            "_ZN12_GLOBAL__N_126one_shot_all_reduce_kernelIfLi16ELi8EEEvPPT_",
            "_ZN12_GLOBAL__N_126multimem_all_reduce_kernelIN3c108BFloat16ELi16EEEvPT_mPPjmm",
            "_ZN12tensorrt_llm7kernels22twoShotAllReduceKernelI6__halfLi8EEEvNS0_15AllReduceParamsE",
            "_ZN10flashinfer22trtllm_mnnvl_allreduce22twoshotAllreduceKernelILh4E13__nv_bfloat16Lb1EEEv",
            "_ZN10flashinfer23trtllm_allreduce_fusion39allreduce_fusion_kernel_oneshot_lamportILNS0_22AllReduceFusionPatternE1E",
            "_Z30nvshmemi_barrier_all_on_streamv",
            "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8ELi768EEEvPT_",
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
            "triton_poi_fused_add_all_reduce_4",
            "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIf",
            // A single GPU's reduction, which does not wait for other GPUs.
            "_ZN43_GLOBAL__N__13oneRankReduceI7FuncSumIfEEEvPvS2_mmb",
        ] {
            assert!(!is_collective(name.as_bytes()), "{name}");
        }
    }
}
