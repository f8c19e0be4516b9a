"""Shows whether four shares of 25 percent at the same time are equal, and together use the whole GPU."""

from harness.counted import USUAL, lengths, shares

TITLE = "four shares of 25 percent beside each other, by counted work"


def run(machine):
    for micros in lengths(machine, USUAL):
        yield from shares(machine, micros, [25] * 4)
