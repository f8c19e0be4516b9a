"""Fills a share by PyTorch, with the allocator of PYTORCH_CUDA_ALLOC_CONF, until it is refused: fill_torch.py PIECE."""

import json
import sys

import torch


def main(piece):
    size, kept, kind = int(piece), [], ""
    total = torch.cuda.mem_get_info()[1]
    works = int(torch.arange(1000, device="cuda").sum()) == 499500
    while size >= 2 << 20:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except Exception as error:  # any error is a result
            kind, size = type(error).__name__, size // 2
    reached = sum(one.numel() for one in kept)
    kept.clear()
    torch.cuda.empty_cache()
    again = torch.empty(int(piece), dtype=torch.uint8, device="cuda").numel() == int(piece)
    found = {"total": total, "reached": reached, "kind": kind, "works": works and again}
    print(json.dumps({**found, "expected": "OutOfMemoryError", "version": torch.__version__}))


main(sys.argv[1])
