"""The number of steps of the spin kernel per microsecond without a share, from the difference of two lengths."""

import time

from driver_api import Cuda, Spin, answer


def seconds(cuda, micros, steps):
    spin = Spin(cuda, micros, steps)
    spin.launch()
    cuda.wait()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        spin.launch()
        cuda.wait()
        times.append(time.perf_counter() - start)
    return min(times)


def main():
    cuda = Cuda()
    # About 2 and 20 milliseconds on present GPUs, and exactly that on the simulator, by the kernels' names.
    few, many = 200_000, 2_000_000
    longer = seconds(cuda, 20_000, many) - seconds(cuda, 2_000, few)
    answer({"steps": (many - few) / (longer * 1e6)})


main()
