"""etcd and kube-apiserver alone, on loopback, in a folder that goes with them."""

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Requests at a time while objects are made.
WORKERS = 8
# How long a server may take to answer after its start, in seconds.
START = 120


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


class Server:
    """An API server with the repository's CRDs, and a client of it."""

    def __init__(self, programs, crds):
        self.programs = Path(programs)
        self.folder = Path(tempfile.mkdtemp(prefix="tranche-scale-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self.running = []
        self.local = threading.local()
        # One for all: it reads the machine's certificates when it is made.
        self.tls = ssl.create_default_context()
        self.tls.check_hostname = False
        self.tls.verify_mode = ssl.CERT_NONE
        try:
            self._start(crds)
        except BaseException:
            self.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        for process in reversed(self.running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name, command, **environment):
        """Starts a program that ends with the server; its output goes to a file of the folder."""
        log = open(self.folder / f"{name}.log", "ab")
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
        )
        self.running.append(process)
        return process

    def _start(self, crds):
        client, peer, self.port = free_ports(3)
        etcd = f"http://127.0.0.1:{client}"
        # The disk is not what is measured.
        self.start(
            "etcd",
            [
                self.programs / "etcd", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync",
                "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
                "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--quota-backend-bytes", str(8 << 30),
            ],
        )
        key = self.folder / "key.pem"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = self.folder / "tokens"
        tokens.write_text('scale,admin,1,"system:masters"\n')
        self.start(
            "kube-apiserver",
            [
                self.programs / "kube-apiserver", "--etcd-servers", etcd, "--secure-port", str(self.port),
                "--bind-address", "127.0.0.1", "--endpoint-reconciler-type", "none",
                "--cert-dir", self.folder / "certs", "--token-auth-file", tokens,
                "--authorization-mode", "RBAC", "--service-account-issuer", "https://scale",
                "--service-account-key-file", key, "--service-account-signing-key-file", key,
                "--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount",
            ],
        )
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "scale",
                    "clusters": [{"name": "scale", "cluster": {
                        "server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}}],
                    "users": [{"name": "scale", "user": {"token": "scale"}}],
                    "contexts": [{"name": "scale", "context": {"cluster": "scale", "user": "scale"}}],
                }
            )
        )
        self._until_ready("/readyz")
        kubectl = [self.programs / "kubectl", "--kubeconfig", self.kubeconfig]
        subprocess.run([*kubectl, "apply", "--filename", crds], check=True, stdout=subprocess.DEVNULL)
        self._until_ready("/apis/gpu.tranche.dev/v1alpha1/gpunodes")

    def _until_ready(self, path):
        end = time.monotonic() + START
        while True:
            try:
                status, text = self.raw("GET", path)
                if status == 200:
                    return
            except OSError as error:
                text = str(error)
            for process in self.running:
                if process.poll() is not None:
                    logs = "".join(it.read_text()[-2000:] for it in self.folder.glob("*.log"))
                    raise SystemExit(f"{process.args[0]} ended with {process.returncode}:\n{logs}")
            if time.monotonic() > end:
                raise SystemExit(f"{path} is not served after {START} s: {text}")
            time.sleep(0.2)

    # A client.

    def raw(self, method, path, body=None, kind="application/json"):
        """One request; the status and the text. Every thread has a connection of its own."""
        for attempt in range(2):
            connection = getattr(self.local, "connection", None)
            if connection is None:
                connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, timeout=120)
                self.local.connection = connection
            headers = {"Authorization": "Bearer scale", "Content-Type": kind}
            try:
                connection.request(method, path, json.dumps(body) if body is not None else None, headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (http.client.HTTPException, ConnectionError):
                connection.close()
                self.local.connection = None
                if attempt:
                    raise

    def ask(self, method, path, body=None, kind="application/json"):
        """One request that must succeed; the object."""
        status, text = self.raw(method, path, body, kind)
        if status >= 300:
            raise SystemExit(f"{method} {path}: {status} {text[:500]}")
        return json.loads(text)

    def each(self, items, act):
        """Does something for every item, several at a time."""
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(act, items))

    def count(self, path):
        """How many objects a list has."""
        page = self.ask("GET", f"{path}?limit=1")
        return len(page["items"]) + page["metadata"].get("remainingItemCount", 0)

    def requests(self):
        """Requests so far, by verb and resource with its subresource."""
        _, text = self.raw("GET", "/metrics")
        counts = {}
        for labels, value in re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            resource = "/".join(filter(None, [label["resource"], label["subresource"]]))
            key = (label["verb"], resource)
            counts[key] = counts.get(key, 0) + int(float(value))
        return counts
