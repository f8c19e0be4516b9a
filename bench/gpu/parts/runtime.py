"""Shows whether programs on libcudart work in a share and are refused at its cap: the one in the kit, and the same built here
if nvcc is installed. Shows also whether a second process of a share is charged for the context that libcudart makes for it."""

import pathlib
import subprocess

from harness import pages
from harness.machine import KIT, MIB, PROGRAMS, Absent, Failed, python, tool
from harness.result import guarded, row, with_target

TITLE = "programs that nvcc built, on libcudart"
OUT_OF_MEMORY = 2
# The driver that the kit's own program needs: its runtime is of CUDA 13.
CUDA_13 = 13_000


def run(machine):
    # The program of the driver API is for comparison.
    yield from guarded("a second process", second(machine, "on the driver API", python("spin", 1, 1, 0, 0)))
    if machine.simulated:
        yield row("on libcudart", "absent", "it runs on NVIDIA's own libcuda only")
        return
    # If the driver does not refuse it, the GPU must have that much.
    machine.may_take(machine.limit + 1)
    shipped = KIT / "bin/runtime"
    if not shipped.exists():
        yield row("the kit's own", "absent", "the kit was made without nvcc")
    elif machine.nvml.cuda_version() < CUDA_13:
        yield row("the kit's own", "absent", "its runtime of CUDA 13 needs driver 580")
    else:
        yield from checked(machine, "the kit's own, of CUDA 13, static", shipped)
        yield from guarded("a second process", second(machine, "on libcudart", [shipped, MIB, "wait"]))
    nvcc = tool("nvcc")
    if not nvcc:
        yield row("built here", "absent", "no nvcc")
        return
    for linked in ("static", "shared"):
        program = pathlib.Path(machine.options.work, f"runtime-{linked}")
        source = PROGRAMS / "runtime.cu"
        line = [nvcc, "-o", program, source, f"-cudart={linked}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            yield row(f"built here, {linked}", "failed", f"nvcc: {done.stderr.strip()[-300:]}")
        else:
            yield from checked(machine, f"built here, {linked}", program)


def checked(machine, name, program):
    # Without a share, with a small amount, because nothing is refused.
    bare = machine.result(machine.run([program, MIB]))
    try:
        found = machine.result(machine.run([program, machine.limit], "runtime"))
    except Failed as error:
        yield row(name, "failed", str(error))
        return
    total = found["total"]
    yield with_target(f"{name}: cudaMemGetInfo's total", total, total == machine.limit, str(machine.limit))
    refusals = [found["plain"], found["managed"], found["ordered"]]
    good = refusals == [OUT_OF_MEMORY] * 3
    yield with_target(f"{name}: more by cudaMalloc, Managed, Async", str(refusals), good, "all 2", bare=bare["plain"])
    rest = {key: found[key] for key in ("info", "half", "freed", "small", "launched", "copied", "sum")}
    good = rest == {**dict.fromkeys(rest, 0), "sum": 499_500}
    works = "yes" if good else str(rest)
    yield with_target(f"{name}: works within the share", works, good, "yes", version=found["version"])


def second(machine, name, command):
    """The charge of a process that has a context beside another process of its share."""
    share = "second"
    holder = machine.start([machine.probe, "name"], share)
    started = [holder]
    try:
        holder.stdin.write("init\nprimary 0\nalloc 1\n")
        holder.stdin.flush()
        answers = [holder.stdout.readline().split()[:1] for _ in range(3)]
        if answers != [["0"]] * 3:
            raise Failed(f"the first process: {answers}")
        process = machine.start(command, share)
        started.append(process)
        if not process.stdout.readline():
            raise Failed(f"the second process: {process.communicate()[1].strip()[-300:]}")
        charged, taken = pages.charged(process.pid), machine.gpu.processes().get(process.pid)
        if charged is None:
            raise Failed("the second process has no slot in the share's account")
        # Allocations of less than a block are in a block of their own.
        good = machine.context - 2 * MIB <= charged
        target = f">= {machine.context // MIB}"
        what = f"a second process {name}: charged, MiB"
        yield with_target(what, charged / MIB, good, target, by_nvml=taken)
    finally:
        for one in started:
            one.kill()
            one.communicate()
