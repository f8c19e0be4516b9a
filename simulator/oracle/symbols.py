#!/usr/bin/env python3
"""Compares the symbol table of the simulated libcuda with NVIDIA's own driver.

    symbols.py check LIBCUDA            the simulator's library as built, against the real one of driver 535
    symbols.py check LIBCUDA DRIVER     as installed for a driver's CUDA version, against that driver's libcuda

The reference is Debian's libcuda1 (fetched by ../debian-driver), whose cuGetProcAddress works without a GPU and before
cuInit. Functions that are newer than that driver come from the headers of NVIDIA's wheels on PyPI.
"""

import collections
import ctypes
import os
import pathlib
import re
import struct
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "tranche"
WHEELS = ["nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-runtime==13.5.37"]

# Every CUDA version with a new form of some function, and neighbours.
VERSIONS = sorted(
    {1, 1999, 3019, 12019, 13000, 99990}
    | {2000, 2010, 2020, 2030, 3000, 3010, 3020, 4000, 4010, 4020, 5000, 5050, 6000, 6050}
    | {7000, 7050, 8000, 9000, 9010, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030}
    | {11040, 11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080}
)
LEGACY, PER_THREAD = 0, 2
STT_FUNC = 2
# Functions that NVIDIA's headers declare and only Tegra's driver exports.
TEGRA = {"cuEventCreateFromEGLSync"}


def dynamic_symbols(path):
    """Exported functions of a 64-bit ELF file: name to offset."""
    data = pathlib.Path(path).read_bytes()
    table, entry, count = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
    dynsym = next(s for s in sections if s[1] == 11)
    strings = sections[dynsym[6]][4]
    found = {}
    for at in range(dynsym[4], dynsym[4] + dynsym[5], 24):
        name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, at)
        if section and value and info >> 4 and info & 15 == STT_FUNC:
            end = data.index(b"\0", strings + name)
            found[data[strings + name : end].decode()] = value
    return found


class Library:
    """A loaded libcuda that knows the symbol of each pointer."""

    def __init__(self, path, mode=ctypes.DEFAULT_MODE):
        self.handle = ctypes.CDLL(str(path), mode)
        self.symbols = {n: v for n, v in dynamic_symbols(path).items() if n.startswith("cu")}
        first = next(iter(self.symbols))
        base = ctypes.cast(getattr(self.handle, first), ctypes.c_void_p).value - self.symbols[first]
        self.names = {base + value: name for name, value in self.symbols.items()}
        self.second = self.handle.cuGetProcAddress_v2
        self.second.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        self.first = self.handle.cuGetProcAddress
        self.first.argtypes = self.second.argtypes[:4]

    def ask(self, name, version, flags):
        """Result, status and symbol, from the form with a status."""
        pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
        result = self.second(name.encode(), ctypes.byref(pointer), version, flags, ctypes.byref(status))
        return result, status.value, self.names.get(pointer.value, pointer.value)

    def ask_first(self, name, version, flags):
        """Result and symbol, from the form of CUDA 11."""
        pointer = ctypes.c_void_p()
        result = self.first(name.encode(), ctypes.byref(pointer), version, flags)
        return result, self.names.get(pointer.value, pointer.value)


def base_names(symbols):
    names = set()
    for symbol in symbols:
        name = re.sub(r"_(ptsz|ptds)$", "", symbol)
        names |= {symbol, name, re.sub(r"_v\d+$", "", name)}
    return names


def oracle():
    folder = subprocess.check_output([HERE.parent / "debian-driver", "libcuda1"], text=True).strip()
    return next(pathlib.Path(folder).glob("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.*.*"))


def headers():
    """Exported names and versions of typedefs in NVIDIA's headers."""
    folder = CACHE / "cuda-headers"
    folder.mkdir(parents=True, exist_ok=True)
    symbols, typedefs = set(), collections.defaultdict(set)
    for wheel in WHEELS:
        name, version = wheel.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wheel]
            subprocess.run(command, check=True)
        with zipfile.ZipFile(next(folder.glob(pattern))) as archive:
            read = lambda names: "".join(archive.read(n).decode(errors="replace") for n in names)
            included = [n for n in archive.namelist() if "/include/cu" in n and n.endswith(".h")]
            text = read(n for n in included if re.search(r"/cuda(|[A-Z]\w*)\.h$", n) and "Typedefs" not in n)
            types = read(n for n in included if re.search(r"/cuda\w*Typedefs\.h$", n))
        # WGL is Windows' own.
        symbols |= set(re.findall(r"CUDAAPI\s+(cu(?!WGL)[A-Z]\w+)\s*\(", text))
        symbols |= set(re.findall(r"#define\s+cu\w+\s+(cu[A-Z]\w+_v\d+)", text))
        for kind, name in re.findall(r"__CUDA_API_(PTSZ|PTDS)\((cu\w+)\)", text):
            symbols |= {name, f"{name}_{kind.lower()}"}
        for name, version in re.findall(r"\*PFN_(cu(?!WGL)\w+?)_v(\d{4,5})(?:_ptsz|_ptds)?\)", types):
            typedefs[name].add(int(version))
    return symbols - TEGRA, collections.defaultdict(set, {n: v for n, v in typedefs.items() if n not in TEGRA})


def check(path, driver=None):
    # The driver's symbols come first in this process, as a shim's would. The simulator must not use them in place of its
    # own.
    real = Library(driver or oracle(), ctypes.RTLD_GLOBAL)
    ours = Library(path)
    wrong = 0
    names = sorted(base_names(real.symbols)) + ["", "cuNothing", "malloc"]
    for name in names:
        # Flags above 3 are refused whatever the name is.
        for flags in range(5):
            for version in VERSIONS:
                expected, got = real.ask(name, version, flags), ours.ask(name, version, flags)
                if expected != got:
                    print(f"{name} {version} flags {flags}: driver {expected}, simulator {got}")
                    wrong += 1
        for version in VERSIONS:
            expected, got = real.ask_first(name, version, 0), ours.ask_first(name, version, 0)
            if expected != got:
                print(f"{name} {version} (first form): driver {expected}, simulator {got}")
                wrong += 1
    # NVIDIA's debugger interface is not CUDA's.
    missing = {s for s in real.symbols if not s.startswith("cudbg")} - set(ours.symbols)
    if driver:
        for symbol in sorted(set(ours.symbols) - set(real.symbols)):
            print(f"{symbol} is exported, and the driver does not export it")
            wrong += 1
    try:
        missing |= set() if driver else headers()[0] - set(ours.symbols)
    except subprocess.CalledProcessError:
        print("the headers could not be fetched: only the driver's own exports were checked", file=sys.stderr)
    for symbol in sorted(missing):
        print(f"{symbol} is not exported")
    print(f"{len(names)} names at {len(VERSIONS)} versions, {len(real.symbols)} symbols: {wrong + len(missing)} differ")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["check", library, *driver]:
            sys.exit(check(library, *driver))
        case _:
            sys.exit(__doc__)
