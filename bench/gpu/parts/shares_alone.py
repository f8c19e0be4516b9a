"""Shows whether a share of 25 percent alone is strict: it gets no more on an idle GPU."""

from harness.counted import USUAL, lengths, shares

TITLE = "a share of 25 percent alone, by counted work"


def run(machine):
    for micros in lengths(machine, USUAL):
        yield from shares(machine, micros, [25])
