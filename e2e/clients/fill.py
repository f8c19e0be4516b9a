"""Fills a share by one family of calls after another, as unmodified clients of CUDA do.

usage: fill.py GENERATION LIMIT [FAMILY]

Each family of the generation's clients, in a process of its own, takes memory in ever smaller pieces until the smallest
is refused, and gives everything back. It must get all of LIMIT bytes but what is less than two of the smallest pieces,
and be refused for want of memory. Says in one line of JSON how each fared, and ends at the first that fared otherwise.
"""

import json
import subprocess
import sys

import pynvml
from cuda.bindings import driver
from cuda.bindings.driver import CUresult

LARGEST, SMALLEST = 4 << 30, 2 << 20


def ok(result):
    if result[0] != CUresult.CUDA_SUCCESS:
        raise Refused(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


class Refused(Exception):
    """The driver's answer to a call."""


def alloc():
    return lambda size: ok(driver.cuMemAlloc(size)), lambda address: ok(driver.cuMemFree(address))


def managed():
    attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    return lambda size: ok(driver.cuMemAllocManaged(size, attach)), lambda address: ok(driver.cuMemFree(address))


def pitch():
    # Rows of a mebibyte need no padding.
    return (
        lambda size: ok(driver.cuMemAllocPitch(1 << 20, size >> 20, 16))[0],
        lambda address: ok(driver.cuMemFree(address)),
    )


def stream_ordered():
    stream = ok(driver.cuStreamCreate(0))

    def give(address):
        ok(driver.cuMemFreeAsync(address, stream))
        ok(driver.cuStreamSynchronize(stream))

    return lambda size: ok(driver.cuMemAllocAsync(size, stream)), give


def here(properties):
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    return properties


def pool():
    properties = here(driver.CUmemPoolProps())
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    own, stream = ok(driver.cuMemPoolCreate(properties)), ok(driver.cuStreamCreate(0))

    def give(address):
        ok(driver.cuMemFreeAsync(address, stream))
        ok(driver.cuStreamSynchronize(stream))

    return lambda size: ok(driver.cuMemAllocFromPoolAsync(size, own, stream)), give


def vmm():
    """Works as expandable segments do: the handle is released while it is mapped."""
    properties = here(driver.CUmemAllocationProp())
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED

    def take(size):
        handle = ok(driver.cuMemCreate(size, properties, 0))
        address = ok(driver.cuMemAddressReserve(size, 0, 0, 0))
        ok(driver.cuMemMap(address, size, 0, handle, 0))
        ok(driver.cuMemRelease(handle))
        return address, size

    def give(mapping):
        ok(driver.cuMemUnmap(*mapping))
        ok(driver.cuMemAddressFree(*mapping))

    return take, give


def array():
    def take(size):
        shape = driver.CUDA_ARRAY3D_DESCRIPTOR()
        shape.Width, shape.Height, shape.Depth = 1024, 1024, size >> 20
        shape.Format, shape.NumChannels = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8, 1
        return ok(driver.cuArray3DCreate(shape))

    return take, lambda made: ok(driver.cuArrayDestroy(made))


def graph():
    """A graph that allocates: launched once, it holds its memory until its allocation is freed."""
    device, stream = ok(driver.cuDeviceGet(0)), ok(driver.cuStreamCreate(0))

    def take(size):
        parameters = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
        here(parameters.poolProps)
        parameters.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        parameters.bytesize = size
        whole = ok(driver.cuGraphCreate(0))
        ok(driver.cuGraphAddMemAllocNode(whole, None, 0, parameters))
        try:
            runs = ok(driver.cuGraphInstantiate(whole, 0))
            ok(driver.cuGraphLaunch(runs, stream))
            ok(driver.cuStreamSynchronize(stream))
        except Refused:
            ok(driver.cuGraphDestroy(whole))
            raise
        return whole, runs, int(parameters.dptr)

    def give(made):
        whole, runs, address = made
        ok(driver.cuMemFreeAsync(address, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuGraphExecDestroy(runs))
        ok(driver.cuGraphDestroy(whole))
        ok(driver.cuDeviceGraphMemTrim(device))

    return take, give


def numba():
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    def take(size):
        try:
            return [cuda.device_array(size, dtype="uint8")]
        except CudaAPIError as error:
            raise Refused(CUresult(error.code).name) from error

    return take, list.clear


def core():
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()

    def take(size):
        try:
            return device.memory_resource.allocate(size, stream=stream)
        except Exception as error:  # its own class differs between releases
            raise Refused(str(error).split(":")[0]) from error

    def give(buffer):
        buffer.close(stream)
        stream.sync()

    return take, give


def fill(take, give):
    held, pieces, piece, refusal = 0, [], LARGEST, None
    while piece >= SMALLEST:
        try:
            pieces.append(take(piece))
            held += piece
        except Refused as error:
            refusal = str(error)
            piece //= 2
    for made in pieces:
        give(made)
    return held, refusal


OF_THE_DRIVER = [alloc, managed, pitch, stream_ordered, pool, vmm, array, graph]
FAMILIES = {"cuda12": [*OF_THE_DRIVER, numba], "cuda13": [*OF_THE_DRIVER, core]}
# numba frees memory later, and cuda-core's pool keeps all memory.
KEEPING = {numba, core}


def fare(family, limit):
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
    ok(driver.cuCtxSetCurrent(context))
    pynvml.nvmlInit()
    nvml = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    held, refusal = fill(*family())
    free, total = ok(driver.cuMemGetInfo())
    answer = {"family": family.__name__, "held": held, "refusal": refusal, "total": total, "nvml": nvml, "free": free}
    print(json.dumps(answer), flush=True)
    nearly = range(limit - 2 * SMALLEST + 1, limit + 1)
    return (
        total == nvml == limit
        and held in nearly
        and "OUT_OF_MEMORY" in str(refusal)
        and (free in nearly or family in KEEPING and free <= limit)
    )


def main(generation, limit, name=None):
    if name:
        [family] = [family for family in FAMILIES[generation] if family.__name__ == name]
        sys.exit(0 if fare(family, int(limit)) else f"{name}: not as with a share of {limit} bytes")
    for family in FAMILIES[generation]:
        subprocess.run([sys.executable, "-B", __file__, generation, limit, family.__name__], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
