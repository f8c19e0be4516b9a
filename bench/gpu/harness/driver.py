"""Finds the NVIDIA driver on this machine. Where drivers are, only `tranche` knows."""

import os
import pathlib
import re
import shutil
import subprocess

from harness.machine import KIT
from harness.nvml import Nvml

TRANCHE = KIT / "bin/tranche"
LIBRARIES = ["libcuda.so.1", "libnvidia-ml.so.1"]
PROGRAMS = ["nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"]


class NoDriver(Exception):
    """There is no working NVIDIA driver."""


class Driver:
    """A driver's root, for `tranche run`, and its libraries' folder, for programs without a share."""

    def __init__(self, root, folder):
        self.root = os.path.realpath(root)
        self.folder = str(folder)

    def library(self, name):
        return os.path.join(self.folder, name)

    def open_nvml(self):
        return Nvml(self.library("libnvidia-ml.so.1"))

    @property
    def is_hosts_own(self):
        return self.root == "/"


def find(root, work):
    """The driver that `tranche` finds below `root`, or in the usual places. If it finds none, a driver in a folder of the
    loader is copied into a root in the folder `work`."""
    driver, why = found(["--driver-root", root] if root else [])
    for place in [] if root or driver else loaders_folders():
        if all((place / name).exists() for name in LIBRARIES):
            copy = copied(place, pathlib.Path(work, "driver-root"))
            driver, why = found(["--driver-root", copy])
        if driver:
            break
    if not driver:
        raise NoDriver(f"no working NVIDIA driver: {why}. Give its root with --driver-root")
    return driver


def found(options):
    """The driver, or None and the reason."""
    done = subprocess.run([TRANCHE, "driver", *options], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and len(lines) == 2:
        return Driver(*lines), None
    return None, done.stderr.strip() or f"{TRANCHE} driver: ended with {done.returncode}"


def loaders_folders():
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    if os.path.exists(ldconfig):
        cache = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
        folders += [os.path.dirname(path) for path in re.findall(r"libnvidia-ml\.so\.1 .*=> (\S+)", cache)]
    return [pathlib.Path(folder) for folder in dict.fromkeys(folders) if folder and os.path.isdir(folder)]


def copied(folder, root):
    """A root with copies of the driver's libraries and programs."""
    libraries = root / "usr/lib64"
    programs = root / "usr/bin"
    for place in (libraries, programs):
        place.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        name = path.name
        if ".so" in name and re.match(r"lib(cuda|nvidia|nvcuvid|nvoptix)", name) and not (libraries / name).exists():
            if path.is_symlink() and "/" not in os.readlink(path):
                (libraries / name).symlink_to(os.readlink(path))
            else:
                shutil.copy2(path, libraries / name)
    for program in PROGRAMS:
        for place in (folder.parent / "bin" / program, shutil.which(program)):
            if place and os.path.exists(place):
                shutil.copy2(place, programs / program)
                break
    return root
