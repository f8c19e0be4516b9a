"""Shows that an image's own driver, first in LD_LIBRARY_PATH, does not bypass the cap."""

import glob
import os
import pathlib
import shutil

from harness.machine import MIB, Absent, module
from harness.result import row, taken, with_target
from parts.ways import OUT_OF_MEMORY, TAKES, answers

TITLE = "the image's own libcuda, first in LD_LIBRARY_PATH"
# Folders of it in NVIDIA's images and packages.
PLACES = ["/usr/local/cuda*/compat", "/usr/local/cuda*/compat/lib*", "/opt/cuda/compat"]


def run(machine):
    if machine.why_no_share():
        raise Absent("no share can be made")
    too_much = machine.limit + MIB
    # If the driver does not refuse it, the GPU must have room for a process's memory and its managed memory.
    machine.may_take(2 * too_much)
    folders = [folder for pattern in PLACES for folder in glob.glob(pattern)]
    folders = [folder for folder in folders if os.path.exists(f"{folder}/libcuda.so.1")]
    if not folders:
        yield row("the image's own", "absent", f"none of {', '.join(PLACES)} has a libcuda.so.1")
    # An image that was made on such a machine has a copy of the driver.
    copy = pathlib.Path(machine.options.work, "compat")
    copy.mkdir(exist_ok=True)
    for name in ("libcuda.so.1", "libcuda.so"):
        shutil.copyfile(machine.driver.library("libcuda.so.1"), copy / name)
    for folder, name in [*((folder, folder) for folder in folders), (str(copy), "a copy of the driver")]:
        for load in ("name", "libcuda.so", "deepbind", "namespace"):
            codes = answers(machine, load, "exec", TAKES, too_much, {"LD_LIBRARY_PATH": folder})
            escaped = [take for take, code in codes.items() if code == 0]
            refused = [take for take, code in codes.items() if code == OUT_OF_MEMORY]
            what = f"{name}, loaded by {load}: ways beyond the cap"
            yield with_target(what, len(escaped), not escaped, "0", ways=escaped, refused=refused)
    if module("torch"):
        env = {"LD_LIBRARY_PATH": str(copy)}
        total = machine.program("total_torch", share="compat", env=env)["mem_get_info"]
        yield with_target("PyTorch's total with it", total, total == machine.limit, str(machine.limit))
    yield taken("libraries tried", len(folders) + 1)
