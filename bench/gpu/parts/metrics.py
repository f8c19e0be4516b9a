"""Shows GPU-Virt-Bench's metrics of overhead and isolation that one program can measure, beside the bare driver's."""

from harness.counted import steps_per_micro
from harness.machine import python
from harness.result import taken, with_target

TITLE = "GPU-Virt-Bench's OH and IS metrics"
# Descriptions and units. Values are medians unless the description names another statistic. IS-003, IS-006, IS-008 and
# IS-009 are measured by the parts about shares.
METRICS = {
    "OH-001": "launch and wait, µs",
    "OH-002": "cuMemAlloc of 1 MiB, µs",
    "OH-003": "cuMemFree, µs",
    "OH-004": "context created again, first allocation, µs",
    "OH-005": "a call that passes, from Python, ns",
    "OH-006": "8 threads x 50 cuMemAlloc, 95th percentile, µs",
    "OH-007": "added by 100 live allocations, ns",
    "OH-008": "launch, not waited for, from Python, ns",
    "OH-009": "CPU of an idle program, percent",
    "OH-010": "a kernel of 1 ms, ms",
    "IS-001": "allocated of the total that is reported, percent",
    "IS-002": "an allocation refused, from Python, µs",
    "IS-004": "a kernel in a burst of 100 of 1 ms, µs",
    "IS-007": "coefficient of variation of such bursts",
    "IS-010": "1 TiB refused with error 2, and the program continues",
}


def run(machine):
    steps = round(1_000 * steps_per_micro(machine))
    overhead = python("metrics", "overhead", steps)
    bare, share = machine.result(machine.run(overhead)), machine.result(machine.run(overhead, "metrics"))
    for key in sorted(share):
        yield taken(f"{key}: {METRICS[key]}", share[key], bare=bare[key])
    # In a share only: without one it would fill the whole GPU.
    found = machine.program("metrics", "isolation", steps, share="metrics")
    for key in sorted(found):
        name, value = f"{key}: {METRICS[key]}", found[key]
        if key == "IS-001":
            yield with_target(name, value, value >= 99.9, ">= 99.9")
        elif key == "IS-010":
            yield with_target(name, value, value == 1, "1")
        else:
            yield taken(name, value)
