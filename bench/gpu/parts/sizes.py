"""Shows the sizes of contexts, modules, allocations and local memory by NVML, and what a share is charged for allocations."""

from harness.machine import MIB, python
from harness.result import guarded, row, taken
from harness.stages import differences

TITLE = "sizes by NVML"
KIB = 1 << 10
# Bytes of one allocation, and how many of them are made.
ROUNDING = [
    (1, 4096),
    (4 * KIB, 1024),
    (64 * KIB, 512),
    (MIB - 1, 64),
    (MIB + 1, 64),
    (2 * MIB, 32),
    (2 * MIB + 1, 32),
    (3 * MIB, 32),
    (32 * MIB + 1, 8),
    (256 * MIB + 1, 2),
]
LOCAL = [1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB]


def run(machine):
    context = differences(machine, python("stages", "context"))
    for stage, meaning in (("context", "a context"), ("module", "loading a module"), ("launch", "the first launch")):
        yield taken(f"{meaning}, MiB", mib(context[stage]["taken"]), bytes=context[stage]["taken"])
    listed = context["context"]["process"]
    yield taken("a context by NVML's process list, MiB", mib(listed), bytes=listed)
    in_share = machine.why_no_share() is None
    for size, count in ROUNDING[3:6] if machine.options.quick else ROUNDING:
        line = python("stages", "rounding", size, count)
        bare = differences(machine, line)["taken"]["taken"] / count
        numbers = {"size": size, "bare": bare}
        if in_share:
            # The account's charge: the decrease of free memory by the share's cuMemGetInfo.
            numbers["value"] = differences(machine, line, "sizes")["taken"]["charged"] / count
        yield row(f"one of {count} allocations of {size} bytes; charged in a share", "held", **numbers)
    # The larger products take a fifth of an H100 for a moment.
    yield from guarded("local memory", local_memory(machine))


def local_memory(machine):
    found = differences(machine, python("stages", "local", *LOCAL))
    for size in LOCAL:
        if str(size) in found:
            name = f"added by a launch with {size} bytes of local memory per thread, MiB"
            yield taken(name, mib(found[str(size)]["taken"]), code=found[str(size)]["code"])


def mib(size):
    return None if size is None else round(size / MIB, 2)
