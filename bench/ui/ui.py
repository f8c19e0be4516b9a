"""Pictures of `kubectl tranche ui` for docs/images, and what `ui` and `top` cost on large clusters.

The cluster serves the use of its GPUs, as Tranche's controller does.
"""

import argparse
import base64
import json
import resource
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from browser import Browser, resident

PROGRAMS = Path("target")
# Width and height of the pictures, in the page's pixels.
DESKTOP = (1200, 800)
PHONE = (360, 740)
# The GPU whose details are in the pictures, by its place in the map: three claims share it.
DETAILED = 10
# A frame at 60 Hz, in milliseconds.
FRAME = 1000 / 60


class Cluster:
    """A scripted cluster, and a kubeconfig for it."""

    def __init__(self, profile, nodes, gpus, changes):
        self.process = subprocess.Popen(
            [PROGRAMS / profile / "examples/scripted-cluster", str(nodes), str(gpus), str(changes)],
            stdout=subprocess.PIPE, text=True,
        )
        server = self.process.stdout.readline().strip()
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it", "users": [{"name": "it", "user": {}}],
            "clusters": [{"name": "it", "cluster": {"server": server}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        self.folder = tempfile.TemporaryDirectory()
        self.kubeconfig = Path(self.folder.name) / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


class Page:
    """The command that shows a cluster."""

    def __init__(self, profile, cluster):
        self.command = subprocess.Popen(
            [PROGRAMS / profile / "kubectl-tranche", "ui", "--kubeconfig", cluster.kubeconfig],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        self.url = self.command.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.command.terminate()
        self.command.wait()


def loaded(browser, gpus):
    browser.wait_for(f"return document.querySelector('#summary .value')?.textContent === '{gpus}'")
    browser.wait_for("return document.querySelector('.tile .bar')")


def used(browser):
    browser.wait_for("return document.querySelector('.tile .busy')")


def toggle(browser, nth):
    """Shows the details of a GPU, or closes them."""
    browser.run("document.querySelectorAll('.tile')[%d].click()" % nth)


def wait_for_curve(browser, nth, minutes):
    """Waits until the details of a GPU show its use in so many minutes."""
    toggle(browser, nth)
    points = "document.querySelector('.curve-memory')?.getAttribute('d').match(/[ML]/g)?.length"
    browser.wait_for(f"return {points} >= {minutes}", 60 * (minutes + 5))
    toggle(browser, nth)


def pictures(args):
    """The page with a GPU's details, and on a phone, in both themes."""
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(args.profile, 6, 8, 0))
        page = stack.enter_context(Page(args.profile, cluster))
        browser = stack.enter_context(Browser())

        def take(name):
            (folder / f"{name}.png").write_bytes(base64.b64decode(browser.picture()))

        browser.view(*DESKTOP, "light")
        browser.open(page.url)
        loaded(browser, 48)
        wait_for_curve(browser, DETAILED, args.minutes)
        for theme in ("light", "dark"):
            browser.view(*DESKTOP, theme)
            toggle(browser, DETAILED)
            take(f"ui-{theme}")
            toggle(browser, DETAILED)
            browser.view(*PHONE, theme, 2)
            browser.run("window.scrollTo(0, 0)")
            browser.wait_for("return innerWidth === %d" % PHONE[0])
            take(f"ui-phone-{theme}")


# Pixels for each frame: the fastest scroll of a wheel or a finger, and four times as much.
STEPS = (60, 240)
# Scrolls the page from its top, and returns the time of each frame.
SCROLL = """
const done = arguments[0];
const times = [];
let last = null;
let at = 0;
function frame(now) {
  if (last !== null) times.push(now - last);
  last = now;
  at += %d;
  window.scrollTo(0, at);
  if (times.length < 600) requestAnimationFrame(frame);
  else done(times);
}
requestAnimationFrame(frame);
"""


def scrolled(browser, step):
    """Frames while the page scrolls by this many pixels in each."""
    browser.run("window.scrollTo(0, 0)")
    before = browser.work()
    frames = sorted(browser.run_long(SCROLL % step))
    work = {kind: seconds - before[kind] for kind, seconds in browser.work().items()}
    return {
        "pixels": step, "frames": len(frames), "millisMedian": round(statistics.median(frames), 1),
        "millisP95": round(frames[len(frames) * 95 // 100], 1), "millisMost": round(frames[-1], 1),
        "inTime": round(sum(it < 1.5 * FRAME for it in frames) / len(frames), 3),
        "pageMillis": {kind: round(1000 * it / len(frames), 2) for kind, it in work.items()},
    }


# Searches; returns the number of sections that are left, and the height of the page in the next frame.
SEARCH = """
const done = arguments[0];
const search = document.getElementById('search');
search.value = '%s';
search.dispatchEvent(new Event('input'));
requestAnimationFrame(() => done([document.querySelectorAll('.node:not([hidden])').length, document.documentElement.scrollHeight]));
"""


def search(browser):
    """Searches for the last node: hidden sections must not take room."""
    last = browser.run("return [...document.querySelectorAll('.node')].at(-1).dataset.node")
    sections, height = browser.run_long(SEARCH % last)
    most = browser.run("return innerHeight") + 300 * sections
    assert height <= most, f"{sections} sections are found, and the page has {height} pixels, more than {most}"
    browser.run_long(SEARCH % "")


def scale(args):
    """The cost of a thousand nodes: the server's memory, the time until the page shows them, frames while it scrolls."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(args.profile, args.nodes, args.gpus, args.changes))
        began = time.monotonic()
        page = stack.enter_context(Page(args.profile, cluster))
        browser = stack.enter_context(Browser())
        browser.view(1440, 900, "light")
        browser.open(page.url)
        loaded(browser, args.nodes * args.gpus)
        shown = time.monotonic() - began
        used(browser)
        known = time.monotonic() - began
        # The use is read repeatedly, and changes.
        wait_for_curve(browser, 0, args.minutes)
        search(browser)
        scrolls = [scrolled(browser, step) for step in STEPS]
        now, most = resident(page.command.pid)
        heap = browser.run("return performance.memory.usedJSHeapSize") // (1 << 20)
        print(json.dumps({
            "nodes": args.nodes, "gpus": args.nodes * args.gpus, "changesPerSecond": args.changes,
            "secondsUntilShown": round(shown, 1), "secondsUntilUse": round(known, 1),
            "serverMiB": now, "serverMiBAtMost": most, "pageHeapMiB": heap,
            "tiles": browser.run("return document.querySelectorAll('.tile').length"),
            "scrolls": scrolls,
        }))


def top(args):
    """The time of `kubectl tranche top`."""
    with Cluster(args.profile, args.nodes, args.gpus, 0) as cluster:
        command = [PROGRAMS / args.profile / "kubectl-tranche", "top", "--kubeconfig", cluster.kubeconfig]
        times = []
        for _ in range(args.times):
            began = time.monotonic()
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            times.append(time.monotonic() - began)
            # The command reports there what is missing: only the lost GPUs of the cluster may be.
            assert "is not shown: nvmlDevice" in ended.stderr, ended.stderr
        worked = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(json.dumps({
            "nodes": args.nodes, "gpus": args.nodes * args.gpus, "lines": len(ended.stdout.splitlines()),
            "secondsMedian": round(statistics.median(times), 2), "secondsMost": round(max(times), 2),
            "cpuSecondsMean": round((worked.ru_utime + worked.ru_stime) / args.times, 2),
        }))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="debug", help="which programs of target/")
    commands = parser.add_subparsers(required=True)
    taken = commands.add_parser("pictures", help="PNGs of the page")
    taken.add_argument("--folder", default="docs/images")
    taken.add_argument("--minutes", type=int, default=2, help="of the curve in the GPU's details: it takes as long")
    taken.set_defaults(act=pictures)
    measured = commands.add_parser("scale", help="a row of JSON")
    measured.add_argument("--nodes", type=int, default=1000)
    measured.add_argument("--gpus", type=int, default=8)
    measured.add_argument("--changes", type=int, default=10)
    measured.add_argument("--minutes", type=int, default=3, help="in which the use is read before the memory is")
    measured.set_defaults(act=scale)
    told = commands.add_parser("top", help="a row of JSON")
    told.add_argument("--nodes", type=int, default=100)
    told.add_argument("--gpus", type=int, default=8)
    told.add_argument("--times", type=int, default=10)
    told.set_defaults(act=top)
    args = parser.parse_args()
    args.act(args)


main()
