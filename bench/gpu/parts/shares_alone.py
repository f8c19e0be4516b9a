"""A share of 25 percent alone: strict, it gets no more on an idle GPU."""

from harness.counted import lengths, named, percents, whole
from harness.result import with_target

TITLE = "a share of 25 percent alone, by counted work"
CORES, OFF = 25, 5


def run(machine):
    for micros in lengths(machine):
        bare = whole(machine, micros)
        (found,) = percents(machine, micros, [CORES], bare)
        name = f"25 alone, kernels of {named(micros)}, percent"
        yield with_target(name, round(found, 2), abs(found - CORES) <= OFF, f"{CORES} ± {OFF}", kernels_per_second=bare)
