"""Programs of counted work (programs/spin.py), without a share and in several shares, and the rows about them."""

import json
import pathlib

from harness.machine import python
from harness.result import row, with_target
from harness.sampling import Sampling

# For kernels up to a number of microseconds: seconds to settle, and seconds to count. The scale of prices moves by 3 percent
# ten times a second, so the worst first price, that of four programs for one, is corrected in five seconds. A share of a
# quarter starts a kernel of 2 s every 8 s, so three of them are counted.
TIMES = [(10_000, 5, 4), (100_000, 5, 10), (10_000_000, 8, 24)]
QUICK = (0.3, 1)
# Kernels in microseconds: those of usual programs, and the shortest and longest.
USUAL, SHORT, LONG = [25, 100, 1_000, 10_000], [10], [100_000, 2_000_000]
QUICK_KERNELS = {10, 1_000, 100_000}
# Points by which a share's part of the GPU's time may be off, and the least of Jain's index.
OFF, JAIN = 5, 0.99
# The least percent of the time in which a program without a share must keep the GPU busy, to be a measure for others.
BUSY = 75


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


def lengths(machine, kernels):
    """The kernels with which a part measures."""
    return [one for one in kernels if one in QUICK_KERNELS or not machine.options.quick]


def command(machine, micros, settle, count, graph=0):
    steps = max(1, round(micros * steps_per_micro(machine)))
    return python("spin", micros, steps, settle, count, graph)


def whole(machine, micros, graph=0):
    """Kernels per second of one program without a share."""
    line = command(machine, micros, *((0.3, 1) if micros < 1_000_000 or machine.options.quick else (2, 6)), graph)
    return machine.together([machine.start(line)])[0]["kernels"]


def together(machine, micros, cores, bare, times_=None, graph=0):
    """Programs in shares of these percentages at the same time: for each its PID, and its GPU time in percent of the whole;
    and what was read meanwhile."""
    memory = min(machine.limit, (machine.total - machine.total // 8) // len(cores) - (1 << 30))
    line = command(machine, micros, *(times_ or times(machine, micros)), graph)
    started = [
        machine.start(line, f"counted-{n}", cores=one, memory=max(memory, 1 << 30)) for n, one in enumerate(cores)
    ]
    with Sampling(machine.gpu, [one.pid for one in started]) as read:
        found = machine.together(started)
    return [(one.pid, 100 * counted["kernels"] / bare, counted) for one, counted in zip(started, found)], read


def shares(machine, micros, cores, graph=0):
    """The rows of shares of these percentages at the same time. Each has what explains a miss."""
    bare = whole(machine, micros, graph)
    beside = "alone" if len(cores) == 1 else f"of {'/'.join(map(str, cores))}"
    kernels = f"{f'graphs of {graph} ' if graph else ''}kernels of {named(micros)}"
    busy = 100 * bare * micros / 1e6
    if busy < BUSY:
        why = f"without a share the program keeps the GPU busy for {busy:.0f} percent of the time: it launches too slowly"
        yield row(f"{'/'.join(map(str, cores))}, {kernels}", "absent", why)
        return
    found, read = together(machine, micros, cores, bare, graph=graph)
    parts = [percent for _, percent, _ in found]
    for wanted, (pid, percent, counted) in zip(cores, found):
        series = read.series(pid)
        about = {"bare": busy, "series": series, "longest": counted["longest"]}
        name = f"{wanted} {beside}, {kernels}, percent"
        good = abs(percent - wanted) <= OFF
        yield with_target(name, round(percent, 2), good, f"{wanted} ± {OFF}", "" if good else cause(series), **about)
    if len(parts) > 1 and len(set(cores)) == 1:
        total = sum(parts)
        jain = total**2 / (len(parts) * sum(one**2 for one in parts))
        name = f"{len(parts)} x {cores[0]}, {kernels}"
        yield with_target(f"{name}: Jain's index", jain, jain >= JAIN, f">= {JAIN}")
        yield with_target(f"{name}: their sum, percent", round(total, 2), abs(total - 100) <= OFF, f"100 ± {OFF}")


def cause(series):
    """What a share's readings say about a miss, in one line."""

    def span(name):
        values = [one for one in series[name] if one is not None]
        return f"{name} {values[0]:g}, {min(values):g} to {max(values):g}, {values[-1]:g}" if values else f"{name} not read"

    seen = [one for one in series["nvml"] if one is not None]
    mean = f"{sum(seen) / len(seen):.0f} percent in {len(seen)} of {len(series['nvml'])} readings" if seen else "no sample"
    return f"first, range and last: {'; '.join(map(span, ('scale', 'position', 'carried')))}; NVML: {mean}"


def named(micros):
    if micros < 1_000:
        return f"{micros} µs"
    return f"{micros // 1_000} ms" if micros < 1_000_000 else f"{micros // 1_000_000} s"
