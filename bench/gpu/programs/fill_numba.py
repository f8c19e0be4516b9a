"""Fills a share by numba until it is refused: fill_numba.py PIECE."""

import json
import sys

import numba
import numpy
from numba import cuda


def main(piece):
    size, kept, kind = int(piece), [], ""
    free, total = cuda.current_context().get_memory_info()
    there = cuda.to_device(numpy.arange(1000))
    works = int(there.copy_to_host().sum()) == 499500
    while size >= 2 << 20:
        try:
            kept.append(cuda.device_array(size, dtype=numpy.uint8))
        except Exception as error:  # any error is a result
            words = f"{type(error).__name__} {error}"
            kind = "CUDA_ERROR_OUT_OF_MEMORY" if "OUT_OF_MEMORY" in words else words
            size //= 2
    found = {"total": total, "reached": sum(one.nbytes for one in kept), "kind": kind, "works": works}
    print(json.dumps({**found, "expected": "CUDA_ERROR_OUT_OF_MEMORY", "version": numba.__version__}))


main(sys.argv[1])
