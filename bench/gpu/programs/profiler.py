"""A profiler's records of kernels, by CUPTI: profiler.py [LIBRARY]. Waits after each stage; the last has the records' bytes."""

import ctypes

from driver_api import NOTHING, Absent, Cuda, program, stage

CONCURRENT_KERNEL, SIZE = 10, 1 << 20
REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def main(library=""):
    if not library:
        raise Absent("no libcupti")
    cupti, kept, seen = ctypes.CDLL(library), [], []

    @REQUESTED
    def requested(buffer, size, most):
        kept.append(ctypes.create_string_buffer(SIZE + 8))
        # Aligned to 8 bytes.
        buffer[0], size[0], most[0] = (ctypes.addressof(kept[-1]) + 7) & ~7, SIZE, 0

    @COMPLETED
    def completed(_context, _stream, _buffer, _size, valid):
        seen.append(valid)

    def must(name, *arguments):
        code = getattr(cupti, name)(*arguments)
        if code:
            raise Absent(f"{name}: CUPTI error {code}")

    cuda = Cuda()
    nothing = cuda.kernel(NOTHING, "sim_busy_0us")
    cuda.must_launch(nothing)
    cuda.wait()
    stage("before", cuda)
    must("cuptiActivityRegisterCallbacks", requested, completed)
    must("cuptiActivityEnable", CONCURRENT_KERNEL)
    for _ in range(1000):
        cuda.must_launch(nothing)
    cuda.wait()
    must("cuptiActivityFlushAll", 0)
    stage("profiled", cuda, records=sum(seen))


program(main)
