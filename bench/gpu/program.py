"""A small CUDA program over the driver API, run bare and in a share by bench/gpu/run: prints JSON.

usage: program.py overhead | isolation | busy SECONDS | hold BYTES | read POINTER | gates
"""

import ctypes
import json
import statistics
import sys
import threading
import time

MIB = 1 << 20
# Spins for a millisecond by the GPU's own clock; the simulator takes the time from the name.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry sim_busy_1ms() {
    .reg .u64 %rd<4>; .reg .pred %p<2>;
    mov.u64 %rd1, %globaltimer;
spin:
    mov.u64 %rd2, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1;
    setp.lt.u64 %p1, %rd3, 1000000;
    @%p1 bra spin;
    ret;
}
.visible .entry sim_busy_0us() { ret; }
"""
OUT_OF_MEMORY = 2


class Cuda:
    """The driver, with a context on the first device."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.must("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        return getattr(self.lib, name)(*arguments)

    def must(self, name, *arguments):
        code = self.call(name, *arguments)
        if code:
            raise SystemExit(f"{name}: CUDA error {code}")

    def alloc(self, size):
        pointer = ctypes.c_uint64()
        code = self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return code, pointer

    def free(self, pointer):
        self.must("cuMemFree_v2", pointer)

    def memory(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def kernel(self, name):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.must("cuModuleLoadData", ctypes.byref(module), PTX + b"\0")
        self.must("cuModuleGetFunction", ctypes.byref(function), module, name)
        return function

    def launch(self, function):
        self.must("cuLaunchKernel", function, *[1] * 6, 0, None, None, None)

    def wait(self):
        self.must("cuCtxSynchronize")


def microseconds(count, act):
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        act()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def p95(times):
    return sorted(times)[int(len(times) * 0.95)]


def overhead():
    """GPU-Virt-Bench's OH metrics: times of calls, medians."""
    cuda = Cuda()
    nothing, busy = cuda.kernel(b"sim_busy_0us"), cuda.kernel(b"sim_busy_1ms")
    median = statistics.median
    found = {}

    def launch_and_wait():
        cuda.launch(nothing)
        cuda.wait()

    launch_and_wait()
    found["OH-001"] = median(microseconds(500, launch_and_wait))
    pointers = []
    found["OH-002"] = median(microseconds(100, lambda: pointers.append(cuda.alloc(MIB)[1])))
    found["OH-003"] = median(microseconds(100, lambda: cuda.free(pointers.pop())))

    def pair():
        cuda.free(cuda.alloc(MIB)[1])

    alone = median(microseconds(200, pair))
    live = [cuda.alloc(MIB)[1] for _ in range(100)]
    found["OH-007"] = (median(microseconds(200, pair)) - alone) * 1000
    for pointer in live:
        cuda.free(pointer)
    current = ctypes.c_void_p()
    found["OH-005"] = median(microseconds(20000, lambda: cuda.call("cuCtxGetCurrent", ctypes.byref(current)))) * 1000
    found["OH-008"] = median(microseconds(200, lambda: cuda.launch(nothing))) * 1000
    cuda.wait()
    contended = []

    def contend():
        cuda.must("cuCtxSetCurrent", cuda.context)
        mine = []
        contended.extend(microseconds(50, lambda: mine.append(cuda.alloc(MIB)[1])))
        for pointer in mine:
            cuda.free(pointer)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["OH-006"] = p95(contended)

    cpu = time.process_time()
    time.sleep(1)
    # Nothing of ours works in a program that does not.
    found["OH-009"] = (time.process_time() - cpu) * 100

    def twenty():
        for _ in range(20):
            cuda.launch(busy)
        cuda.wait()

    found["OH-010"] = median(microseconds(5, twenty)) / 20 / 1000

    def context():
        cuda.must("cuDevicePrimaryCtxReset_v2", 0)
        cuda.must("cuDevicePrimaryCtxRetain", ctypes.byref(cuda.context), 0)
        cuda.must("cuCtxSetCurrent", cuda.context)
        cuda.free(cuda.alloc(MIB)[1])

    found["OH-004"] = median(microseconds(10, context))
    return found


def filled(cuda, size):
    """As many allocations of a size as there are."""
    pointers = []
    while True:
        code, pointer = cuda.alloc(size)
        if code:
            return pointers
        pointers.append(pointer)


def isolation():
    """GPU-Virt-Bench's IS metrics that one program can take."""
    cuda = Cuda()
    found = {}
    _, total = cuda.memory()
    chunks, small = filled(cuda, 64 * MIB), filled(cuda, 2 * MIB)
    taken = len(chunks) * 64 * MIB + len(small) * 2 * MIB
    found["IS-001"] = 100 * taken / total
    found["IS-002"] = statistics.median(microseconds(50, lambda: cuda.alloc(64 * MIB)))
    for pointer in chunks + small:
        cuda.free(pointer)
    busy = cuda.kernel(b"sim_busy_1ms")

    def burst():
        for _ in range(100):
            cuda.launch(busy)
        cuda.wait()

    times = microseconds(10, burst)
    found["IS-004"] = statistics.median(times) / 100
    found["IS-007"] = statistics.stdev(times) / statistics.mean(times)
    code, _ = cuda.alloc(1 << 40)
    again, pointer = cuda.alloc(MIB)
    found["IS-010"] = float(code == OUT_OF_MEMORY and again == 0)
    if again == 0:
        cuda.free(pointer)
    return found


def busy(seconds):
    """Kernels of a millisecond, one after another; how many a second."""
    cuda = Cuda()
    kernel = cuda.kernel(b"sim_busy_1ms")
    for _ in range(50):
        cuda.launch(kernel)
    cuda.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            cuda.launch(kernel)
        cuda.wait()
        count += 10
    return {"rate": count / (time.perf_counter() - start)}


def hold(size):
    """Memory for another process to try its pointer."""
    cuda = Cuda()
    code, pointer = cuda.alloc(size)
    print(json.dumps({"code": code, "pointer": pointer.value}), flush=True)
    sys.stdin.readline()
    return {}


def read(pointer):
    cuda = Cuda()
    buffer = ctypes.create_string_buffer(8)
    return {"code": cuda.call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(pointer), ctypes.c_size_t(8))}


def gates():
    """What makes a run valid at all."""
    cuda = Cuda()
    free, total = cuda.memory()
    code, _ = cuda.alloc(total + 1)
    with open("/proc/self/maps", encoding="utf8") as maps:
        shim = "/usr/lib/tranche/libcuda.so.1" in maps.read()
    return {"total": total, "free": free, "over": code, "shim": shim}


def main():
    what, *arguments = sys.argv[1:]
    act = {
        "overhead": overhead,
        "isolation": isolation,
        "busy": busy,
        "hold": hold,
        "read": read,
        "gates": gates,
    }[what]
    print(json.dumps(act(*[int(argument) for argument in arguments])), flush=True)


if __name__ == "__main__":
    main()
