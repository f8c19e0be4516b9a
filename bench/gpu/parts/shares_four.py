"""Four shares of 25 percent at the same time: they are equal, and together use the whole GPU."""

from harness.counted import lengths, named, percents, whole
from harness.result import with_target

TITLE = "four shares of 25 percent beside each other, by counted work"
CORES = [25] * 4
JAIN, OFF = 0.99, 5


def run(machine):
    for micros in lengths(machine):
        bare = whole(machine, micros)
        found = percents(machine, micros, CORES, bare)
        total, squares = sum(found), sum(one**2 for one in found)
        jain = total**2 / (len(found) * squares)
        each = [round(one, 2) for one in found]
        name = f"4 x 25, kernels of {named(micros)}"
        yield with_target(f"{name}: Jain's index", jain, jain >= JAIN, f">= {JAIN}", each=each)
        good = abs(total - 100) <= OFF
        yield with_target(f"{name}: their sum, percent", round(total, 2), good, f"100 ± {OFF}", each=each)
        farthest = round(max(abs(one - 25) for one in found), 2)
        yield with_target(f"{name}: the farthest from 25, points", farthest, farthest <= OFF, f"<= {OFF}", each=each)
