"""Shows that a program under NVIDIA's tools runs in a share as without one, and that the tools have the same output."""

import pathlib
import re

from harness.machine import Failed, python, tool
from harness.result import row, with_target

TITLE = "cuda-gdb, compute-sanitizer and ncu in a share"


def run(machine):
    victim = python("victim")
    for name, line, reading in (
        ("compute-sanitizer", ["--tool", "memcheck", *victim], sanitizer),
        ("cuda-gdb", ["-batch", "-nx", "-ex", "run", "-ex", "info cuda kernels", "--args", *victim], debugger),
        ("ncu", ["--clock-control", "none", "--metrics", "launch__grid_size", *victim], profiler),
    ):
        program = tool(name)
        if not program:
            yield row(name, "absent", f"no {name}")
            continue
        home = pathlib.Path(machine.options.work, name)
        home.mkdir(exist_ok=True)
        env = {"HOME": home, "TMPDIR": home}
        try:
            bare = reading(machine.run([program, *line], env=env, seconds=100))
            share = reading(machine.run([program, *line], "tools", env=env, seconds=100))
        except Failed as error:
            yield row(name, "failed", str(error))
            continue
        if not bare["works"]:
            yield row(name, "absent", f"it does not work on this machine without a share: {bare['output'][-200:]}")
            continue
        good = share == bare if share["works"] else False
        yield with_target(f"{name}: in a share as without", summary(share), good, summary(bare), output=share["output"])


def summary(found):
    return f"{found['found']}, ended with {found['code']}"


def read(done, pattern):
    output = done.stdout + done.stderr
    found = [" ".join(one.split()) for one in re.findall(pattern, output)]
    works = '"sum": 42' in output and bool(found)
    return {"works": works, "found": ", ".join(found), "code": done.returncode, "output": "" if works else output[-600:]}


def sanitizer(done):
    return read(done, r"ERROR SUMMARY: \d+ errors?")


def debugger(done):
    return read(done, r"exited normally|exited with code \d+")


def profiler(done):
    return read(done, r"launch__grid_size[^\n]*")
