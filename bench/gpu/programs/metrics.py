"""GPU-Virt-Bench's metrics of one program: metrics.py overhead|isolation STEPS-OF-A-MILLISECOND."""

import ctypes
import statistics
import sys
import threading
import time

from driver_api import MIB, NOTHING, OUT_OF_MEMORY, Cuda, Spin, answer


def microseconds(count, call):
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def p95(times):
    return sorted(times)[int(len(times) * 0.95)]


def overhead(steps):
    """GPU-Virt-Bench's OH metrics: times of calls, medians."""
    cuda = Cuda()
    nothing, busy = cuda.kernel(NOTHING, "sim_busy_0us"), Spin(cuda, 1_000, steps)
    median = statistics.median
    found = {}

    def launch_and_wait():
        cuda.must_launch(nothing)
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
    found["OH-008"] = median(microseconds(200, lambda: cuda.must_launch(nothing))) * 1000
    cuda.wait()
    contended = []

    def contend():
        cuda.use()
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
    # The shim does no work in an idle program.
    found["OH-009"] = (time.process_time() - cpu) * 100

    def twenty():
        for _ in range(20):
            busy.launch()
        cuda.wait()

    found["OH-010"] = median(microseconds(5, twenty)) / 20 / 1000

    def context():
        cuda.must("cuDevicePrimaryCtxReset_v2", 0)
        cuda.retain()
        cuda.free(cuda.alloc(MIB)[1])

    found["OH-004"] = median(microseconds(10, context))
    return found


def filled(cuda, size):
    """As many allocations of a size as fit."""
    pointers = []
    while True:
        code, pointer = cuda.alloc(size)
        if code:
            return pointers
        pointers.append(pointer)


def isolation(steps):
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
    busy = Spin(cuda, 1_000, steps)

    def burst():
        for _ in range(100):
            busy.launch()
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


answer({"overhead": overhead, "isolation": isolation}[sys.argv[1]](int(sys.argv[2])))
