"""Shows which PIDs NVML gives between PID namespaces: whether a node sees a container's program by the node's PID, and whether
a program in a PID namespace gets a stranger's PID of the node, which could be taken for one of its own."""

import time

from harness.counted import command
from harness.machine import Absent, python, send_line
from harness.result import taken, with_target
from harness.sampling import Sampling

TITLE = "NVML's PIDs between PID namespaces"
MICROS = 1_000
INSIDE = ["unshare", "--pid", "--fork", "--kill-child"]


def run(machine):
    seconds = 1 if machine.options.quick else 4
    line = command(machine, MICROS, 60, 60)
    if machine.run([*INSIDE, "true"]).returncode:
        raise Absent("no PID namespace can be made here")
    outside, inside = machine.start(line), machine.start([*INSIDE, *line])
    try:
        for process in (outside, inside):
            process.stdout.readline()
            send_line(process)
        (child,) = children(inside.pid)
        with Sampling(machine.gpu) as read:
            look = python("seen_pids", machine.driver.library("libnvidia-ml.so.1"), machine.gpu.index, seconds)
            seen = machine.result(machine.run([*INSIDE, *look]))
            time.sleep(0.2)
        listed = {pid for found in read.memory for pid in found}
        sampled = {pid for found in read.samples for pid, _, _ in found}
        for name, found in (("list", listed), ("samples", sampled)):
            what = f"a program of another PID namespace in NVML's {name}: by its PID here"
            yield with_target(what, child in found, child in found, "True", pids=sorted(found), wanted=child)
        for name in ("listed", "sampled"):
            strange = sorted({outside.pid, child} & set(seen[name]))
            what = f"inside a PID namespace: strangers' PIDs, {name}"
            yield with_target(what, len(strange), not strange, "0", pids=seen[name])
        yield taken("inside a PID namespace: own PID", seen["self"])
    finally:
        for process in (outside, inside):
            process.kill()
            process.communicate()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf8") as listed:
        return [int(word) for word in listed.read().split()]
