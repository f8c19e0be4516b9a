"""Shows that all combinations of ways to load the driver, to start a program and to allocate memory are refused beyond the
share with error 2."""

from harness.machine import MIB, Failed
from harness.result import row, with_target, worst

TITLE = "ways around the cap"
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801
# Ways to load the driver and to allocate memory: see shim/tests/src/probe.rs.
LOADS = ["name", "deepbind", "global", "namespace", "default", "libcuda.so"]
TAKES = ["alloc", "managed", "async", "async-ptsz", "pitch"]
UNSET = "unset CUDA_VISIBLE_DEVICES; CUDA_DEVICE_MEMORY_LIMIT=999g LD_PRELOAD= LD_LIBRARY_PATH=/nowhere"
CHILDREN = {"as it is": "exec", "env -i": "exec env -i", "forged": UNSET, "new session": "exec setsid -w"}


def run(machine):
    too_much = machine.limit + MIB
    # If they are not refused, the GPU must have room for a process's memory and its managed memory.
    machine.may_take(2 * too_much)
    opened = list(gate(machine))
    yield from opened
    if worst(opened) != "held":
        yield row("ways around the cap", "failed", "not tried: there is no cap")
        return
    found = {}
    for load in LOADS:
        for name, child in CHILDREN.items():
            for take, code in answers(machine, load, child, TAKES, too_much).items():
                found[f"{take}, loaded by {load}, started {name}"] = code
    escaped = [way for way, code in found.items() if code == 0]
    # A function that the driver lacks allocates nothing. Any other error than "out of memory" is reported.
    strange = {way: code for way, code in found.items() if code not in (0, OUT_OF_MEMORY, NOT_SUPPORTED)}
    name = f"memory beyond the share, of {len(found)} ways tried"
    yield with_target(name, len(escaped), not escaped, "0", ways=escaped)
    yield with_target("refused by another error than 2", len(strange), not strange, "0", ways=strange)
    code = stranger_reads(machine)
    yield with_target("another process's pointer is read with error", code, code > 0, "not 0")


def stranger_reads(machine):
    """The result of reading memory by a pointer that another process of the share has."""
    holder = machine.start([machine.probe, "name"], "pointers")
    try:
        words = ["0", "0"]
        for command in ("init", "primary 0", f"alloc {MIB}"):
            holder.stdin.write(f"{command}\n")
            holder.stdin.flush()
            words = holder.stdout.readline().split()
            if words[:1] != ["0"]:
                raise Failed(f"the holder of a pointer, {command}: {words}")
        script = f"init\nprimary 0\nset 0 0\ncall cuMemcpyDtoH_v2 &0 {words[1]} 8\nend\n"
        done = machine.run([machine.probe, "name"], "pointers", send=script)
        lines = done.stdout.splitlines()
        if len(lines) < 4:
            raise Failed(f"the reader of a pointer: {lines}: {done.stderr.strip()[-300:]}")
        return int(lines[3])
    finally:
        holder.kill()
        holder.communicate()


def gate(machine):
    """The conditions that the other rows need."""
    script = f"init\nprimary 0\ninfo-total\nalloc {machine.limit + 1}\nend\n"
    loaded = "grep -q /usr/lib/tranche/libcuda.so.1 /proc/self/maps; echo $?"
    done = machine.run(["sh", "-c", f"{machine.probe} name; {loaded}"], "ways", send=script)
    lines = [line.split() for line in done.stdout.splitlines()]
    if len(lines) != 6 or [line[0] for line in lines[:3]] != ["0"] * 3:
        raise Failed(f"the probe in a share: {lines}: {done.stderr.strip()[-300:]}")
    total = int(lines[2][2])
    yield with_target("the total that is reported is the share", total, total == machine.limit, str(machine.limit))
    refusal = int(lines[3][0])
    yield with_target("a byte more is refused with", refusal, refusal == OUT_OF_MEMORY, str(OUT_OF_MEMORY))
    yield with_target("the shim is in every program", lines[5][0] == "0", lines[5][0] == "0", "True")


def answers(machine, load, child, takes, size, env=None):
    """The result code of each way to allocate this much memory."""
    # Rows of a MiB, one more than the share has.
    amounts = {"pitch": f"{MIB} {size // MIB + 1}"}
    lines = [f"{take} {amounts.get(take, size)}\n" for take in takes]
    script = f"init\nprimary 0\n{''.join(lines)}end\n"
    done = machine.run(["sh", "-c", f"{child} {machine.probe} {load}"], "ways", send=script, env=env)
    codes = [line.split()[0] for line in done.stdout.splitlines()]
    if codes[:2] != ["0", "0"] or len(codes) != len(takes) + 3:
        raise Failed(f"loaded by {load}, {child}: {codes}: {done.stderr.strip()[-300:]}")
    return {take: int(code) for take, code in zip(takes, codes[2:])}
