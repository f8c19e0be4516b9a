"""The node's own NVML, outside of every share."""

import ctypes

SUCCESS, NOT_FOUND, INSUFFICIENT_SIZE = 0, 6, 7
NOT_AVAILABLE = NO_LIMIT = 2**64 - 1


class NvmlError(Exception):
    """A call failed; `code` is nvmlReturn_t."""

    def __init__(self, what, code=None):
        super().__init__(what if code is None else f"{what}: NVML error {code}")
        self.code = code


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, that of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("at", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    ]


class MemoryLimits(ctypes.Structure):
    """nvmlSetMemoryLimits_v1_t, of drivers from 615 on."""

    _fields_ = [("cgroup", ctypes.c_char_p), ("soft", ctypes.c_ulonglong), ("hard", ctypes.c_ulonglong)]


class Nvml:
    """The library, initialised."""

    def __init__(self, path):
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise NvmlError(f"{path}: {error}") from error
        code = self.library.nvmlInit_v2()
        if code:
            raise NvmlError(f"{path}: nvmlInit_v2", code)

    def call(self, name, *arguments):
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise NvmlError(f"it has no {name}") from None
        code = function(*arguments)
        if code:
            raise NvmlError(name, code)

    def gpus(self):
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [Gpu(self, index) for index in range(count.value)]

    def driver_version(self):
        text = ctypes.create_string_buffer(80)
        self.call("nvmlSystemGetDriverVersion", text, 80)
        return text.value.decode()

    def cuda_version(self):
        """1000 x major + 10 x minor."""
        version = ctypes.c_int()
        self.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return version.value


class Gpu:
    """One GPU."""

    def __init__(self, nvml, index):
        self.nvml, self.index, self.device = nvml, index, ctypes.c_void_p()
        nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(self.device))
        self.name = self._text("nvmlDeviceGetName")
        self.uuid = self._text("nvmlDeviceGetUUID")
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.call("nvmlDeviceGetCudaComputeCapability", self.device, ctypes.byref(major), ctypes.byref(minor))
        self.capability = f"{major.value}.{minor.value}"

    def _text(self, call):
        text = ctypes.create_string_buffer(96)
        self.nvml.call(call, self.device, text, 96)
        return text.value.decode()

    def memory(self):
        memory = Memory()
        self.nvml.call("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(memory))
        return memory

    def limit_memory(self, cgroup, hard):
        """Limits the bytes of a cgroup's processes."""
        limits = MemoryLimits(str(cgroup).encode(), 0, hard)
        self.nvml.call("nvmlDeviceSetMemoryLimits_v1", self.device, ctypes.byref(limits))

    def used(self):
        """Bytes that all processes and the driver hold."""
        return self.memory().used

    def processes(self):
        """Bytes by PID; None if the driver does not report them."""
        room = 256
        while True:
            count, found = ctypes.c_uint(room), (Process * room)()
            call = "nvmlDeviceGetComputeRunningProcesses_v3"
            code = getattr(self.nvml.library, call)(self.device, ctypes.byref(count), found)
            if code == SUCCESS:
                entries = found[: count.value]
                return {entry.pid: None if entry.memory == NOT_AVAILABLE else entry.memory for entry in entries}
            if code != INSUFFICIENT_SIZE:
                raise NvmlError(call, code)
            room *= 2

    def samples(self, since):
        """Process utilization samples newer than `since`, microseconds: (pid, at, percent of the SMs' time)."""
        count = ctypes.c_uint(0)
        call = self.nvml.library.nvmlDeviceGetProcessUtilization
        code = call(self.device, None, ctypes.byref(count), ctypes.c_ulonglong(since))
        if code == NOT_FOUND or (code == SUCCESS and count.value == 0):
            return []
        if code != INSUFFICIENT_SIZE:
            raise NvmlError("nvmlDeviceGetProcessUtilization", code)
        found = (Sample * count.value)()
        code = call(self.device, found, ctypes.byref(count), ctypes.c_ulonglong(since))
        if code == NOT_FOUND:
            return []
        if code:
            raise NvmlError("nvmlDeviceGetProcessUtilization", code)
        return [(entry.pid, entry.at, entry.sm) for entry in found[: count.value] if entry.at > since]
