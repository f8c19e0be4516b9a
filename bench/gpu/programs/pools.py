"""Stream-ordered memory close to the cap: pools.py. Waits after each step, so that another process can read NVML.

Prints a line of JSON per step: its name, the call's result code, and the expected one.
"""

import ctypes
import sys

from driver_api import FOREVER, MIB, OUT_OF_MEMORY, POOL_RELEASE_THRESHOLD, Cuda, answer

# Bytes that the last step allocates and frees in turns.
SIZES = [1 * MIB, 24 * MIB, 3 * MIB, 100 * MIB]


class Pool:
    """The device's default pool, on a stream."""

    def __init__(self):
        self.cuda = Cuda()
        self.stream = self.cuda.stream()
        self.free, _ = self.cuda.memory()

    def step(self, name, code, expected=0):
        answer({"stage": name, "code": code, "expected": expected, "free": None})
        sys.stdin.readline()

    def percent(self, percent):
        return self.free * percent // 100 // (2 * MIB) * (2 * MIB)

    def allocate(self, size):
        pointer = ctypes.c_uint64()
        code = self.cuda.call("cuMemAllocAsync", ctypes.byref(pointer), ctypes.c_size_t(size), self.stream)
        return code, pointer

    def free_async(self, pointer):
        self.cuda.must("cuMemFreeAsync", pointer, self.stream)

    def wait(self):
        self.cuda.must("cuStreamSynchronize", self.stream)

    def keep_everything(self):
        pool, threshold = ctypes.c_void_p(), ctypes.c_uint64(FOREVER)
        self.cuda.must("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
        self.cuda.must("cuMemPoolSetAttribute", pool, POOL_RELEASE_THRESHOLD, ctypes.byref(threshold))


def freed_in_the_streams_order(pool):
    """Memory that is freed in the stream's order can be allocated again without a wait."""
    for percent, after in ((60, ""), (60, " again, the first freed and not waited for"), (90, ", the second likewise")):
        code, pointer = pool.allocate(pool.percent(percent))
        pool.step(f"{percent} percent{after}", code)
        if code == 0:
            pool.free_async(pointer)
    pool.wait()


def kept_by_the_pool(pool):
    """A pool that keeps its memory returns it when another allocation needs it."""
    pool.keep_everything()
    code, kept = pool.allocate(pool.percent(70))
    pool.step("70 percent in a pool that keeps it", code)
    if code == 0:
        pool.free_async(kept)
        pool.wait()
    code, plain = pool.cuda.alloc(pool.percent(60))
    pool.step("60 percent by cuMemAlloc, while the pool keeps 70 percent without use", code)
    if code == 0:
        pool.cuda.free(plain)


def all_sizes(pool):
    """Many allocations of all sizes. Half of them are freed whenever one is refused."""
    pieces, code = [], 0
    for turn in range(400):
        code, pointer = pool.allocate(SIZES[turn % len(SIZES)])
        if code == 0:
            pieces.append(pointer)
        elif code == OUT_OF_MEMORY:
            for one in pieces[::2]:
                pool.free_async(one)
            pieces, code = pieces[1::2], 0
        else:
            break
    pool.step("many of all sizes", code)
    for one in pieces:
        pool.free_async(one)
    pool.wait()


def main():
    pool = Pool()
    pool.step("nothing yet", 0)
    freed_in_the_streams_order(pool)
    kept_by_the_pool(pool)
    all_sizes(pool)
    code, _ = pool.allocate(pool.free + 2 * MIB)
    pool.step("more than the cap", code, OUT_OF_MEMORY)


main()
