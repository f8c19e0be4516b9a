"""Shows whether a process of a share can import what another process of it exports, as NCCL and torch.multiprocessing do, and
that the importer is charged for it and refused beyond the share."""

from harness.machine import MIB, Absent, Failed, python
from harness.result import guarded, with_target

TITLE = "memory that one process of a share exports and another imports"
WAYS = {"descriptor": "a descriptor of cuMemCreate's memory", "ipc": "cuIpcOpenMemHandle", "pool": "a pool's pointer"}
SIZE = 256 * MIB
OUT_OF_MEMORY = 2
SECONDS = 30


def run(machine):
    for way, name in WAYS.items():
        yield from guarded(name, rows(machine, way, name))


def rows(machine, way, name):
    bare = machine.result(machine.run(python("imports", way, SIZE), seconds=SECONDS))
    if not bare["read"]:
        raise Absent(f"it does not work without a share: {bare}")
    try:
        found = machine.result(machine.run(python("imports", way, SIZE), "imports", seconds=SECONDS))
    except Absent as why:
        raise Failed(f"works without a share; in a share: {why}") from None
    works = "read" if found["read"] else found.get("call", "other bytes")
    yield with_target(f"{name}: what another process wrote", works, found["read"], "read")
    if found["read"]:
        charged = found["charged"]
        good = SIZE <= charged <= SIZE + 2 * MIB
        yield with_target(f"{name}: charged for {SIZE // MIB} MiB, MiB", charged / MIB, good, f"{SIZE // MIB}")
    # Exporter and importer together need more than the share has.
    most = machine.limit * 6 // 10 // (2 * MIB) * (2 * MIB)
    machine.may_take(2 * most)
    beyond = machine.result(machine.run(python("imports", way, most), "imports", seconds=SECONDS))
    code = beyond["code"]
    yield with_target(f"{name}: an import beyond the share", code, code == OUT_OF_MEMORY, str(OUT_OF_MEMORY))
