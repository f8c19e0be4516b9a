"""Shares of 30 and 70 percent at the same time."""

from harness.counted import lengths, named, percents, whole
from harness.result import with_target

TITLE = "shares of 30 and 70 percent at the same time, by counted work"
CORES, OFF = (30, 70), 5


def run(machine):
    for micros in lengths(machine):
        bare = whole(machine, micros)
        found = percents(machine, micros, CORES, bare)
        for cores, one in zip(CORES, found):
            name = f"{cores} of 30/70, kernels of {named(micros)}, percent"
            yield with_target(name, round(one, 2), abs(one - cores) <= OFF, f"{cores} ± {OFF}", both=found)
