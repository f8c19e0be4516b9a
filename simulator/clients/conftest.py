"""What the tests of unmodified Python clients share."""

import os

import pynvml
import pytest


@pytest.fixture(scope="session")
def gpu():
    """NVML's handle of GPU 0, which must see what CUDA does."""
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@pytest.fixture
def own_memory(gpu):
    """Bytes that NVML says this process has on GPU 0."""

    def read():
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), 0)

    return read
