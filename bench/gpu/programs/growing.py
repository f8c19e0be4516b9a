"""A known kernel with a new grid at each step, as programs of growing sequences launch it.

usage: growing.py STEPS-OF-WORK COUNT

Prints the wall time of each step in milliseconds, of the second of two rounds.
"""

import sys
import time

from driver_api import Cuda, Spin, answer


def main(steps, count):
    cuda = Cuda()
    spin = Spin(cuda, 500, int(steps))
    times = []
    # The second round has other grids: none is used twice.
    for offset in (0, int(count)):
        times = []
        for grid in range(1 + offset, int(count) + 1 + offset):
            start = time.perf_counter()
            for _ in range(4):
                spin.launch(grid=grid)
            cuda.wait()
            times.append(1000 * (time.perf_counter() - start))
    answer({"milliseconds": times})


main(*sys.argv[1:])
