"""Programs that allocate memory in stages (programs/stages.py), with NVML's values after each."""

import json
import pathlib

from harness.machine import Absent, Failed, answered, python, send_line, settled, short


def measure_context(machine):
    """Measures the size of a context on this GPU, for this run's shares."""
    found = differences(machine, python("stages", "context"))
    # Including the driver's memory for a program's first module and launch.
    size = sum(found[stage]["taken"] for stage in ("context", "module", "launch"))
    pathlib.Path(machine.options.work, "context").write_text(str(size), encoding="utf8")
    machine.context = size


def compared(machine, command, share, **sizes):
    """`differences` without a share and in one."""
    bare = differences(machine, command)
    try:
        return bare, differences(machine, command, share, **sizes)
    except Absent as why:
        raise Failed(f"works without a share; in a share: {why}") from None


def differences(machine, command, share=None, **sizes):
    """By the name of a stage: how many bytes more than at the stage before the GPU (`taken`), the process (`process`) and
    the account (`charged`) have, and the program's other values."""
    last, free = settled(machine.gpu), None
    process = machine.start(command, share, **sizes)
    found = {}
    try:
        for line in process.stdout:
            values = answered(json.loads(line))
            used = settled(machine.gpu, 2)
            charged = free - values["free"] if free is not None and values["free"] is not None else None
            mine = machine.gpu.processes().get(process.pid)
            found[values.pop("stage")] = {**values, "taken": used - last, "process": mine, "charged": charged}
            last, free = used, values["free"]
            send_line(process)
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode or not found:
        raise Failed(f"{short(command)}: ended with {process.returncode}: {errors.strip()[-400:]}")
    return found
