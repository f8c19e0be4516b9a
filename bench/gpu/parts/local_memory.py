"""Shows that local memory, which the driver allocates at a launch, is charged or refused before the launch."""

from harness.machine import GIB, MIB, python
from harness.result import with_target
from harness.stages import differences

TITLE = "local memory in a share"
SIZES = [1 << 10, 16 << 10, 64 << 10]
OUT_OF_MEMORY = 2


def run(machine):
    # 64 KiB per thread are about 17 GiB on an H100: far more than the share.
    cap = min(4 * GIB, machine.limit)
    before = 0
    found = differences(machine, python("stages", "local", *SIZES), "local", memory=cap)
    for size in SIZES:
        if str(size) not in found:
            continue
        one = found[str(size)]
        before += one["taken"]
        name = f"a launch with {size} bytes per thread in a share of {cap // MIB} MiB"
        code = one["code"]
        yield with_target(f"{name}: result", code, code in (0, OUT_OF_MEMORY), "0 or 2", charged=one["charged"])
        held, most = found["before"]["taken"] + before, machine.most(cap)
        yield with_target(f"{name}: held on the GPU, MiB", held // MIB, held <= most, f"<= {most // MIB}")
