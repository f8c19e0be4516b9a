"""Fills a share by CuPy until it is refused: fill_cupy.py PIECE."""

import json
import sys

import cupy


def main(piece):
    size, kept, kind = int(piece), [], ""
    total = cupy.cuda.runtime.memGetInfo()[1]
    works = int(cupy.arange(1000).sum()) == 499500
    while size >= 2 << 20:
        try:
            kept.append(cupy.empty(size, dtype="u1"))
        except Exception as error:  # any error is a result
            kind, size = type(error).__name__, size // 2
    found = {"total": total, "reached": sum(one.nbytes for one in kept), "kind": kind, "works": works}
    print(json.dumps({**found, "expected": "OutOfMemoryError", "version": cupy.__version__}))


main(sys.argv[1])
