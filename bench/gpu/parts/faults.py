"""Shows what a kernel that writes to memory which is not allocated means for its program and for another share of the GPU."""

from harness.machine import python, send_line
from harness.result import with_target

TITLE = "a fault of a kernel beside another share"
ILLEGAL_ADDRESS = 700


def run(machine):
    half = machine.limit // 2
    beside = machine.start(python("fault", "beside"), share="beside", memory=half, cores=50)
    beside.stdout.readline()
    for share in (None, "faulty"):
        codes = machine.program("fault", "faulty", share=share, memory=half, cores=50)
        for call, code in codes.items():
            what = f"{call} after it, {'in a share' if share else 'bare'}: result"
            yield with_target(what, code, code == ILLEGAL_ADDRESS, str(ILLEGAL_ADDRESS))
    send_line(beside)
    output, errors = beside.communicate(timeout=60)
    is_whole = output.strip().endswith('{"wrong": 0}')
    yield with_target("the program beside it", "works" if is_whole else "failed", is_whole, "works", errors=errors[-300:])
