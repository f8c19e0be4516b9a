"""Plain host memory that a kernel reads, one word of each page: hmm.py SIZE. Waits after each stage."""

import ctypes
import mmap

from driver_api import Absent, Cuda, program, stage

PAGEABLE_MEMORY_ACCESS, PAGE, BLOCK = 88, 4096, 256
SUM = """
.visible .entry sim_sum(.param .u64 at, .param .u64 result)
{
    .reg .u64 %rd<6>;
    .reg .u32 %r<5>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [result];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %rd3, %r4, 4096;
    add.u64 %rd4, %rd1, %rd3;
    ld.global.u64 %rd5, [%rd4];
    red.global.add.u64 [%rd2], %rd5;
    ret;
}
"""


def main(size):
    size, cuda, back = int(size), Cuda(), ctypes.c_uint64()
    if not cuda.attribute(PAGEABLE_MEMORY_ACCESS):
        raise Absent("the device does not read pageable memory: no HMM")
    result = cuda.must_alloc(8)
    cuda.must("cuMemsetD8_v2", result, ctypes.c_ubyte(0), ctypes.c_size_t(8))
    total = cuda.kernel(SUM, "sim_sum")
    plain = mmap.mmap(-1, size)
    words = memoryview(plain).cast("Q")
    for at in range(0, len(words), PAGE // 8):
        words[at] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(plain))
    stage("before", cuda)
    cuda.must_launch(total, address, result.value, grid=size // PAGE // BLOCK, block=BLOCK)
    cuda.wait()
    cuda.must("cuMemcpyDtoH_v2", ctypes.byref(back), result, ctypes.c_size_t(8))
    stage("read", cuda, read=back.value == size // PAGE)


program(main)
