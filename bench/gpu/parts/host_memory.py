"""Shows whether plain memory that a kernel reads (HMM) takes GPU memory that nobody is charged for, and whether pinned memory
counts in the container's own memory limit."""

import json

from harness.cgroup import limited
from harness.machine import GIB, MIB, Absent, python
from harness.result import guarded, taken, with_target
from harness.stages import compared

TITLE = "plain and pinned host memory"
# MiB of the cgroup, which a program with a CUDA context needs a part of, too.
LIMIT, QUICK_LIMIT = 1024, 256


def run(machine):
    yield from guarded("plain memory that a kernel reads", plain(machine))
    for share in (None, "pinned"):
        where = "in a share" if share else "bare"
        yield from guarded(f"pinned memory, {where}", pinned(machine, share, where))


def plain(machine):
    size = min(GIB, machine.limit // 2)
    # It moves to the GPU as managed memory does.
    machine.may_take(4 * size)
    bare, share = compared(machine, python("hmm", size), "plain")
    works = share["read"]["read"] and bare["read"]["read"]
    yield with_target("plain memory that a kernel reads: its sum", "right" if works else "wrong", works, "right")
    numbers = {"bare": bare["read"]["taken"] / MIB, "charged": share["read"]["charged"]}
    yield taken(f"{size // MIB} MiB of it: taken on the GPU, MiB", share["read"]["taken"] / MIB, **numbers)


def pinned(machine, share, where):
    limit = QUICK_LIMIT if machine.options.quick else LIMIT
    with limited(limit * MIB) as group:
        process = machine.start(python("pinned", 2 * limit), share, wrap=group.line)
        reached, refused, used = 0, None, None
        for line in process.stdout:
            values = json.loads(line)
            reached, refused = values.get("pinned", reached), values.get("refused")
            used = group.used()
            if reached == 2 * limit or refused:
                break
        process.stdin.close()
        errors = process.stderr.read()
        process.wait()
    if used is None:
        raise Absent(f"no program runs in such a cgroup: {errors.strip()[-300:]}")
    ended = f"ended with {process.returncode}, refused with {refused}"
    what = f"pinned memory in a cgroup of {limit} MiB, {where}: reached, MiB"
    yield with_target(what, reached, reached < limit, f"< {limit}", "" if reached < limit else ended, used=used, end=ended)
