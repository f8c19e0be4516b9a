"""Counted work for some time: how many steps a second the GPU completes for this program.

usage: spin.py MICROS STEPS SETTLE COUNT [LAUNCHES-PER-GRAPH]

Launches a kernel of STEPS steps (about MICROS microseconds) again and again, two batches ahead of the GPU, so that it
always has work. After SETTLE seconds it counts completed launches, for COUNT seconds and at least three completions: from
one completion to another, so that no launch is counted in part. It continues until stdin has a line.
"""

import sys
import time

from driver_api import Cuda, CudaError, Spin, answer, has_input, ready

# Microseconds of work between two checks of completion.
BATCH = 20_000
LEAST = 3


def batches(cuda, spin, stream, micros, graph):
    """Yields completions without end: (time, launches that are complete)."""
    count = max(1, BATCH // micros)
    executable = cuda.captured(stream, lambda: spin.launch(stream), graph) if graph else None
    events, done, issued = [cuda.event(), cuda.event()], 0, 0
    per_batch = max(1, count // graph) * graph if graph else count
    launch = spin.prepared(stream)

    def issue():
        if graph:
            for _ in range(per_batch // graph):
                cuda.must("cuGraphLaunch", executable, stream)
        else:
            failed = 0
            for _ in range(per_batch):
                failed |= launch()
            if failed:
                raise CudaError("cuLaunchKernel", failed)
        cuda.must("cuEventRecord", events[issued % 2], stream)

    issue()
    while True:
        issued += 1
        issue()
        cuda.must("cuEventSynchronize", events[(issued - 1) % 2])
        done += per_batch
        yield time.perf_counter(), done


def main(micros, steps, settle, count, graph=0):
    micros, graph = int(micros), int(graph)
    cuda = Cuda()
    spin, stream = Spin(cuda, micros, int(steps)), cuda.stream()
    spin.launch(stream)
    cuda.wait()
    ready()
    completions = batches(cuda, spin, stream, micros, graph)
    begin = time.perf_counter()
    while True:
        first, before = next(completions)
        if first - begin >= float(settle):
            break
    last, seen, longest, previous = first, 0, 0.0, first
    while last - first < float(count) or seen < LEAST:
        last, done = next(completions)
        longest, previous, seen = max(longest, last - previous), last, seen + 1
    kernels = done - before
    rate = kernels / (last - first)
    counted = {"counted": kernels, "seconds": last - first, "longest": longest}
    answer({"steps": rate * int(steps), "kernels": rate, **counted})
    while not has_input():
        next(completions)
    cuda.wait()


main(*sys.argv[1:])
