"""Allocates memory in stages, and waits after each, so that another process can read NVML.

usage: stages.py context | rounding SIZE COUNT | local BYTES... | matmul

Prints a line of JSON per stage: its name, and free memory by cuMemGetInfo where a context exists.
"""

import sys

from driver_api import LOCAL, NOTHING, Cuda, answer, stage


def context():
    cuda = Cuda(context=False)
    stage("init")
    cuda.retain()
    stage("context", cuda)
    nothing = cuda.kernel(NOTHING, "sim_busy_0us")
    stage("module", cuda)
    cuda.must_launch(nothing)
    cuda.wait()
    stage("launch", cuda)


def rounding(size, count):
    cuda = Cuda()
    stage("before", cuda)
    taken = [cuda.must_alloc(int(size)) for _ in range(int(count))]
    stage("taken", cuda)
    for pointer in taken:
        cuda.free(pointer)
    stage("freed", cuda)


def local(*sizes):
    """Launches with this many bytes of local memory per thread. In a share they may be refused."""
    cuda = Cuda()
    result = cuda.must_alloc(8).value
    stage("before", cuda)
    for size in map(int, sizes):
        name = f"local_{size}"
        code = cuda.launch(cuda.kernel(LOCAL.format(size=size), name), 0, result)
        if code == 0:
            code = cuda.call("cuCtxSynchronize")
        stage(str(size), cuda, code=code)
        if code:
            return


def matmul():
    import torch

    def at(name):
        free = torch.cuda.mem_get_info()[0]
        answer({"stage": name, "free": free, "allocated": torch.cuda.memory_allocated()})
        sys.stdin.readline()

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    at("first tensor")
    one = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    at("operands")
    one @ one
    torch.cuda.synchronize()
    at("first matmul")


{"context": context, "rounding": rounding, "local": local, "matmul": matmul}[sys.argv[1]](*sys.argv[2:])
