"""Fixtures of the tests of unmodified Python clients."""

import os

import pynvml
import pytest


@pytest.fixture(scope="session")
def gpu():
    """NVML's handle of GPU 0, on which the tests use CUDA."""
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@pytest.fixture
def own_memory(gpu):
    """Reads the bytes that this process has on GPU 0 by NVML."""

    def read():
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), 0)

    return read
