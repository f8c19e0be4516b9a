"""Shows the same three sets of shares with kernels of 10 µs, the shortest that are measured, which are likely to miss."""

from harness.counted import SHORT, lengths, shares

TITLE = "shares alone and beside each other with kernels of 10 µs, by counted work"


def run(machine):
    for micros in lengths(machine, SHORT):
        for cores in ([25], [30, 70], [25] * 4):
            yield from shares(machine, micros, cores)
