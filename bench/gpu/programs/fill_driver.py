"""Takes memory by the driver API until it is refused: fill_driver.py PIECE."""

import sys

from driver_api import OUT_OF_MEMORY, Cuda, answer


def main(piece):
    cuda, taken, size = Cuda(), 0, int(piece)
    _, total = cuda.memory()
    while True:
        code, _ = cuda.alloc(size)
        if code == 0:
            taken += size
        elif size > 2 << 20:
            size //= 2
        else:
            break
    kind = "CUDA_ERROR_OUT_OF_MEMORY" if code == OUT_OF_MEMORY else str(code)
    answer({"total": total, "reached": taken, "error": code, "kind": kind})


main(sys.argv[1])
