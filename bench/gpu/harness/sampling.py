"""What is known about programs while they run, ten times a second: NVML's samples and list, and the pages of their shares."""

import threading
import time

from harness import pages

PERIOD = 0.1


class Sampling:
    """Reads until the end of the `with` block."""

    def __init__(self, gpu, pids=()):
        self.gpu, self.pids, self.ended = gpu, pids, threading.Event()
        # Of each reading: its time in seconds, NVML's new samples, NVML's list, and the pages of each PID.
        self.times, self.samples, self.memory, self.compute = [], [], [], []
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self):
        since = 0
        while not self.ended.wait(PERIOD):
            found = self.gpu.samples(since)
            since = max([since, *(at for _, at, _ in found)])
            self.times.append(time.monotonic() - self.begin)
            self.samples.append(found)
            self.memory.append(self.gpu.processes())
            self.compute.append({pid: pages.compute(pid) for pid in self.pids})

    def __enter__(self):
        self.begin = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def percents(self, pid):
        """The last percent of a process in each reading; None where NVML has no new sample of it."""
        return [next((sm for one, _, sm in reversed(found) if one == pid), None) for found in self.samples]

    def series(self, pid):
        """The readings of one program, as lists of numbers, so that a miss explains itself."""
        rows = {"seconds": [round(at, 1) for at in self.times], "nvml": self.percents(pid)}
        for name in ("position", "carried", "spent", "scale", "rate"):
            values = [found.get(pid) for found in self.compute]
            rows[name] = [None if one is None else round(one[name], 3) for one in values]
        return rows
