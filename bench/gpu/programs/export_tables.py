"""The UUIDs for which libraries ask cuGetExportTable: export_tables.py driver|torch|jax|cupy. Answers with them by stage.

The function's first bytes become a jump to ours, which notes the UUID and calls the driver's function with its own bytes.
"""

import ctypes
import uuid

from driver_api import Absent, Cuda, answer, program

PAGE, ALL = 4096, 7
# movabs rax, ADDRESS; jmp rax
JUMP = b"\x48\xb8%b\xff\xe0"
ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def hook(asked):
    driver = ctypes.CDLL("libcuda.so.1")
    at = ctypes.cast(driver.cuGetExportTable, ctypes.c_void_p).value
    own, theirs = ctypes.string_at(at, 12), ASK(at)

    @ASK
    def ours(table, wanted):
        if wanted:
            asked.append(str(uuid.UUID(bytes=ctypes.string_at(wanted, 16))))
        ctypes.memmove(at, own, 12)
        try:
            return theirs(table, wanted)
        finally:
            ctypes.memmove(at, jump, 12)

    jump = JUMP % ctypes.cast(ours, ctypes.c_void_p).value.to_bytes(8, "little")
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(at & -PAGE), ctypes.c_size_t(2 * PAGE), ALL):
        raise Absent(f"the driver's code cannot be made writable: error {ctypes.get_errno()}")
    ctypes.memmove(at, jump, 12)
    return ours


def torch_stages():
    import torch

    yield from product(lambda: torch.ones(64, 64, device="cuda"), lambda one: one.sum().item())


def jax_stages():
    import jax.numpy as jnp

    yield from product(lambda: jnp.ones((64, 64)), float_sum)


def cupy_stages():
    import cupy

    yield from product(lambda: cupy.ones((64, 64)), float_sum)


def float_sum(one):
    return float(one.sum())


def product(ones, finish):
    """Memory by the library's own runtime, then a product, which cuBLAS computes."""
    yield "the first array", lambda: finish(ones())
    yield "the first matrix product", lambda: finish(ones() @ ones())


def driver_stages():
    table, wanted = ctypes.c_void_p(), bytes(range(16))
    cuda = Cuda()
    yield "a known UUID", lambda: cuda.call("cuGetExportTable", ctypes.byref(table), wanted)


def main(library):
    asked, found = [], {}
    kept = hook(asked)
    stages = {"driver": driver_stages, "torch": torch_stages, "jax": jax_stages, "cupy": cupy_stages}[library]
    for name, work in stages():
        work()
        found[name], asked[:] = list(dict.fromkeys(asked)), []
    answer({"asked": found, "kept": bool(kept)})


program(main)
