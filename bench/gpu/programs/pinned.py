"""Pinned host memory, taken and written in steps of 64 MiB: pinned.py MIB. A line after each step; may be killed meanwhile."""

import ctypes
import sys

from driver_api import MIB, Cuda, answer, program

STEP = 64


def main(most):
    cuda = Cuda()
    answer({"pinned": 0})
    for taken in range(STEP, int(most) + 1, STEP):
        pointer = ctypes.c_void_p()
        code = cuda.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(STEP * MIB), 0)
        if code:
            answer({"refused": code})
            break
        ctypes.memset(pointer, 1, STEP * MIB)
        answer({"pinned": taken})
    sys.stdin.readline()


program(main)
