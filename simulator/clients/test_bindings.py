"""NVIDIA's cuda-bindings, versions 12 and 13, on the simulated libcuda."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy
import pynvml
import pytest
from cuda.bindings import driver

PTX = b""".version 8.0
.target sm_70
.address_size 64
.global .align 4 .b8 table[64];
.visible .entry sim_busy_30ms(.param .u64 p) { ret; }
\0"""


def ok(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture(autouse=True, scope="module")
def context():
    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(device))
    ok(driver.cuCtxSetCurrent(context))
    yield context
    ok(driver.cuCtxSetCurrent(driver.CUcontext(0)))
    ok(driver.cuDevicePrimaryCtxRelease(device))


def test_the_gpus_name_shows_that_it_is_simulated():
    assert ok(driver.cuDeviceGetName(96, ok(driver.cuDeviceGet(0)))).startswith(b"Simulated ")
    assert ok(driver.cuDriverGetVersion()) == 12020


def test_memory_shows_in_nvml(own_memory):
    before = own_memory()
    address = ok(driver.cuMemAlloc(3 << 30))
    assert own_memory() - before == 3 << 30
    ok(driver.cuMemFree(address))
    assert own_memory() == before
    assert driver.cuMemFree(address)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    free, total = ok(driver.cuMemGetInfo())
    assert driver.cuMemAlloc(free + 1)[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert total > free


def test_copies_move_bytes():
    data = numpy.random.default_rng(7).integers(0, 255, 5_000_000, dtype=numpy.uint8)
    back = numpy.zeros_like(data)
    first, second = (ok(driver.cuMemAlloc(data.nbytes)) for _ in range(2))
    stream = ok(driver.cuStreamCreate(0))
    ok(driver.cuMemcpyHtoDAsync(first, data.ctypes.data, data.nbytes, stream))
    ok(driver.cuMemcpyDtoDAsync(second, first, data.nbytes, stream))
    ok(driver.cuMemsetD8Async(second, 9, 1000, stream))
    ok(driver.cuMemcpyDtoHAsync(back.ctypes.data, second, data.nbytes, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert (back[:1000] == 9).all() and (back[1000:] == data[1000:]).all()
    outside = driver.cuMemcpyHtoD(int(first) + data.nbytes - 8, data.ctypes.data, 16)
    assert outside[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    for address in (first, second):
        ok(driver.cuMemFree(address))


def test_pools_count_the_bytes_of_allocations():
    stream = ok(driver.cuStreamCreate(0))
    pool = ok(driver.cuDeviceGetDefaultMemPool(ok(driver.cuDeviceGet(0))))
    used = lambda: int(ok(driver.cuMemPoolGetAttribute(pool, driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)))
    address = ok(driver.cuMemAllocAsync(64 << 20, stream))
    assert used() == 64 << 20
    ok(driver.cuMemFreeAsync(address, stream))
    assert used() == 0


def new_pool():
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return ok(driver.cuMemPoolCreate(properties))


def test_a_destroyed_pool_frees_its_addresses():
    with open("/proc/self/statm") as statm:
        pages = lambda: (statm.seek(0), int(statm.read().split()[0]))[1]
        before = pages()
        for destroyed_first in (True, False) * 20:
            pool = new_pool()
            block = ok(driver.cuMemAllocFromPoolAsync(3 << 20, pool, driver.CUstream(0)))
            ok(driver.cuMemcpyHtoD(block, b"written", 7))
            ends = [lambda: ok(driver.cuMemFree(block)), lambda: ok(driver.cuMemPoolDestroy(pool))]
            for end in reversed(ends) if destroyed_first else ends:
                end()
            assert driver.cuMemPoolDestroy(pool)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
        # The address space of one pool is four times the GPU's memory.
        assert pages() - before < 80 << 30 >> 12


def test_a_pool_keeps_memory_up_to_its_threshold(own_memory):
    attributes = driver.CUmemPool_attribute
    pool = new_pool()
    read = lambda which: int(ok(driver.cuMemPoolGetAttribute(pool, which)))
    ok(driver.cuMemPoolSetAttribute(pool, attributes.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, driver.cuuint64_t(100 << 20)))
    stream = ok(driver.cuStreamCreate(0))
    before = own_memory()
    blocks = [ok(driver.cuMemAllocFromPoolAsync(64 << 20, pool, stream)) for _ in range(3)]
    assert own_memory() - before == 192 << 20
    ok(driver.cuMemFreeAsync(blocks.pop(), stream))
    ok(driver.cuMemFree(blocks.pop()))  # both functions may free it
    assert own_memory() - before == 100 << 20
    assert read(attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 100 << 20
    assert read(attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 64 << 20
    assert read(attributes.CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 192 << 20
    # An allocation that needs the kept memory gets it, to the last block.
    free, _ = ok(driver.cuMemGetInfo())
    blocks_free, kept = free // (2 << 20) * (2 << 20), 36 << 20
    everything = ok(driver.cuMemAlloc(blocks_free + kept))
    ok(driver.cuMemFree(everything))
    assert driver.cuMemAlloc(blocks_free + kept + 1)[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert own_memory() - before == 64 << 20
    ok(driver.cuMemPoolDestroy(pool))
    ok(driver.cuMemFree(blocks.pop()))
    assert own_memory() == before


def test_mapped_memory_is_charged_until_its_last_mapping_ends(own_memory):
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    granularity = ok(driver.cuMemGetAllocationGranularity(properties, driver.CUmemAllocationGranularity_flags(0)))
    size = 8 * granularity
    before = own_memory()
    handle = ok(driver.cuMemCreate(size, properties, 0))
    assert own_memory() - before == size
    address = ok(driver.cuMemAddressReserve(2 * size, 0, 0, 0))
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for offset in (0, size):  # one allocation at two addresses
        ok(driver.cuMemMap(int(address) + offset, size, 0, handle, 0))
        ok(driver.cuMemSetAccess(int(address) + offset, size, [access], 1))
    ok(driver.cuMemsetD8(int(address), 5, size))
    value = ctypes.c_uint8()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(value), int(address) + size + 77, 1))
    assert value.value == 5
    ok(driver.cuMemRelease(handle))
    assert own_memory() - before == size
    ok(driver.cuMemUnmap(address, 2 * size))
    assert own_memory() == before
    ok(driver.cuMemAddressFree(address, 2 * size))


def test_kernels_take_the_time_in_their_name():
    module = ok(driver.cuModuleLoadData(PTX))
    kernel = ok(driver.cuModuleGetFunction(module, b"sim_busy_30ms"))
    missing = driver.cuModuleGetFunction(module, b"other")
    assert missing[0] == driver.CUresult.CUDA_ERROR_NOT_FOUND
    assert ok(driver.cuModuleGetGlobal(module, b"table"))[1] == 64
    stream = ok(driver.cuStreamCreate(1))
    start, end = (ok(driver.cuEventCreate(0)) for _ in range(2))
    ok(driver.cuEventRecord(start, stream))
    for _ in range(3):
        ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
    ok(driver.cuEventRecord(end, stream))
    assert driver.cuEventQuery(end)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
    ok(driver.cuEventSynchronize(end))
    assert 89 < ok(driver.cuEventElapsedTime(start, end)) < 200
    bad = driver.cuLaunchKernel(kernel, 1, 1, 1, 2048, 1, 1, 0, stream, 0, 0)
    assert bad[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert driver.cuModuleLoadData(b"not an image\0")[0] == driver.CUresult.CUDA_ERROR_INVALID_IMAGE


def test_a_captured_graph_runs_the_captured_work():
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b"sim_busy_30ms"))
    stream, other = (ok(driver.cuStreamCreate(1)) for _ in range(2))
    fork, join = (ok(driver.cuEventCreate(2)) for _ in range(2))
    address = ok(driver.cuMemAlloc(4096))
    ok(driver.cuMemsetD8(address, 1, 4096))
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(0)))
    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
    ok(driver.cuEventRecord(fork, stream))
    ok(driver.cuStreamWaitEvent(other, fork, 0))
    ok(driver.cuMemsetD8Async(address, 2, 4096, other))
    ok(driver.cuEventRecord(join, other))
    ok(driver.cuStreamWaitEvent(stream, join, 0))
    graph = ok(driver.cuStreamEndCapture(stream))
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    assert [ok(driver.cuStreamIsCapturing(each)) for each in (stream, other)] == [none, none]
    value = ctypes.c_uint8()
    read = lambda: ok(driver.cuMemcpyDtoH(ctypes.addressof(value), address, 1)) and None or value.value
    assert read() == 1, "captured work runs only when the graph is launched"
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    start, end = (ok(driver.cuEventCreate(0)) for _ in range(2))
    ok(driver.cuEventRecord(start, stream))
    for _ in range(2):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuEventRecord(end, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read() == 2
    assert ok(driver.cuEventElapsedTime(start, end)) > 59


def test_a_graphs_memory_is_freed_with_the_last_graph(own_memory):
    before = own_memory()
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(0)))
    address = ok(driver.cuMemAllocAsync(64 << 20, stream))
    ok(driver.cuMemsetD8Async(address, 3, 64 << 20, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    graph = ok(driver.cuStreamEndCapture(stream))
    parameters = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    parameters.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    parameters.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    parameters.bytesize = 32 << 20
    ok(driver.cuGraphAddMemAllocNode(graph, None, 0, parameters))
    assert int(parameters.dptr) != 0
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert own_memory() - before == 96 << 20
    ok(driver.cuGraphExecDestroy(executable))
    assert own_memory() == before


def test_arrays_and_mipmaps_are_charged(own_memory):
    before = own_memory()
    shape = driver.CUDA_ARRAY3D_DESCRIPTOR()
    shape.Width, shape.Height, shape.NumChannels = 4096, 4096, 4
    shape.Format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    mipmap = ok(driver.cuMipmappedArrayCreate(shape, 3))
    assert own_memory() - before == (256 + 64 + 16) << 20
    level = ok(driver.cuMipmappedArrayGetLevel(mipmap, 1))
    assert ok(driver.cuArray3DGetDescriptor(level)).Width == 2048
    ok(driver.cuMipmappedArrayDestroy(mipmap))
    assert own_memory() == before


def test_a_gpu_in_exclusive_mode_has_contexts_of_one_process(gpu):
    pynvml.nvmlDeviceSetComputeMode(gpu, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    try:
        second = """
from cuda.bindings import driver
driver.cuInit(0)
print(driver.cuDevicePrimaryCtxRetain(0)[0].name)
"""
        result = subprocess.check_output([sys.executable, "-c", second], text=True).strip()
        assert result == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    finally:
        pynvml.nvmlDeviceSetComputeMode(gpu, pynvml.NVML_COMPUTEMODE_DEFAULT)


def test_host_functions_run_in_the_streams_order():
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b"sim_busy_30ms"))
    stream = ok(driver.cuStreamCreate(1))
    source, target = (ctypes.c_uint32 * 1)(1), (ctypes.c_uint32 * 1)(0)
    address = ok(driver.cuMemAlloc(4))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def change(_):
        source[0] = 42

    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
    ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(ctypes.cast(change, ctypes.c_void_p).value), 0))
    ok(driver.cuMemcpyHtoDAsync(address, ctypes.addressof(source), 4, stream))
    ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(target), address, 4, stream))
    assert target[0] == 0 and source[0] == 1, "the kernel still runs"
    ok(driver.cuStreamSynchronize(stream))
    assert target[0] == 42


def test_pointers_have_attributes(context):
    address = ok(driver.cuMemAlloc(10_000))
    attribute = driver.CUpointer_attribute
    kind = ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, int(address) + 5))
    assert int(kind) == 2
    base, size = ok(driver.cuMemGetAddressRange(int(address) + 5))
    assert (int(base), size) == (int(address), 10_000)
    ok(driver.cuMemFree(address))


def test_cuda_after_fork_is_refused():
    child = os.fork()
    if child == 0:
        code = driver.cuMemGetInfo()[0]
        os._exit(0 if code == driver.CUresult.CUDA_ERROR_NOT_INITIALIZED else 1)
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(status) == 0


KEEPER = """
import os, sys
from cuda.bindings import driver
driver.cuInit(0)
_, context = driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])
driver.cuCtxSetCurrent(context)
driver.cuMemAlloc(3 << 30)
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
else:
    os.kill(os.getpid(), 9)
"""


def test_the_child_of_a_dead_process_keeps_its_memory(gpu):
    # A driver frees a process's memory when the last of its files is closed, and a child has them open too.
    used = lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used
    before, processes = used(), len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    parent = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"child\n"
    assert parent.wait() == -signal.SIGKILL
    # A charge above the peak has the daemon free the memory of ended processes first.
    free, _ = ok(driver.cuMemGetInfo())
    assert driver.cuMemAlloc(free + 1)[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert used() - before >= 3 << 30
    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)) == processes
    parent.stdin.close()
    deadline = time.monotonic() + 5
    while used() != before:
        assert time.monotonic() < deadline, "the child has ended and the memory is not free"
