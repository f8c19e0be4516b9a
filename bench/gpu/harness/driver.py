"""Finds the NVIDIA driver's files on this machine."""

import glob
import os
import pathlib
import re
import shutil
import subprocess

from harness.nvml import Nvml, NvmlError

# Roots that `tranche run --driver-root` accepts, and the folders in them that it searches.
ROOTS = ["/", "/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/run/nvidia/driver"]
FOLDERS = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
]
# Other folders with a driver's libraries, besides LD_LIBRARY_PATH and the loader's cache.
ELSEWHERE = ["/usr/local/nvidia/lib", "/usr/local/nvidia/**", "/opt/nvidia/lib64", "/usr/lib/wsl/lib"]
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
    """The driver below `root`, or in one of the usual places. A driver in a place that `tranche run` does not search is
    copied into a root in the folder `work`."""
    searched, problems = [], []
    for candidate in [root] if root else ROOTS:
        for folder in FOLDERS:
            place = pathlib.Path(candidate, folder)
            searched.append(str(place))
            driver = usable(Driver(candidate, place), problems)
            if driver:
                return driver
    for place in elsewhere(root):
        searched.append(str(place))
        if (place / "libcuda.so.1").exists() and (place / "libnvidia-ml.so.1").exists():
            driver = usable(copied(place, pathlib.Path(work, "driver-root")), problems)
            if driver:
                return driver
    why = "; ".join(problems) or f"no libcuda.so.1 and libnvidia-ml.so.1 in {', '.join(searched)}"
    raise NoDriver(f"no working NVIDIA driver: {why}. Give its root with --driver-root")


def usable(driver, problems):
    """The driver, if its libraries exist and its NVML starts; otherwise None."""
    if not (os.path.exists(driver.library("libcuda.so.1")) and os.path.exists(driver.library("libnvidia-ml.so.1"))):
        return None
    try:
        driver.open_nvml()
    except NvmlError as error:
        problems.append(str(error))
        return None
    return driver


def elsewhere(root):
    if root:
        return [pathlib.Path(place) for place in glob.glob(f"{root}/**", recursive=True) if os.path.isdir(place)]
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for pattern in ELSEWHERE:
        folders += glob.glob(pattern, recursive=True)
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
    return Driver(root, libraries)
