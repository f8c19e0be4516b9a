"""Shows that close to the cap a pool with free memory is used, and is trimmed before other allocations fail."""

from harness.machine import GIB, MIB, python
from harness.result import with_target
from harness.stages import differences

TITLE = "cudaMallocAsync's pools close to the cap"


def run(machine):
    cap = min(4 * GIB, machine.limit)
    most, held, highest = machine.most(cap), 0, 0
    for what, found in differences(machine, python("pools"), "pools", memory=cap).items():
        held += found["taken"]
        highest = max(highest, held)
        code, expected = found["code"], found["expected"]
        yield with_target(f"{what}: result", code, code == expected, str(expected), held=held)
    yield with_target("held at most, by NVML, MiB", highest // MIB, highest <= most, f"<= {most // MIB}")
