"""Shows that every look-up is exact: each symbol, version and flag of cuGetProcAddress, with and without the shim."""

import pathlib
import sys

from harness.machine import KIT, Absent, Failed
from harness.result import row, taken, with_target

sys.path.insert(0, str(KIT / "simulator/oracle"))

TITLE = "every look-up is exact under this driver"
SYMBOLS = KIT / "shim/symbols.txt"
# Versions at which no symbol of the shim changes, and one of the future.
ALWAYS = {0, 1, 99_990}


def run(machine):
    from symbols import dynamic_symbols

    if machine.why_no_share():
        raise Absent("the shim answers look-ups in a share only")
    known = {line.split()[0]: line.split() for line in SYMBOLS.read_text(encoding="utf8").splitlines()}
    library = pathlib.Path(machine.driver.library("libcuda.so.1")).resolve()
    exported = {name for name in dynamic_symbols(library) if name.startswith("cu")}
    unknown = sorted(exported - set(known))
    yield taken("functions that the driver exports", len(exported), version=machine.nvml.driver_version())
    yield with_target("of these, unknown to the shim", len(unknown), not unknown, "0", unknown=unknown)
    classes = {name: words[1] for name, words in known.items()} | {name: "passes" for name in unknown}
    text = " ".join(map(str, versions(known, machine.nvml.cuda_version()))) + "".join(
        f"\n{name} {kind}" for name, kind in sorted(classes.items())
    )
    listed = pathlib.Path(machine.options.work, "symbols")
    listed.write_text(text, encoding="utf8")
    done = machine.run([machine.probe, "name"], "lookups", send=f"init\ncompare {listed}\nend\n")
    lines = done.stdout.splitlines()
    if len(lines) < 2 or done.returncode:
        raise Failed(f"the probe ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    _, same, ours, different, first, *names = lines[1].split(" ")
    yield row("cuInit in a share", "held" if lines[0] == "0" else "failed", value=lines[0])
    yield taken("look-ups that give the driver's own pointer", int(same))
    yield taken("look-ups that give exactly our variant of the driver's function", int(ours))
    names = names[0].split(",") if names and names[0] else []
    good = int(different) == 0 and int(ours) > 0
    yield with_target("look-ups with any other answer", int(different), good, "0", first=first, names=names)


def versions(known, newest):
    """Versions just before and at each change of an answer, and each release of the driver's own generation."""
    since = {number(words[2]) for words in known.values() if words[2] != "-"}
    ours = range(newest // 1000 * 1000, newest + 20, 10)
    return sorted(ALWAYS | since | {one - 1 for one in since} | set(ours))


def number(version):
    major, minor = version.split(".")
    return int(major) * 1000 + int(minor) * 10
