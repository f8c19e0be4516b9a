"""Runs a program in a terminal until it shows a word, and prints what it showed without the terminal's own codes.

usage: terminal.py WORD PROGRAM ARGUMENT...
"""

import os
import pty
import re
import select
import signal
import sys
import time

word, program = sys.argv[1].encode(), sys.argv[2:]
# A program that never shows the word is ended.
DEADLINE = time.monotonic() + 60


def plain(shown: bytes) -> bytes:
    return re.sub(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[()][0-9A-B]|[=>78])", b" ", shown)


child, terminal = pty.fork()
if child == 0:
    os.environ.update(TERM="xterm", COLUMNS="200", LINES="50")
    os.execvp(program[0], program)
shown = b""
until = DEADLINE
while time.monotonic() < until:
    if select.select([terminal], [], [], 0.1)[0]:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # It has ended.
            break
    # What it shows beside the word comes with the same refresh.
    if until == DEADLINE and word in plain(shown):
        until = time.monotonic() + 1
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
sys.stdout.write(plain(shown).decode(errors="replace"))
