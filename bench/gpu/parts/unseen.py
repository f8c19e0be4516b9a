"""Shows how much GPU memory programs take that the shim does not see: for graphs, green contexts and a profiler. What is beyond
the charge must stay within the watchdog's tolerance."""

import glob
import sys

from harness.machine import MIB, python
from harness.result import guarded, with_target
from harness.stages import compared

TITLE = "memory of graphs, green contexts and a profiler, beside what is charged"
# node/src/watchdog/compare.rs
TOLERANCE = 256 * MIB


def run(machine):
    count = 10 if machine.options.quick else 100
    for name, line in (
        (f"{count} graphs of 1,000 nodes", python("graphs", count, 1_000)),
        ("8 green contexts", python("green_contexts", 8)),
        ("a profiler", python("profiler", cupti())),
    ):
        yield from guarded(name, rows(machine, name, line))


def rows(machine, name, line):
    bare, share = compared(machine, line, "unseen")
    stages = [stage for stage in share if stage != "before"]
    for stage in stages:
        found = share[stage]
        beyond = found["taken"] - found["charged"]
        numbers = {"bare": bare[stage]["taken"] / MIB, "taken": found["taken"], "charged": found["charged"]}
        what = f"{name}, {stage}: taken beyond the charge, MiB"
        yield with_target(what, beyond / MIB, beyond <= TOLERANCE, f"<= {TOLERANCE // MIB}", **numbers)
        if "records" in found:
            some = found["records"] > 0
            yield with_target(f"{name}: bytes of records", found["records"], some, "some", bare=bare[stage]["records"])


def cupti():
    """NVIDIA's profiling library, of a Python package or of the toolkit; empty if there is none."""
    places = [f"{folder}/nvidia/*/lib/libcupti.so.*" for folder in sys.path if folder]
    places += ["/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.*", "/usr/local/cuda*/lib64/libcupti.so.*"]
    return next((path for place in places for path in sorted(glob.glob(place))), "")
