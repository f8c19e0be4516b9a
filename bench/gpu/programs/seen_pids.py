"""The PIDs that NVML shows in this program's own PID namespace: seen_pids.py LIBRARY GPU SECONDS."""

import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from harness.nvml import Nvml  # noqa: E402


def main(library, gpu, seconds):
    device, listed, sampled = Nvml(library).gpus()[int(gpu)], set(), set()
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        listed |= set(device.processes())
        sampled |= {pid for pid, _, _ in device.samples(0)}
        time.sleep(0.1)
    print(json.dumps({"self": os.getpid(), "listed": sorted(listed), "sampled": sorted(sampled)}))


main(*sys.argv[1:])
