"""Shows how often the shim stalls programs whose launches always have new shapes."""

import statistics

from harness.counted import steps_per_micro
from harness.machine import module, python
from harness.result import row, taken, with_target

TITLE = "growing lengths: a transformer, and a kernel with a new grid each step"
# The share has 99 percent of the GPU, so its launches are priced but do not have to wait.
CORES = 99
# A step is a stall if it takes TIMES the median without a share and MORE milliseconds above it.
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
    yield with_target(f"{name}: steps that stalled", len(stalls), good, "no more than bare", **numbers)
    yield taken(f"{name}: median of a step, ms", statistics.median(share), bare=typical)
    yield taken(f"{name}: all steps, ms", sum(share), bare=sum(bare))
