"""A kernel that writes to memory which is not allocated: fault.py faulty. A program beside it: fault.py beside.

The first answers with the result codes of the wait for the kernel and of calls after it. The second fills memory, waits for a
line, and answers whether its bytes are as written and whether it still can allocate and launch.
"""

import ctypes
import sys

from driver_api import MIB, NOTHING, Cuda, answer, ready

ILLEGAL = """
.visible .entry sim_illegal_address()
{
    .reg .u64 %at;
    .reg .u32 %one;
    mov.u64 %at, 16;
    mov.u32 %one, 1;
    st.global.u32 [%at], %one;
    ret;
}
"""
SIZE = 64 * MIB
PATTERN = 0x5A


def faulty():
    cuda = Cuda()
    held = cuda.must_alloc(SIZE)
    kernel, harmless = cuda.kernel(ILLEGAL, "sim_illegal_address"), cuda.kernel(NOTHING, "sim_busy_0us")
    cuda.must_launch(kernel)
    codes = {"cuCtxSynchronize": cuda.call("cuCtxSynchronize")}
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    codes["cuMemGetInfo"] = cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    codes["cuMemAlloc"], _ = cuda.alloc(SIZE)
    codes["cuMemFree"] = cuda.call("cuMemFree_v2", held)
    codes["cuLaunchKernel"] = cuda.launch(harmless)
    answer(codes)


def beside():
    cuda = Cuda()
    held = cuda.must_alloc(SIZE)
    cuda.must("cuMemsetD8_v2", held, ctypes.c_ubyte(PATTERN), ctypes.c_size_t(SIZE))
    cuda.wait()
    ready()
    back = (ctypes.c_ubyte * SIZE)()
    cuda.must("cuMemcpyDtoH_v2", back, held, ctypes.c_size_t(SIZE))
    cuda.free(cuda.must_alloc(SIZE))
    cuda.must_launch(cuda.kernel(NOTHING, "sim_busy_0us"))
    cuda.wait()
    answer({"wrong": SIZE - bytes(back).count(PATTERN)})


{"faulty": faulty, "beside": beside}[sys.argv[1]]()
