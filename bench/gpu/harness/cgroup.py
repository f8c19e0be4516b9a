"""A cgroup with a limit of host memory, of either version."""

import contextlib
import os
import pathlib
import time

from harness.machine import Absent

ROOT = pathlib.Path("/sys/fs/cgroup")


class Cgroup:
    """A folder of the hierarchy; programs that `line` wraps run in it."""

    def __init__(self, folder, limit, usage):
        self.folder, self.limit, self.usage = folder, folder / limit, folder / usage

    def line(self, command):
        script = f'echo $$ >{self.folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", script, "sh", *map(str, command)]

    def used(self):
        return int(self.usage.read_text(encoding="utf8"))


@contextlib.contextmanager
def limited(size=None):
    """A new cgroup with so many bytes of host memory, or without a limit."""
    name = f"tranche-gpu-{os.getpid()}"
    try:
        if (ROOT / "cgroup.controllers").exists():
            if "memory" not in (ROOT / "cgroup.subtree_control").read_text(encoding="utf8").split():
                (ROOT / "cgroup.subtree_control").write_text("+memory", encoding="utf8")
            group = Cgroup(ROOT / name, "memory.max", "memory.current")
        else:
            group = Cgroup(ROOT / "memory" / name, "memory.limit_in_bytes", "memory.usage_in_bytes")
        group.folder.mkdir()
    except OSError as error:
        raise Absent(f"no cgroup with a memory limit can be made here: {error}") from None
    try:
        if size:
            group.limit.write_text(str(size), encoding="utf8")
            if (group.folder / "memory.swap.max").exists():
                (group.folder / "memory.swap.max").write_text("0", encoding="utf8")
        yield group
    except OSError as error:
        raise Absent(f"no memory limit can be set here: {error}") from None
    finally:
        remove(group.folder)


def remove(folder):
    """Removes the cgroup once its last process, a supervisor of a share for example, has left it."""
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
