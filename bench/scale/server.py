"""A client of the API server that `tranche-hollow` runs."""

import http.client
import json
import re
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

# The most requests at a time while objects are made.
WORKERS = 8


class Server:
    """The API server of a kubeconfig with a token."""

    def __init__(self, kubeconfig):
        with open(kubeconfig) as file:
            config = json.load(file)
        cluster = config["clusters"][0]["cluster"]
        self.kubeconfig = kubeconfig
        self.address = urlsplit(cluster["server"])
        self.token = config["users"][0]["user"]["token"]
        self.local = threading.local()
        # One context for all connections, because making it reads the certificates.
        self.tls = ssl.create_default_context(cafile=cluster["certificate-authority"])

    def raw(self, method, path, body=None, kind="application/json"):
        """Makes one request; returns the status and the text. Every thread has its own connection."""
        for attempt in range(2):
            connection = getattr(self.local, "connection", None)
            if connection is None:
                connection = http.client.HTTPSConnection(self.address.hostname, self.address.port, context=self.tls, timeout=120)
                self.local.connection = connection
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
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
        """Makes one request that must succeed; returns the object."""
        status, text = self.raw(method, path, body, kind)
        if status >= 300:
            raise SystemExit(f"{method} {path}: {status} {text[:500]}")
        return json.loads(text)

    def each(self, items, act):
        """Does something for every item, several at a time."""
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(act, items))

    def count(self, path):
        """The number of objects of a list."""
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
