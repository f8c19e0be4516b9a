"""Programs of counted work (programs/spin.py), without a share and in several shares."""

import json
import pathlib

from harness.machine import python

# For kernels up to a number of microseconds: seconds to settle, and seconds to count. A share of a quarter starts a kernel of
# 2 s every 8 s, so three of them are counted.
TIMES = [(10_000, 3, 5), (100_000, 5, 15), (10_000_000, 6, 24)]
QUICK = (0.3, 1)


def steps_per_micro(machine):
    """Steps of the spin kernel in a microsecond, measured once on a machine."""
    kept = pathlib.Path(machine.options.work, "steps")
    if not kept.exists():
        kept.write_text(json.dumps(machine.program("calibrate")["steps"]), encoding="utf8")
    return json.loads(kept.read_text(encoding="utf8"))


def times(machine, micros):
    if machine.options.quick:
        return QUICK
    return next((settle, count) for most, settle, count in TIMES if micros <= most)


def command(machine, micros, settle, count, graph=0):
    steps = max(1, round(micros * steps_per_micro(machine)))
    return python("spin", micros, steps, settle, count, graph)


def whole(machine, micros, graph=0):
    """Kernels per second of one program without a share."""
    line = command(machine, micros, *((0.3, 1) if micros < 1_000_000 or machine.options.quick else (2, 6)), graph)
    return machine.together([machine.start(line)])[0]["kernels"]


def programs(machine, micros, shares, settle, count, graph=0):
    """One program started in each share; `shares` are their sizes."""
    line = command(machine, micros, settle, count, graph)
    return [machine.start(line, f"counted-{n}", **sizes) for n, sizes in enumerate(shares)]


def percents(machine, micros, cores, bare, graph=0):
    """The GPU time that shares of these percentages get at the same time, in percent of the whole."""
    memory = min(machine.limit, (machine.total - machine.total // 8) // len(cores) - (1 << 30))
    sizes = [{"cores": one, "memory": max(memory, 1 << 30)} for one in cores]
    started = programs(machine, micros, sizes, *times(machine, micros), graph=graph)
    return [100 * found["kernels"] / bare for found in machine.together(started)]


def lengths(machine):
    """The kernels with which shares are measured, in microseconds."""
    return [1_000, 100_000] if machine.options.quick else [10, 100, 1_000, 10_000, 100_000, 2_000_000]


def named(micros):
    if micros < 1_000:
        return f"{micros} µs"
    return f"{micros // 1_000} ms" if micros < 1_000_000 else f"{micros // 1_000_000} s"
