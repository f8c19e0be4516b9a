"""Pictures of `kubectl tranche ui` for docs/images, and what it costs at a thousand nodes."""

import argparse
import base64
import json
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from browser import Browser, resident

PROGRAMS = Path("target")
# A frame at 60 Hz, in milliseconds.
FRAME = 1000 / 60


class Page:
    """A scripted cluster and the command that shows it."""

    def __init__(self, profile, nodes, gpus, changes):
        programs = PROGRAMS / profile
        self.cluster = subprocess.Popen(
            [programs / "examples/scripted-cluster", str(nodes), str(gpus), str(changes)],
            stdout=subprocess.PIPE, text=True,
        )
        server = self.cluster.stdout.readline().strip()
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it", "users": [{"name": "it", "user": {}}],
            "clusters": [{"name": "it", "cluster": {"server": server}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        self.folder = tempfile.TemporaryDirectory()
        kubeconfig = Path(self.folder.name) / "kubeconfig"
        kubeconfig.write_text(json.dumps(config))
        self.command = subprocess.Popen(
            [programs / "kubectl-tranche", "ui", "--kubeconfig", kubeconfig], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        self.url = self.command.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.command, self.cluster):
            process.terminate()
            process.wait()
        self.folder.cleanup()


def loaded(browser, gpus):
    browser.wait_for(f"return document.querySelector('#summary .value')?.textContent === '{gpus}'")
    browser.wait_for("return document.querySelector('.tile .bar')")


def pictures(args):
    """The page at three sizes and in both themes."""
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        page = stack.enter_context(Page(args.profile, 6, 8, 0))
        browser = stack.enter_context(Browser())

        def take(name):
            (folder / f"{name}.png").write_bytes(base64.b64decode(browser.picture()))

        browser.view(1440, 900, "light")
        browser.open(page.url)
        loaded(browser, 48)
        take("ui-light")
        browser.run("document.querySelectorAll('.tile')[9].click()")
        take("ui-details")
        browser.view(1440, 900, "dark")
        take("ui-dark")
        browser.run("document.querySelectorAll('.tile')[9].click()")
        browser.view(360, 740, "light", 2)
        browser.run("window.scrollTo(0, 0)")
        browser.wait_for("return innerWidth === 360")
        take("ui-phone")


# Scrolls the page from top to bottom, and tells how long each frame took.
SCROLL = """
const done = arguments[0];
const times = [];
let last = null;
let at = 0;
function frame(now) {
  if (last !== null) times.push(now - last);
  last = now;
  at += 240;
  window.scrollTo(0, at);
  if (at < document.documentElement.scrollHeight && times.length < 600) requestAnimationFrame(frame);
  else done(times);
}
requestAnimationFrame(frame);
"""


def scale(args):
    """What a thousand nodes cost: the server's memory, the time until the page shows them, frames while it scrolls."""
    with ExitStack() as stack:
        began = time.monotonic()
        page = stack.enter_context(Page(args.profile, args.nodes, args.gpus, args.changes))
        browser = stack.enter_context(Browser())
        browser.view(1440, 900, "light")
        browser.open(page.url)
        loaded(browser, args.nodes * args.gpus)
        shown = time.monotonic() - began
        times = browser._ask("POST", f"{browser.session}/execute/async", {"script": SCROLL, "args": []})
        now, most = resident(page.command.pid)
        frames = sorted(times)
        heap = browser.run("return performance.memory.usedJSHeapSize") // (1 << 20)
        print(json.dumps({
            "nodes": args.nodes, "gpus": args.nodes * args.gpus, "changesPerSecond": args.changes,
            "secondsUntilShown": round(shown, 1), "serverMiB": now, "serverMiBAtMost": most, "pageHeapMiB": heap,
            "tiles": browser.run("return document.querySelectorAll('.tile').length"),
            "frames": len(frames), "frameMillisMedian": round(statistics.median(frames), 1),
            "frameMillisP95": round(frames[len(frames) * 95 // 100], 1), "frameMillisMost": round(frames[-1], 1),
            "framesInTime": round(sum(it < 1.5 * FRAME for it in frames) / len(frames), 3),
        }))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="debug", help="which programs of target/")
    commands = parser.add_subparsers(required=True)
    taken = commands.add_parser("pictures", help="PNGs of the page")
    taken.add_argument("--folder", default="docs/images")
    taken.set_defaults(act=pictures)
    measured = commands.add_parser("scale", help="a row of JSON")
    measured.add_argument("--nodes", type=int, default=1000)
    measured.add_argument("--gpus", type=int, default=8)
    measured.add_argument("--changes", type=int, default=10)
    measured.set_defaults(act=scale)
    args = parser.parse_args()
    args.act(args)


main()
