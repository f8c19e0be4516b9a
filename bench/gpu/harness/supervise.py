"""Runs each part in its own process. A process that exceeds its time limit is ended; its rows until then are kept."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

from harness.machine import die_with_parent
from harness.result import row, worst

# Seconds that a process has to end after its last row, and after each signal.
GRACE = 0.5


class Ended(Exception):
    """The whole run must end now."""


def run_part(name, title, command, seconds, put):
    """Runs one part; `put` is called with the part after each of its rows."""
    part = {"name": name, "title": title, "status": "failed", "rows": [], "seconds": 0}
    start = time.monotonic()
    # In its own session, so that all processes that it starts can be ended with it.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    lines = queue.Queue()
    threading.Thread(target=read, args=(child.stdout, lines), daemon=True).start()
    why = None
    try:
        while True:
            left = seconds - (time.monotonic() - start)
            try:
                line = lines.get(timeout=max(0.01, left))
            except queue.Empty:
                why = f"not ended after {seconds:.0f} s, and so stopped; the rows before this one are its results"
                break
            if line is None:
                break
            part["rows"].append(json.loads(line))
            put(closed(part, start))
    except Ended:
        why = "the run was stopped before the part ended"
        raise
    finally:
        end(child)
        code = child.returncode
        if why is None and code != 0:
            why = f"the part's process ended with {code}"
        if why:
            part["rows"].append(row("the part", "failed", why))
        put(closed(part, start))
    return part


def read(stream, lines):
    """Puts every line into the queue, and None at the end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def closed(part, start):
    part["status"] = worst(part["rows"])
    part["seconds"] = round(time.monotonic() - start, 1)
    return part


def end(child):
    """Ends the part's process and its whole session."""
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, wanted)
        except ProcessLookupError:
            break
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def print_rows(rows):
    """The part's process: prints each row on stdout at once."""
    for one in rows:
        print(json.dumps(one), flush=True)


def end_on_signals():
    def stop(number, _):
        raise Ended(signal.Signals(number).name)

    for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(wanted, stop)


def own_program(*arguments):
    return [sys.executable, "-B", os.path.abspath(sys.argv[0]), *map(str, arguments)]
