"""Asks NVML everything that a share changes, of the GPU behind one handle, and prints a line for each answer.

usage: nvml-client.py HOW WHICH, for example `nvmlDeviceGetHandleByIndex_v2 0`
"""

import ctypes as c
import sys

nvml = c.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0, "nvmlInit_v2"
how, which = sys.argv[1:]
gpu = c.c_void_p()
assert getattr(nvml, how)(c.c_uint(int(which)) if "ByIndex" in how else which.encode(), c.byref(gpu)) == 0, how


def struct(**fields):
    names = {"u": c.c_uint, "U": c.c_ulonglong, "P": c.c_void_p}
    return type("Struct", (c.Structure,), {"_fields_": [(name, names[kind]) for name, kind in fields.items()]})


def values(entry, names):
    return ",".join(str(getattr(entry, name)) for name in names.split())


def ask(name, to, shown):
    code = getattr(nvml, name)(gpu, c.byref(to))
    print(name, code, values(to, shown))


def list_of(name, kind, shown, room=64, last=()):
    """All entries, then what too little room gets."""
    count, entries = c.c_uint(room), (kind * 64)()
    order = [entries, c.byref(count)] if name == "nvmlDeviceGetProcessUtilization" else [c.byref(count), entries]
    code = getattr(nvml, name)(gpu, *order, *last)
    print(name if room else name + "/small", code, count.value, *(values(e, shown) for e in entries[: count.value] if room and not code))


memory = struct(total="U", free="U", used="U")
v1 = struct(pid="u", bytes="U")
v2 = struct(pid="u", bytes="U", gi="u", ci="u")
ask("nvmlDeviceGetMemoryInfo", memory(), "total free used")
ask("nvmlDeviceGetBAR1MemoryInfo", memory(), "total free used")
ask("nvmlDeviceGetConfComputeProtectedMemoryUsage", memory(), "total free used")
for room in 64, 0:
    for kind in "Compute", "Graphics", "MPSCompute":
        for version, entry in ("", v1), ("_v2", v2), ("_v3", v2):
            list_of(f"nvmlDeviceGet{kind}RunningProcesses{version}", entry, "pid bytes", room)
    sample = struct(pid="u", at="U", sm="u", memory="u", encoder="u", decoder="u")
    list_of("nvmlDeviceGetProcessUtilization", sample, "pid sm memory encoder decoder", room, [c.c_ulonglong(5)])
    list_of("nvmlDeviceGetAccountingPids", type("Pid", (c.Structure,), {"_fields_": [("pid", c.c_uint)]}), "pid", room)

lists = struct(version="u", mode="u", count="u", to="P")
details = struct(pid="u", bytes="U", gi="u", ci="u", protected="U")
infos = struct(version="u", count="u", since="U", to="P")
info = struct(at="U", pid="u", sm="u", memory="u", encoder="u", decoder="u", jpeg="u", flow="u")
for mode in 0, 1, 2:
    entries = (details * 64)()
    asked = lists(c.sizeof(lists) | 1 << 24, mode, 64, c.cast(entries, c.c_void_p))
    code = nvml.nvmlDeviceGetRunningProcessDetailList(gpu, c.byref(asked))
    print(f"details/{mode}", code, asked.count, *(values(e, "pid bytes") for e in entries[: asked.count] if not code))
for version in 1, 2:
    entries = (info * 64)()
    asked = infos(c.sizeof(infos) | version << 24, 64, 5, c.cast(entries, c.c_void_p))
    code = nvml.nvmlDeviceGetProcessesUtilizationInfo(gpu, c.byref(asked))
    print(f"infos/{version}", code, asked.count, *(values(e, "pid sm memory flow") for e in entries[: asked.count] if not code))

ask("nvmlDeviceGetUtilizationRates", struct(gpu="u", memory="u")(), "gpu memory")
states = (c.c_uint * 33)()
print("dynamic", nvml.nvmlDeviceGetDynamicPstatesInfo(gpu, states), ",".join(str(states[2 + 4 * n]) for n in range(4)))
for what in 0, 1, 2:
    kind, count, entries = c.c_int(), c.c_uint(2), (c.c_ulonglong * 4)()
    code = nvml.nvmlDeviceGetSamples(gpu, what, c.c_ulonglong(5), c.byref(kind), c.byref(count), entries)
    print(f"samples/{what}", code, f"{entries[1]},{entries[3]}")
ask("nvmlGpmQueryDeviceSupport", struct(version="u", supported="u")(1, 7), "supported")
sample = c.create_string_buffer(64)
print("nvmlGpmSampleGet", nvml.nvmlGpmSampleGet(gpu, sample))
print("nvmlGpmMigSampleGet", nvml.nvmlGpmMigSampleGet(gpu, 0, sample))
stats = struct(pid="u", running="u", gpu="u", memory="u")
for pid in map(int, sys.stdin.read().split()):
    old = (c.c_uint * 32)()
    print(f"stats/{pid}", nvml.nvmlDeviceGetAccountingStats(gpu, pid, old), old[0])
    new = stats(pid)
    print(f"stats2/{pid}", nvml.nvmlDeviceGetAccountingStats_v2(gpu, c.byref(new)), new.gpu)

# The private table of nvidia-smi, and another one.
private = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
named = type("Named", (details,), {"_fields_": [("name", c.c_char * 4096)]})
for table, name in ("table", private), ("other", private[::-1]):
    to = c.POINTER(c.c_void_p)()
    code = nvml.nvmlInternalGetExportTable(c.byref(to), name)
    print(table, code, to[0] // 8 if to else 0)
    if not to:
        continue
    call = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)
    print(f"{table}/last", call(to[min(to[0] // 8, 251) - 1])(None, None, None))
    for place in 213, 214, 215:
        for room in 64, 0:
            count, entries = c.c_uint(room), (named * 64)()
            code = call(to[place])(gpu, c.addressof(count), c.addressof(entries))
            shown = entries[: count.value] if room and not code else []
            print(f"{table}/{place}" if room else f"{table}/{place}/small", code, count.value, *(values(e, "pid bytes") for e in shown))
            for e in shown:
                print(f"{table}/{place}/{e.pid}", 0, e.name.decode())
