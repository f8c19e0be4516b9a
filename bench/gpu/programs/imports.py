"""Memory that one process exports and another one imports: imports.py descriptor|ipc|pool SIZE.

Two processes, forked before the first call of the driver. The second writes to memory and exports it. The first imports it, and
answers with the result code, whether it reads what was written, and how many bytes of free memory the import has cost.
"""

import ctypes
import os
import socket
import struct

from driver_api import NOT_SUPPORTED, Cuda, CudaError, answer, program

DESCRIPTOR, SLOT = 1, ctypes.c_uint64
# Memory on the first device with a file descriptor as its handle, as cuMemCreate and cuMemPoolCreate take it; access to it.
ON_DEVICE = struct.pack("<IIii", 1, DESCRIPTOR, 1, 0) + bytes(112)
ACCESS = struct.pack("<iii", 1, 0, 3)
# Of these bytes the content is checked.
PATTERN, BYTES = 0x5A, 4096


class Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def mapped(cuda, handle, size):
    address = SLOT()
    cuda.must("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), SLOT(0), SLOT(0))
    cuda.must("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, SLOT(0))
    cuda.must("cuMemSetAccess", address, ctypes.c_size_t(size), ACCESS, ctypes.c_size_t(1))
    return address


def exported(cuda, way, size):
    """The address of new memory, what to tell the importer, and a descriptor for it."""
    handle, descriptor, told = SLOT(), ctypes.c_int(-1), (ctypes.c_ubyte * 64)()
    if way == "descriptor":
        cuda.must("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ON_DEVICE, SLOT(0))
        address = mapped(cuda, handle, size)
        cuda.must("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, DESCRIPTOR, SLOT(0))
    elif way == "ipc":
        address = cuda.must_alloc(size)
        cuda.must("cuIpcGetMemHandle", told, address)
    else:
        address, stream = SLOT(), cuda.stream()
        cuda.must("cuMemPoolCreate", ctypes.byref(handle), ON_DEVICE)
        cuda.must("cuMemAllocFromPoolAsync", ctypes.byref(address), ctypes.c_size_t(size), handle, stream)
        cuda.must("cuStreamSynchronize", stream)
        cuda.must("cuMemPoolExportToShareableHandle", ctypes.byref(descriptor), handle, DESCRIPTOR, SLOT(0))
        cuda.must("cuMemPoolExportPointer", told, address)
    return address, bytes(told), descriptor.value


def imported(cuda, way, size, told, descriptor):
    """The address of imported memory."""
    handle, address = SLOT(), SLOT()
    if way == "descriptor":
        cuda.must("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), DESCRIPTOR)
        return mapped(cuda, handle, size)
    if way == "ipc":
        cuda.must("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(told), 1)
        return address
    where = ctypes.c_void_p(descriptor)
    cuda.must("cuMemPoolImportFromShareableHandle", ctypes.byref(handle), where, DESCRIPTOR, SLOT(0))
    cuda.must("cuMemPoolSetAccess", handle, ACCESS, ctypes.c_size_t(1))
    cuda.must("cuMemPoolImportPointer", ctypes.byref(address), handle, told)
    return address


def exporter(way, size, channel):
    try:
        cuda = Cuda()
        address, told, descriptor = exported(cuda, way, size)
        cuda.must("cuMemsetD8_v2", address, ctypes.c_ubyte(PATTERN), ctypes.c_size_t(BYTES))
        cuda.wait()
        socket.send_fds(channel, [told], [descriptor] if descriptor >= 0 else [])
        # Until the importer has ended.
        channel.recv(1)
    except CudaError as error:
        channel.send(f"{error.code} {error.name}".encode())


def main(way, size):
    size, (ours, theirs) = int(size), socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            exporter(way, size, theirs)
        finally:
            os._exit(0)
    theirs.close()
    cuda = Cuda()
    told, descriptors, _, _ = socket.recv_fds(ours, 256, 1)
    before, back = cuda.memory()[0], (ctypes.c_ubyte * BYTES)()
    try:
        if len(told) != 64:
            code, call = told.decode().split()
            raise CudaError(f"the exporter's {call}", int(code))
        address = imported(cuda, way, size, told, (descriptors or [-1])[0])
        cuda.must("cuMemcpyDtoH_v2", back, address, ctypes.c_size_t(BYTES))
    except CudaError as error:
        if error.code == NOT_SUPPORTED:
            raise
        answer({"code": error.code, "call": str(error), "read": False, "charged": before - cuda.memory()[0]})
        return
    is_read = bytes(back) == bytes([PATTERN]) * BYTES
    answer({"code": 0, "read": is_read, "charged": before - cuda.memory()[0]})


program(main)
