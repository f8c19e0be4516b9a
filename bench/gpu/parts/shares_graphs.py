"""Shares whose programs launch graphs."""

from harness.counted import named, percents, whole
from harness.result import with_target

TITLE = "shares that launch graphs, by counted work"
LAUNCHES = 10
OFF = 5


def run(machine):
    for micros in [1_000] if machine.options.quick else [100, 1_000, 10_000]:
        bare = whole(machine, micros, LAUNCHES)
        for cores in ([25], [30, 70]):
            found = percents(machine, micros, cores, bare, LAUNCHES)
            for wanted, one in zip(cores, found):
                beside = "alone" if len(cores) == 1 else "of 30/70"
                name = f"{wanted} {beside}, graphs of {LAUNCHES} kernels of {named(micros)}, percent"
                yield with_target(name, round(one, 2), abs(one - wanted) <= OFF, f"{wanted} ± {OFF}")
