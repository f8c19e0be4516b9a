"""Shows that the shim without a cap page, loaded by LD_LIBRARY_PATH alone, gives no GPU."""

from harness.machine import python
from harness.result import with_target

TITLE = "the shim without a page refuses"


def run(machine):
    done = machine.run(python("victim"), env={"LD_LIBRARY_PATH": machine.shim})
    reasons = [line for line in done.stderr.splitlines() if line.startswith("tranche:")]
    refused = done.returncode != 0 and "cuInit" in done.stderr
    yield with_target("a program by LD_LIBRARY_PATH alone: cuInit", "refused" if refused else "done", refused, "refused")
    yield with_target("lines that give the reason", len(reasons), len(reasons) == 1, "1", line=reasons[:1])
