"""The shim loaded by LD_LIBRARY_PATH alone, without a cap page: no page, no GPU."""

from harness.machine import python
from harness.result import judged

TITLE = "the shim without a page refuses"


def run(machine):
    done = machine.run(python("victim"), env={"LD_LIBRARY_PATH": machine.shim})
    said = [line for line in done.stderr.splitlines() if line.startswith("tranche:")]
    refused = done.returncode != 0 and "cuInit" in done.stderr
    yield judged("a program by LD_LIBRARY_PATH alone: cuInit", "refused" if refused else "done", refused, "refused")
    yield judged("says why, lines", len(said), len(said) == 1, "1", line=said[:1])
