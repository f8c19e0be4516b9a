"""The cost of the controller for a number of nodes: memory, CPU time, writes and lists of each event; and the time of `kubectl tranche top`."""

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
from pathlib import Path

import cluster
from server import Server

REPOSITORY = Path(__file__).resolve().parents[2]
# Seconds without a write of the controller after which it is done; a withdrawn device waits for 10.
QUIET = 10
WITHDRAWN = 30
ALL = ["exclusive", "capped", "timeshared"]
WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE"}
OURS = {"resourceslices", "gpunodes/status", "events"}
MIB = 1024


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


class Controller:
    """A running controller."""

    def __init__(self, server, program):
        http, metrics = free_ports(2)
        # The controller ends with this process.
        command = ["setpriv", "--pdeathsig", "KILL", "--", program, "--http-endpoint", f"127.0.0.1:{http}", "--metrics-endpoint", f"127.0.0.1:{metrics}"]
        # The last option is the chart's.
        environment = {
            "KUBECONFIG": str(server.kubeconfig), "POD_NAME": "scale", "POD_NAMESPACE": "default", "MALLOC_ARENA_MAX": "2",
        }
        self.log = Path(server.kubeconfig).parent / "controller.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
            )

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def memory(self):
        """Resident memory now, and its peak, MiB."""
        if self.process.poll() is not None:
            last = self.log.read_text()[-3000:]
            raise SystemExit(f"the controller ended with {self.process.returncode}:\n{last}")
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return tuple(round(int(fields[it].split()[0]) / MIB, 1) for it in ("VmRSS", "VmHWM"))

    def cpu(self):
        """Seconds of CPU time so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def of_controller(before, after):
    """The controller's requests between two counts: writes by resource, and lists of the claims."""
    writes, lists = {}, 0
    for (verb, resource), count in after.items():
        more = count - before.get((verb, resource), 0)
        if more and verb in WRITES and resource in OURS:
            writes[resource] = writes.get(resource, 0) + more
        if verb == "LIST" and resource == "resourceclaims":
            lists += more
    return writes, lists


def until_quiet(server, controller, before, limit, quiet=QUIET, done=lambda: True):
    """Waits until `done` is true and the controller has written nothing for a while; returns the seconds until its last write."""
    begun = time.monotonic()
    last, at = None, begun
    while time.monotonic() - at < quiet or not done():
        writes, _ = of_controller(before, server.requests())
        if writes != last:
            last, at = writes, time.monotonic()
        if time.monotonic() - begun > limit:
            raise SystemExit(f"the controller still writes after {limit} s: {last}")
        controller.memory()
        time.sleep(0.5)
    return at - begun


def event(server, controller, what, act, limit, quiet=QUIET, own=0, done=lambda: True):
    """The cost of one event until the controller is quiet and `done` is true. The event itself writes the status of some GpuNodes."""
    before, cpu = server.requests(), controller.cpu()
    begun = time.monotonic()
    act()
    acted = time.monotonic() - begun
    took = acted + until_quiet(server, controller, before, limit, quiet, done)
    writes, lists = of_controller(before, server.requests())
    writes["gpunodes/status"] = writes.get("gpunodes/status", 0) - own
    now, peak = controller.memory()
    row = {
        "event": what, "seconds": round(took, 1), "writes": sum(writes.values()), "of": writes,
        "claimListPages": lists, "cpuSeconds": round(controller.cpu() - cpu, 1), "memoryMiB": now, "peakMiB": peak,
    }
    print(json.dumps(row), flush=True)
    return row


def top(server, plugin, rounds=5):
    """Seconds of `kubectl tranche top gpus`, and of `kubectl get` of the objects that it reads: medians, in turn."""
    connection = ["--kubeconfig", str(server.kubeconfig)]
    objects = "gpunodes.gpu.tranche.dev,resourceslices.resource.k8s.io,resourceclaims.resource.k8s.io"
    commands = {
        "topSeconds": [str(plugin), "top", "gpus", *connection],
        "kubectlGetSeconds": ["kubectl", "get", objects, "--all-namespaces", "--output", "json", *connection],
    }
    taken = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            begun = time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            taken[name].append(time.monotonic() - begun)
    row = {"event": "top", **{name: round(statistics.median(it), 3) for name, it in taken.items()}}
    row["ratio"] = round(row["topSeconds"] / row["kubectlGetSeconds"], 2)
    print(json.dumps(row), flush=True)
    return row


def measure(program, plugin, nodes):
    rows = []
    limit = 600 + nodes
    server = Server(os.environ["KUBECONFIG"])
    cluster.policy(server, {"tiers": ALL})
    cluster.make(server, nodes)
    controller = None

    def start():
        nonlocal controller
        controller = Controller(server, program)

    def register(epoch):
        server.each(range(nodes), lambda node: cluster.register(server, node, epoch))

    before = server.requests()
    start()
    until_quiet(server, controller, before, limit)
    for epoch, what in enumerate(["publish", "rollout"], 1):
        rows.append(event(
            server, controller, what, lambda: register(epoch), limit, own=nodes,
            done=lambda: cluster.published(server, nodes, epoch),
        ))
    spec = {"tiers": ALL, "capped": {"maxSharers": 4}}
    change = lambda: cluster.policy(server, spec)
    rows.append(event(server, controller, "policy", change, limit))

    controller.stop()
    before = server.requests()
    start()
    until_quiet(server, controller, before, limit)
    writes, _ = of_controller(before, server.requests())
    now, peak = controller.memory()
    rows.append({
        "event": "restart", "writes": sum(writes.values()), "of": writes,
        "cpuSeconds": round(controller.cpu(), 1), "memoryMiB": now, "peakMiB": peak,
    })
    print(json.dumps(rows[-1]), flush=True)

    cluster.claims(server, nodes)
    rows.append(top(server, plugin))
    withdraw = lambda: cluster.policy(server, {**spec, "tiers": ["exclusive", "timeshared"]})
    rows.append(event(server, controller, "withdraw", withdraw, 3 * limit, WITHDRAWN))
    controller.stop()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--controller", type=Path, default=REPOSITORY / "target/release/tranche-controller")
    parser.add_argument("--plugin", type=Path, default=REPOSITORY / "target/release/kubectl-tranche")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "target/bench")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    print(f"== {options.nodes} nodes of {cluster.GPUS} GPUs", flush=True)
    rows = measure(options.controller, options.plugin, options.nodes)
    result = options.results / f"scale-{options.nodes}.json"
    result.write_text(json.dumps({"nodes": options.nodes, "gpus": cluster.GPUS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
