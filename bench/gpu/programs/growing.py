"""A known kernel with a new grid at each step, as programs of growing sequences launch it.

usage: growing.py STEPS-OF-WORK COUNT

Answers with the time of each step, milliseconds of wall time, after all were taken twice.
"""

import sys
import time

from driver_api import Cuda, Spin, answer


def main(steps, count):
    cuda = Cuda()
    spin = Spin(cuda, 500, int(steps))
    times = []
    # The second round has other grids again: none is ever met twice.
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
