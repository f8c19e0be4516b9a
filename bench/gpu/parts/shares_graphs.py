"""Shows whether shares whose programs launch graphs get their parts."""

from harness.counted import shares

TITLE = "shares that launch graphs, by counted work"
LAUNCHES = 10


def run(machine):
    for micros in [1_000] if machine.options.quick else [100, 1_000]:
        for cores in ([25], [30, 70]):
            yield from shares(machine, micros, cores, LAUNCHES)
