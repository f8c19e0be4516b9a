"""Shows whether shares of 30 and 70 percent get these parts at the same time."""

from harness.counted import USUAL, lengths, shares

TITLE = "shares of 30 and 70 percent at the same time, by counted work"


def run(machine):
    for micros in lengths(machine, USUAL):
        yield from shares(machine, micros, [30, 70])
