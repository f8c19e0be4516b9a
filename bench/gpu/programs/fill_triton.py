"""A kernel of Triton on a tensor that nearly fills the share, and one beyond it: fill_triton.py PIECE."""

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def increment(pointer, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + at, tl.load(pointer + at, mask=at < count) + 1, mask=at < count)


def main(piece):
    size, kept, kind, works = int(piece), [], "", True
    total = torch.cuda.mem_get_info()[1]
    while size >= 2 << 20:
        try:
            one = torch.zeros(size, dtype=torch.uint8, device="cuda")
            increment[(triton.cdiv(size, 1024),)](one, size, BLOCK=1024)
            works = works and int(one[-1]) == 1
            kept.append(one)
        except Exception as error:  # any error is a result
            kind, size = type(error).__name__, size // 2
    found = {"total": total, "reached": sum(one.numel() for one in kept), "kind": kind, "works": works}
    print(json.dumps({**found, "expected": "OutOfMemoryError", "version": triton.__version__}))


main(sys.argv[1])
