"""Shows how NVML's samples at 10 Hz, the input of the node's sampler, describe two programs of counted work."""

from harness.counted import together, whole
from harness.result import taken, with_target
from harness.sampling import PERIOD

TITLE = "NVML's samples at 10 Hz under two counted programs"
CORES = (30, 70)
MICROS = 1_000
# How far NVML's figures may be from the work, in percent of the GPU's time.
POINTS = 5


def run(machine):
    seconds = 2 if machine.options.quick else 15
    bare = whole(machine, MICROS)
    found, sampling = together(machine, MICROS, CORES, bare, (seconds / 3, seconds))
    readings = len(sampling.samples)
    yield taken("readings", readings, seconds=seconds, period=PERIOD)
    answers = by_answer(sampling.samples)
    lengths = sorted(length for length, _ in answers)
    middle = lengths[len(lengths) // 2] if lengths else None
    yield taken("time that an answer describes, microseconds", middle, lengths=lengths)
    named = [len(parts) for _, parts in answers]
    yield taken("answers that name one process only", named.count(1), of=len(named))
    for (pid, work, _), cores in zip(found, CORES):
        mine = [[(at, sm) for one, at, sm in read if one == pid] for read in sampling.samples]
        there = [one for one in mine if one]
        percents = [sm for one in there for _, sm in one]
        mean = sum(percents) / len(percents) if percents else None
        reckoned = sum(length * parts.get(pid, 0) for length, parts in answers) / max(sum(lengths), 1)
        apart = distances([at for one in there for at, _ in one])
        name = f"the program with {cores} percent"
        yield taken(f"{name}: its work, percent of the whole", work)
        yield taken(f"{name}: mean of NVML's percents", mean, series=sampling.series(pid))
        what = f"{name}: its work as the node's sampler adds it up, percent"
        yield with_target(what, reckoned, abs(reckoned - work) <= POINTS, f"{work:.0f} ± {POINTS}")
        yield taken(f"{name}: readings without a sample of it", len(mine) - len(there), of=readings, micros_apart=apart)
        memory = [listed.get(pid) for listed in sampling.memory]
        named = [one for one in memory if one is not None]
        whole_time = f"{len(named)} of {len(memory)}"
        good = len(named) > len(memory) // 2
        what = f"{name}: readings in which NVML reports its memory"
        yield with_target(what, whole_time, good, "most", bytes=max(named, default=None))
    strangers = {pid for read in sampling.samples for pid, _, _ in read} - {pid for pid, _, _ in found}
    yield taken("PIDs in samples that belong to no program of this part", len(strangers))


def by_answer(readings):
    """For each answer after the first: the microseconds since the previous one, and the percent of each PID."""
    answers, before = [], None
    for found in readings:
        if not found:
            continue
        newest = max(at for _, at, _ in found)
        if before is not None and newest > before:
            answers.append((newest - before, {pid: sm for pid, _, sm in found}))
        before = newest
    return answers


def distances(times):
    """The shortest, median and longest time between samples, microseconds."""
    apart = sorted(b - a for a, b in zip(times, times[1:]))
    return [apart[0], apart[len(apart) // 2], apart[-1]] if apart else []
