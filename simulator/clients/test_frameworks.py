"""Libraries on cuda-bindings: numba-cuda and cuda-core."""

import numpy
import pytest


def test_numba_device_arrays():
    cuda = pytest.importorskip("numba.cuda")
    assert cuda.get_current_device().name.startswith("Simulated ")
    data = numpy.arange(100_000)
    there = cuda.to_device(data)
    copy = cuda.device_array_like(there)
    copy.copy_to_device(there)
    assert (copy.copy_to_host() == data).all()
    free, total = cuda.current_context().get_memory_info()
    assert 0 < free < total
    stream, event = cuda.stream(), cuda.event()
    event.record(stream)
    event.synchronize()


def test_core_device_and_buffers():
    core = pytest.importorskip("cuda.core")
    if not hasattr(core, "Device"):
        pytest.skip("an older cuda.core")
    device = core.Device(0)
    device.set_current()
    assert device.name.startswith("Simulated ")
    stream = device.create_stream()
    buffer = device.memory_resource.allocate(1 << 20, stream=stream)
    assert buffer.size == 1 << 20
    buffer.close(stream)
    stream.sync()
