"""Shows the same three sets of shares with kernels of 100 ms and 2 s, which are likely to miss."""

from harness.counted import LONG, lengths, shares

TITLE = "shares alone and beside each other with kernels of 100 ms and 2 s, by counted work"


def run(machine):
    for micros in lengths(machine, LONG):
        for cores in ([25], [30, 70], [25] * 4):
            yield from shares(machine, micros, cores)
