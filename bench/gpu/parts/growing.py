"""Programs whose launches always have new shapes: how often the shim makes them stall."""

import statistics

from harness.counted import steps_per_micro
from harness.machine import module, python
from harness.result import judged, row, taken

TITLE = "growing lengths: a transformer, and a kernel with a new grid each step"
# The share has all but a hundredth of the GPU, so that its launches are priced and it has no need to wait.
CORES = 99
# A step is a stall if it takes so many times what steps around it take without a share, and so many milliseconds more.
TIMES, MORE = 3, 5


def run(machine):
    count = 20 if machine.options.quick else 200
    steps = round(500 * steps_per_micro(machine))
    yield from compared(machine, "a kernel with a new grid", python("growing", steps, count))
    if not module("torch"):
        yield row("a growing transformer", "absent", "no module torch")
        return
    yield from compared(machine, "a growing transformer", python("transformer", 4 * count))


def compared(machine, name, line):
    bare = machine.result(machine.run(line))["milliseconds"]
    share = machine.result(machine.run(line, "growing", cores=CORES))["milliseconds"]
    typical = statistics.median(bare)
    allowed = max(TIMES * typical, typical + MORE)
    stalls, alone = ([one for one in times if one > allowed] for times in (share, bare))
    good = len(stalls) <= len(alone)
    numbers = {"bare": len(alone), "steps": len(share), "longest": max(share), "longest_bare": max(bare)}
    yield judged(f"{name}: steps that stalled", len(stalls), good, "no more than bare", **numbers)
    yield taken(f"{name}: median of a step, ms", statistics.median(share), bare=typical)
    yield taken(f"{name}: all steps, ms", sum(share), bare=sum(bare))
