"""This machine, and programs on it: without a share, or in a share of `tranche run`."""

import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

KIT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
PROGRAMS = pathlib.Path(__file__).resolve().parent.parent / "programs"
MIB = 1 << 20
GIB = 1 << 30
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """A program failed."""


class Absent(Exception):
    """This machine lacks what a part needs."""


class Machine:
    """A GPU, its driver, and the kit's programs."""

    def __init__(self, driver, options):
        self.driver, self.options = driver, options
        self.nvml = driver.open_nvml()
        gpus = self.nvml.gpus()
        if options.gpu >= len(gpus):
            raise Failed(f"--gpu {options.gpu}: the driver has {len(gpus)} GPU(s), counted from 0")
        self.gpu = gpus[options.gpu]
        self.simulated = self.gpu.name.startswith("Simulated")
        self.total = self.gpu.memory().total
        # Whole GiB, which `nvidia-smi` shows without rounding.
        self.limit = (options.memory or max(1, self.total // 4 // GIB)) * GIB
        self.tranche, self.probe = KIT / "bin/tranche", KIT / "bin/tranche-shim-probe"
        self.shim = KIT / "shim"
        # Bytes of a context on this GPU with this driver, once measured. A share has room for a context beside its
        # memory.
        measured = pathlib.Path(options.work, "context")
        self.context = int(measured.read_text(encoding="utf8")) if measured.exists() else None

    def facts(self):
        """The machine's description in the results."""
        return {
            "gpu": self.gpu.name,
            "capability": self.gpu.capability,
            "memory": self.total,
            "driver": self.nvml.driver_version(),
            "cuda": self.nvml.cuda_version(),
            "driver_root": self.driver.root,
            "kernel": os.uname().release,
            "cpus": len(os.sched_getaffinity(0)),
            "python": sys.version.split()[0],
            "user": os.geteuid(),
            "simulated": self.simulated,
            "share": self.limit,
            "context": self.context,
        }

    def why_no_share(self):
        """Why `tranche run` cannot make a share here; None if it can."""
        done = self.run(["true"], "first", memory=GIB)
        return None if done.returncode == 0 else done.stderr.strip()[-400:] or f"it ended with {done.returncode}"

    def environment(self, in_share, more):
        env = {**os.environ, **{name: str(value) for name, value in more.items()}, "PYTHONDONTWRITEBYTECODE": "1"}
        folders = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
        if in_share:
            # A container has no second driver that the loader would find first.
            folders = [folder for folder in folders if not os.path.exists(os.path.join(folder, "libnvidia-ml.so.1"))]
        else:
            env["CUDA_VISIBLE_DEVICES"] = self.gpu.uuid
            if not self.driver.is_hosts_own:
                # After the folders that the caller names.
                folders.append(self.driver.folder)
        env["LD_LIBRARY_PATH"] = ":".join(folders)
        if not folders:
            del env["LD_LIBRARY_PATH"]
        return env

    def command(self, command, share, cores=100, memory=None):
        """The command without a share, or in the share of this name."""
        if share is None:
            return list(map(str, command))
        line = [self.tranche, "run", "--driver-root", self.driver.root, "--gpu", self.gpu.uuid, "--shim", self.shim]
        line += ["--share", share, "--memory", memory or self.limit, "--cores", cores]
        line += ["--context-memory", self.context] if self.context else []
        return list(map(str, [*line, "--", *command]))

    def start(self, command, share=None, env=None, wrap=lambda line: line, **sizes):
        """Starts it, as `wrap` changes the line. It ends when the part that started it ends."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            wrap(self.command(command, share, **sizes)),
            env=self.environment(share is not None, env or {}),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            preexec_fn=die_with_parent,
        )

    def run(self, command, share=None, send="", seconds=280, **how):
        """Runs it to its end."""
        process = self.start(command, share, **how)
        try:
            output, errors = process.communicate(send, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failed(f"{short(command)}: not ended after {seconds} s") from None
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def program(self, name, *arguments, **how):
        """Runs a program of the kit, and reads the JSON in its last line."""
        return self.result(self.run(python(name, *arguments), **how))

    def result(self, done):
        line = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode != 0 or not line.startswith("{"):
            output = (done.stderr.strip() or done.stdout.strip())[-600:]
            raise Failed(f"{short(done.args)}: ended with {done.returncode}: {output}")
        return answered(json.loads(line))

    def together(self, processes):
        """Makes all programs begin at the same moment, collects their results, and then ends all."""
        try:
            for process in processes:
                if process.stdout.readline().strip() != "ready":
                    process.kill()
                    raise Failed(f"{short(process.args)}: {process.communicate()[1].strip()[-600:]}")
            for process in processes:
                send_line(process)
            lines = [process.stdout.readline() for process in processes]
            # All programs run until each has counted.
            ends = [process.communicate() for process in processes if send_line(process)]
            for process, line, (_, errors) in zip(processes, lines, ends):
                if not line:
                    raise Failed(f"{short(process.args)}: ended with {process.returncode}: {errors.strip()[-600:]}")
            return [json.loads(line) for line in lines]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def most(self, memory):
        """Bytes that a share of one process may hold on the GPU; NVML counts whole blocks of 2 MiB."""
        return memory + self.context + 2 * MIB

    def may_take(self, size):
        """Fails if the GPU has less free memory than a program will allocate: more managed memory can hang a server."""
        free = self.gpu.memory().free
        if size > free:
            raise Absent(f"{size >> 20} MiB would be more than the {free >> 20} MiB that the GPU has free")


class Watch:
    """The largest number of bytes that the GPU held while it was watched, beyond those at the start."""

    def __init__(self, gpu, period=0.005):
        self.gpu, self.period = gpu, period
        self.start = self.peak = gpu.used()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self.ended.wait(self.period):
            self.peak = max(self.peak, self.gpu.used())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    @property
    def taken(self):
        return self.peak - self.start


def settled(gpu, seconds=10):
    """Waits until the GPU's memory in use is constant: the memory of ended processes is freed a little later."""
    last, since = gpu.used(), time.monotonic()
    start = since
    while time.monotonic() - start < seconds and time.monotonic() - since < 0.3:
        time.sleep(0.05)
        used = gpu.used()
        if used != last:
            last, since = used, time.monotonic()
    return last


def answered(values):
    """A program's answer, unless it says that this machine lacks what it needs."""
    if "absent" in values:
        raise Absent(values["absent"])
    return values


def send_line(process):
    """Sends the line that a program waits for; ignores a program that has ended."""
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass
    return process


def python(name, *arguments):
    return [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]


def module(name):
    """Whether this Python has a module; the module is not loaded."""
    code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def need_module(name):
    if not module(name):
        raise Absent(f"{sys.executable} has no {name}")


def tool(name):
    """A program of the CUDA toolkit."""
    folders = ["/usr/local/cuda/bin", "/opt/cuda/bin"]
    return shutil.which(name) or shutil.which(name, path=":".join(folders))


def short(command):
    names = [os.path.basename(str(word)) for word in command]
    at = names.index("--") + 1 if "--" in names else 0
    return " ".join(names[at:][-4:])


def die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
