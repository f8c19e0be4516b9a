"""nvidia-ml-py on the simulated libnvidia-ml."""

import subprocess

import pynvml
import pytest


def test_nvml_agrees_with_nvidia_smi(gpu):
    fields = "name,uuid,serial,memory.total,memory.used,driver_version,pcie.link.gen.max,power.limit"
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    values = subprocess.check_output(command, text=True).strip().split(", ")
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    assert values == [
        pynvml.nvmlDeviceGetName(gpu),
        pynvml.nvmlDeviceGetUUID(gpu),
        pynvml.nvmlDeviceGetSerial(gpu),
        str(memory.total >> 20),
        str(memory.used >> 20),
        pynvml.nvmlSystemGetDriverVersion(),
        str(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
        f"{pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000:.2f}",
    ]


def test_both_memory_counts_add_up(gpu):
    first = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    second = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
    assert first.total == second.total == second.reserved + second.used + second.free
    assert first.used == second.used + second.reserved


def test_errors_are_nvmls(gpu):
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(99)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetFanSpeed(gpu)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")


def test_settings_are_for_everybody_to_see(gpu):
    for mode in (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, pynvml.NVML_COMPUTEMODE_DEFAULT):
        pynvml.nvmlDeviceSetComputeMode(gpu, mode)
        assert pynvml.nvmlDeviceGetComputeMode(gpu) == mode
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert pynvml.nvmlDeviceGetCpuAffinity(gpu, 4)[0] & 1
