"""Shows whether PyTorch works in a share: each of its allocators filled to the cap, the total that programs such as vLLM read,
and what the first matrix product takes beside what it is charged."""

from harness.machine import MIB, need_module, python
from harness.result import guarded, with_target
from harness.stages import compared
from parts.frameworks import filled

TITLE = "PyTorch filled to the cap, its total, its first matrix product"
ALLOCATORS = {
    "native": {},
    "expandable_segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}


def run(machine):
    need_module("torch")
    for which, total in machine.program("total_torch", share="total").items():
        yield with_target(f"PyTorch's total by {which}", total, total == machine.limit, str(machine.limit))
    yield from guarded("the first matrix product", matrix_product(machine))
    for name, settings in ALLOCATORS.items():
        yield from guarded(name, filled(machine, "torch", f"PyTorch, {name}", settings))


def matrix_product(machine):
    """The charge may not be less than what is taken, and a share of 2 GiB can bear 512 MiB more than that."""
    bare, share = compared(machine, python("stages", "matmul"), "matmul")
    for stage in share:
        if share[stage]["charged"] is None:
            continue
        taken, charged = share[stage]["taken"], share[stage]["charged"]
        numbers = {"bare": bare[stage]["taken"] / MIB, "taken": taken / MIB}
        good = taken - 2 * MIB <= charged <= taken + 512 * MIB
        target = f"{taken // MIB} to {taken // MIB + 512}"
        yield with_target(f"PyTorch, {stage}: charged, MiB", charged / MIB, good, target, **numbers)
