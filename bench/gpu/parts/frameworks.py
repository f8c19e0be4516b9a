"""Shows whether nvidia-smi and the installed frameworks see the share, can use it up to its cap, and are refused more by their
own error. PyTorch has a part of its own."""

from harness.machine import GIB, MIB, Watch, module, python, settled
from harness.result import guarded, row, with_target

TITLE = "nvidia-smi, and frameworks filled to the cap"
# By default JAX takes three quarters of the GPU. The rest is for its libraries and their code.
JAX = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
# A program, the module that it needs, its name in the results, its settings.
PROGRAMS = [
    ("driver", "ctypes", "driver API", {}),
    ("cupy", "cupy", "CuPy", {}),
    ("jax", "jax", "JAX, preallocate off", {**JAX, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    ("jax", "jax", "JAX, preallocate on", {**JAX, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
    ("triton", "triton", "Triton", {}),
    ("numba", "numba.cuda", "numba", {}),
]
# The percentage of the cap that a program must reach: the rest is its libraries' own memory.
REACHED = 85


def run(machine):
    yield view(machine)
    for program, needed, name, settings in PROGRAMS:
        top = needed.split(".", maxsplit=1)[0]
        if not module(top):
            yield row(name, "absent", f"no module {top}")
        else:
            yield from guarded(name, filled(machine, program, name, settings))


def view(machine):
    """nvidia-smi shows one GPU, of the share's size."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    done = machine.run(query, "view")
    if done.returncode == 127:
        return row("nvidia-smi", "absent", "no nvidia-smi with this driver")
    shown, expected = done.stdout.strip(), f"{machine.gpu.uuid}, {machine.limit // MIB}"
    return with_target("nvidia-smi: one GPU of the share's size", shown, shown == expected, expected)


def filled(machine, program, name, settings):
    """The memory that a program reaches, the error that refuses more, and NVML's highest value meanwhile."""
    settled(machine.gpu)
    piece = min(GIB, machine.limit // 8)
    with Watch(machine.gpu) as watch:
        line = python(f"fill_{program}", piece)
        found = machine.result(machine.run(line, "fill", env=settings, seconds=120))
    percent = 100 * found["reached"] / machine.limit
    expected = found.get("expected", "CUDA_ERROR_OUT_OF_MEMORY")
    good = REACHED <= percent <= 100 and found.get("works", True)
    about = {"bytes": found["reached"], "version": found.get("version"), "total": found["total"]}
    yield with_target(f"{name}: reached, percent of the cap", round(percent, 2), good, f"{REACHED} to 100", **about)
    yield with_target(f"{name}: refused by", found["kind"], found["kind"] == expected, expected)
    most = machine.most(machine.limit)
    yield with_target(f"{name}: held at most, by NVML, MiB", watch.taken // MIB, watch.taken <= most, f"<= {most // MIB}")
