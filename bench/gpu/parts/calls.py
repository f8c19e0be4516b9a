"""Shows the time that the shim adds to calls, in turns with the bare driver. The share has 99 percent: launches are priced."""

import statistics

from harness.machine import GIB, Failed
from harness.result import taken, with_target

TITLE = "time added to calls, with cores 99"
CORES = 99
LIVE = 1_000
# The limit of a call with the shim: this many times the bare driver's time, or this many nanoseconds more.
TARGETS = {
    "launch": 15,
    "alloc-free": 150,
    "alloc-free-live": 150,
    "refusal": 300,
    "mem-info": 50,
    "proc-address": 100,
    # Nothing is promised: the pool is asked for its size.
    "alloc-free-async": None,
}
RATIO = 1.05


def run(machine):
    rounds, most = (1, 2) if machine.options.quick else (3, 16)
    # The share is charged for the context of each process.
    fits = max(1, machine.limit // (2 * GIB))
    for processes in [one for one in (1, 4, 16) if one <= min(most, fits)] + ([2] if machine.options.quick else []):
        found = {}
        for _ in range(rounds):
            for share in (None, "calls"):
                for call, nanoseconds in together(machine, processes, share):
                    found.setdefault((share, call), []).append(nanoseconds)
        for call, target in TARGETS.items():
            bare, share = (statistics.median(found[(world, call)]) for world in (None, "calls"))
            name = f"{call}, {processes} process(es), ns"
            numbers = {"bare": bare, "added": share - bare, "ratio": share / bare}
            if target is None:
                yield taken(name, share, **numbers)
                continue
            good = share - bare <= target or share <= RATIO * bare
            yield with_target(name, share, good, f"bare + {target} or x {RATIO}", **numbers)


def together(machine, processes, share):
    """(call, nanoseconds) of all processes. They start timing when all are ready."""
    line = [machine.probe, "name"]
    started = [machine.start(line, share, cores=CORES) for _ in range(processes)]
    try:
        for process in started:
            process.stdin.write("init\nprimary 0\n")
            process.stdin.flush()
            if [process.stdout.readline().split()[:1] for _ in range(2)] != [["0"], ["0"]]:
                raise Failed(f"the probe does not start: {process.communicate()[1].strip()[-300:]}")
        for process in started:
            process.stdin.write(f"cost {LIVE}\nend\n")
            process.stdin.flush()
        for process in started:
            output, errors = process.communicate(timeout=200)
            words = output.split()
            if process.returncode or words[:1] != ["0"]:
                raise Failed(f"the probe ended with {process.returncode}: {errors.strip()[-300:]}")
            yield from zip(words[1:-1:2], map(float, words[2:-1:2]))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
