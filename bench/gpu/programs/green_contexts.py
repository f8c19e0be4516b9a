"""Green contexts, each with all multiprocessors: green_contexts.py COUNT. Waits after each stage."""

import ctypes

from driver_api import NOTHING, Cuda, program, stage

MULTIPROCESSORS, DEFAULT_STREAM = 1, 1


def main(count):
    cuda = Cuda()
    cuda.must_launch(cuda.kernel(NOTHING, "sim_busy_0us"))
    cuda.wait()
    stage("before", cuda)
    # Larger than CUdevResource of any release.
    resource, description = (ctypes.c_ubyte * 256)(), ctypes.c_void_p()
    cuda.must("cuDeviceGetDevResource", 0, resource, MULTIPROCESSORS)
    cuda.must("cuDevResourceGenerateDesc", ctypes.byref(description), resource, 1)
    contexts = [ctypes.c_void_p() for _ in range(int(count))]
    for green in contexts:
        cuda.must("cuGreenCtxCreate", ctypes.byref(green), description, 0, DEFAULT_STREAM)
    stage("created", cuda)
    for green in contexts:
        context = ctypes.c_void_p()
        cuda.must("cuCtxFromGreenCtx", ctypes.byref(context), green)
        cuda.must("cuCtxSetCurrent", context)
        cuda.must_launch(cuda.kernel(NOTHING, "sim_busy_0us"))
        cuda.wait()
    cuda.use()
    stage("launched", cuda)


program(main)
