"""The part of the driver API that the programs of the kit use, by ctypes. Kernels are PTX that the driver compiles.

It is not named `cuda`, because Python would find NVIDIA's packages of that name first.
"""

import ctypes
import json
import select
import sys

MIB = 1 << 20
OUT_OF_MEMORY = 2
NOT_SUPPORTED = 801
FOREVER = 2**64 - 1
POOL_RELEASE_THRESHOLD = 4

# For Turing and newer, and drivers 535 and newer. The simulator takes a kernel's time from its name. A real GPU runs the
# given number of steps: counted work, which does not depend on clocks or preemption.
HEADER = ".version 7.0\n.target sm_75\n.address_size 64\n"
SPIN = """
.visible .entry {name}(.param .u64 steps, .param .u64 result)
{{
    .reg .u64 %rd<4>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [steps];
    ld.param.u64 %rd2, [result];
    mov.u64 %rd3, 1;
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 bra done;
loop:
    mad.lo.u64 %rd3, %rd3, 6364136223846793005, 1442695040888963407;
    sub.u64 %rd1, %rd1, 1;
    setp.ne.u64 %p1, %rd1, 0;
    @%p1 bra loop;
done:
    st.global.u64 [%rd2], %rd3;
    ret;
}}
"""
NOTHING = """
.visible .entry sim_busy_0us()
{
    ret;
}
"""
# Writes and reads local memory at an offset that the compiler does not know, so that the memory is really used.
LOCAL = """
.visible .entry local_{size}(.param .u64 at, .param .u64 result)
{{
    .local .align 16 .b8 depot[{size}];
    .reg .u64 %rd<6>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [result];
    mov.u64 %rd3, depot;
    cvta.local.u64 %rd4, %rd3;
    add.u64 %rd4, %rd4, %rd1;
    st.u64 [%rd4], %rd1;
    ld.u64 %rd5, [%rd4];
    st.global.u64 [%rd2], %rd5;
    ret;
}}
"""


class CudaError(Exception):
    """The call `name` failed; `code` is CUresult."""

    def __init__(self, name, code):
        super().__init__(f"{name}: CUDA error {code}")
        self.name, self.code = name, code


class Absent(Exception):
    """This machine lacks what a program needs."""


class Cuda:
    """The driver, with the first device's primary context."""

    def __init__(self, context=True):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        self.context = ctypes.c_void_p()
        if context:
            self.retain()

    def retain(self):
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.use()

    def use(self):
        self.must("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        try:
            function = getattr(self.lib, name)
        except AttributeError:
            raise Absent(f"this driver has no {name}") from None
        return function(*arguments)

    def must(self, name, *arguments):
        code = self.call(name, *arguments)
        if code:
            raise CudaError(name, code)

    def alloc(self, size):
        """The result, and the pointer."""
        pointer = ctypes.c_uint64()
        return self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size)), pointer

    def must_alloc(self, size):
        code, pointer = self.alloc(size)
        if code:
            raise CudaError(f"cuMemAlloc of {size} bytes", code)
        return pointer

    def free(self, pointer):
        self.must("cuMemFree_v2", pointer)

    def memory(self):
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def attribute(self, which):
        value = ctypes.c_int()
        self.must("cuDeviceGetAttribute", ctypes.byref(value), which, 0)
        return value.value

    def kernel(self, ptx, name):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.must("cuModuleLoadData", ctypes.byref(module), (HEADER + ptx).encode() + b"\0")
        self.must("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def prepared(self, function, *words, grid=1, block=1, stream=None):
        """A function that launches a kernel whose parameters are 64-bit words, and returns the result code. All is converted
        before, so that Python does not take longer for a launch than a short kernel for its work."""
        values = [ctypes.c_uint64(word) for word in words]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        shape = map(ctypes.c_uint, (grid, 1, 1, block, 1, 1, 0))
        arguments = (function, *shape, stream, pointers, None)
        launch = self.lib.cuLaunchKernel

        # `values` are kept with it, because the driver reads them.
        def now(_values=values):
            return launch(*arguments)

        return now

    def launch(self, *arguments, **how):
        """Launches a kernel; the result code."""
        return self.prepared(*arguments, **how)()

    def must_launch(self, *arguments, **how):
        code = self.launch(*arguments, **how)
        if code:
            raise CudaError("cuLaunchKernel", code)

    def stream(self):
        stream = ctypes.c_void_p()
        self.must("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def event(self):
        event = ctypes.c_void_p()
        self.must("cuEventCreate", ctypes.byref(event), 2)
        return event

    def wait(self):
        self.must("cuCtxSynchronize")

    def captured(self, stream, launch, count):
        """An executable graph of `count` launches."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.must("cuStreamBeginCapture_v2", stream, 0)
        for _ in range(count):
            launch()
        self.must("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.must("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        return executable


class Spin:
    """A kernel of counted work."""

    def __init__(self, cuda, micros, steps):
        self.cuda, self.steps = cuda, steps
        name = f"sim_busy_{micros}us"
        self.function = cuda.kernel(SPIN.format(name=name), name)
        self.result = cuda.must_alloc(8).value

    def prepared(self, stream=None):
        return self.cuda.prepared(self.function, self.steps, self.result, stream=stream)

    def launch(self, stream=None, grid=1):
        self.cuda.must_launch(self.function, self.steps, self.result, grid=grid, stream=stream)


def program(main):
    """Runs a program with the command line's arguments. What the machine lacks is an answer, too."""
    try:
        main(*sys.argv[1:])
    except Absent as why:
        answer({"absent": str(why)})
    except CudaError as error:
        if error.code != NOT_SUPPORTED:
            raise
        answer({"absent": f"{error}: not supported"})


def stage(name, cuda=None, **more):
    """Prints a stage with the free memory by cuMemGetInfo, and waits, so that another process can read NVML."""
    answer({"stage": name, "free": cuda.memory()[0] if cuda and cuda.context else None, **more})
    sys.stdin.readline()


def ready():
    """Prints that the program is ready, and waits for a line."""
    print("ready", flush=True)
    sys.stdin.readline()


def answer(found):
    print(json.dumps(found), flush=True)


def has_input():
    """Whether stdin has a line or has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])
