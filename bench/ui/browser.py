"""Headless Chromium over WebDriver, for the pictures and the measurement."""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

# No request leaves the machine. A container has no GPU and no sandbox.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]


class Browser:
    """A browser with its own profile, which is removed with it."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="tranche-ui-")
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                port = line.split("on port")[1].strip().rstrip(".")
                self.base = f"http://127.0.0.1:{port}"
                break
        options = {"args": [*FLAGS, f"--user-data-dir={self.profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.session = "/session/" + self._ask("POST", "/session", wanted)["sessionId"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._ask("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait()
            shutil.rmtree(self.profile, ignore_errors=True)

    def _ask(self, method, path, body=None, seconds=300):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{method} {path}: {error.read().decode()[:2000]}") from error

    def open(self, url):
        self._ask("POST", f"{self.session}/url", {"url": url})

    def run(self, script, *args):
        """The value that a script returns."""
        return self._ask("POST", f"{self.session}/execute/sync", {"script": script, "args": list(args)})

    def run_long(self, script, seconds=290):
        """The value with which a script calls its argument."""
        self._ask("POST", f"{self.session}/timeouts", {"script": seconds * 1000})
        return self._ask("POST", f"{self.session}/execute/async", {"script": script, "args": []}, seconds + 10)

    def wait_for(self, script, seconds=290):
        """The value that a script returned, the first that is true in Python."""
        return self.run_long(
            "const done = arguments[0]; (function look() { const it = (function () {%s})();"
            " if (it) done(it); else setTimeout(look, 20); })();" % script,
            seconds,
        )

    def devtools(self, command, **params):
        return self._ask("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": params})

    def work(self):
        """CPU seconds of the page's own thread so far, by kind: other programs on the machine do not count."""
        self.devtools("Performance.enable", timeDomain="threadTicks")
        metrics = {it["name"]: it["value"] for it in self.devtools("Performance.getMetrics")["metrics"]}
        return {kind: metrics[f"{kind}Duration"] for kind in ("Task", "Script", "Layout", "RecalcStyle")}

    def view(self, width, height, scheme, scale=1):
        """The size of the page, and the user's theme."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self):
        """A picture of the page: PNG in base64."""
        return self.devtools("Page.captureScreenshot", format="png")["data"]


def resident(pid):
    """MiB of memory of a process, now and at its peak."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        lines = dict(line.split(":", 1) for line in status)
    return [int(lines[key].split()[0]) // 1024 for key in ("VmRSS", "VmHWM")]
