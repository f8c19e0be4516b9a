"""Shows what drivers from 615 on limit by themselves: GPU memory of a cgroup, also of programs without the shim, and MPS v3."""

import os
import shutil
import time

from harness.cgroup import limited
from harness.machine import GIB, MIB, Absent, Failed, python
from harness.nvml import NO_LIMIT, NvmlError
from harness.result import guarded, taken, with_target

TITLE = "the driver's own memory limits and MPS v3"


def run(machine):
    yield from guarded("the driver's memory limit", memory(machine))
    yield from guarded("MPS v3", mps(machine))


def memory(machine):
    hard = machine.context + GIB
    with limited() as group:
        try:
            machine.gpu.limit_memory(group.folder, hard)
        except NvmlError as error:
            raise Absent(f"driver {machine.nvml.driver_version()}: {error}") from None
        try:
            found = machine.result(machine.run(python("fill_driver", 64 * MIB), wrap=group.line))
            most = found["reached"] // MIB
            yield with_target("a limit of 1 GiB and a context: reached without the shim, MiB", most, most <= 1024, "<= 1024")
            yield with_target("refused by", found["kind"], "OUT_OF_MEMORY" in found["kind"], "CUDA_ERROR_OUT_OF_MEMORY")
        finally:
            machine.gpu.limit_memory(group.folder, NO_LIMIT)


def mps(machine):
    places = [f"{machine.driver.root}/{folder}" for folder in ("bin", "usr/bin")]
    control = shutil.which("nvidia-cuda-mps-control") or shutil.which("nvidia-cuda-mps-control", path=":".join(places))
    if not control:
        raise Absent("no nvidia-cuda-mps-control")
    pipes = os.path.join(machine.options.work, "mps")
    os.makedirs(pipes, exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
    # In the foreground, so that it ends with this part.
    daemon = machine.start([control, "-f", "-p", "3"], env=env)
    try:
        time.sleep(2)
        if daemon.poll() is not None:
            said = " ".join(" ".join(daemon.communicate()).split())[-200:]
            raise Absent(f"driver {machine.nvml.driver_version()}: its daemon refuses protocol 3: {said}")
        done = machine.run([control, "device", "list"], env=env, seconds=20)
        if done.returncode:
            raise Failed(f"device list: {done.stdout}{done.stderr}"[-300:])
        yield taken("MPS v3, device list", " / ".join(done.stdout.split("\n")))
    finally:
        daemon.kill()
        daemon.communicate()
