"""A cluster of invented GPU nodes: Nodes, GpuNodes in the plugin's form, claims in the scheduler's form."""

APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"
GPUS = 8
GPU_NODES = "/apis/gpu.tranche.dev/v1alpha1/gpunodes"
POLICIES = "/apis/gpu.tranche.dev/v1alpha1/sharingpolicies"
PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
# A node of a cloud has about this many labels.
LABELS = {f"cloud.example.com/label-{n:02}": f"value-{n:02}-of-a-node-of-a-cloud" for n in range(30)}


def name(node):
    return f"gpu-node-{node:05}.europe-west4.example.internal"


def uuid(node, gpu):
    return f"GPU-{node * GPUS + gpu:08x}-5d2e-4c11-9b6a-{node:06x}{gpu:06x}"


def inventory(node):
    gpus = [
        {
            "uuid": uuid(node, gpu), "minor": gpu, "index": gpu, "productName": "NVIDIA H100 80GB HBM3",
            "brand": "Nvidia", "architecture": "Hopper", "cudaComputeCapability": "9.0",
            "pciBusID": f"0000:{16 + gpu:02x}:00.0", "pcieRoot": f"pci0000:{15 + gpu:02x}", "numaNode": gpu // 4,
            "memory": "81559Mi", "reservedMemory": "551Mi", "multiprocessors": 132, "migCapable": True,
        }
        for gpu in range(GPUS)
    ]
    return {"driverVersion": "535.261.03", "cudaDriverVersion": "12.2", "gpus": gpus, "gpuCount": GPUS}


def make(server, nodes):
    """Makes the nodes, their plugins' pods, and their GpuNodes, whose plugins have not registered with the kubelets."""

    def one(node):
        metadata = {"name": name(node), "labels": LABELS}
        made = server.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        owner = {"apiVersion": "v1", "kind": "Node", "name": name(node), "uid": made["metadata"]["uid"]}
        body = {
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode", "spec": {},
            "metadata": {"name": name(node), "ownerReferences": [owner]},
        }
        server.ask("POST", GPU_NODES, body)
        register(server, node, 0)
        plugin_pod(server, node)

    server.each(range(nodes), one)


def plugin_pod(server, node):
    """The node plugin's pod, which is ready: the controller reads it if a registration is older than some seconds."""
    labels = {"app.kubernetes.io/name": "tranche", "app.kubernetes.io/component": "node-plugin"}
    pod = f"plugin-{node}"
    body = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "labels": labels},
        "spec": {"nodeName": name(node), "containers": [{"name": "plugin", "image": "tranche/tranche"}]},
    }
    server.ask("POST", PODS, body)
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    server.ask("PATCH", f"{PODS}/{pod}/status", ready, STRATEGIC)


def register(server, node, epoch):
    """Applies the plugin's part of the status, as the plugin does at each registration."""
    body = {
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name(node)},
        "status": {
            "inventory": inventory(node),
            "registration": {"epoch": epoch, "pluginVersion": "0.1.0"},
        },
    }
    path = f"{GPU_NODES}/{name(node)}/status?fieldManager=tranche-kubelet-plugin&force=true"
    server.ask("PATCH", path, body, APPLY)


def policy(server, spec):
    """Sets the SharingPolicy `default`."""
    body = {
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
        "metadata": {"name": "default"}, "spec": spec,
    }
    server.ask("PATCH", f"{POLICIES}/default?fieldManager=scale&force=true", body, APPLY)


def claims(server, nodes):
    """Makes two claims for each node, with capped shares of its first two GPUs."""

    def one(number):
        node, gpu = divmod(number, 2)
        claim = f"claim-{number}"
        requests = [{"name": "gpu", "exactly": {"deviceClassName": "capped.gpu.tranche.dev"}}]
        body = {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": claim}, "spec": {"devices": {"requests": requests}},
        }
        made = server.ask("POST", CLAIMS, body)
        result = {
            "request": "gpu", "driver": "gpu.tranche.dev", "pool": f"{name(node)}/gpu",
            "device": f"gpu-{uuid(node, gpu)[4:12]}-capped",
        }
        made["status"] = {"allocation": {"devices": {"results": [result]}}}
        server.ask("PUT", f"{CLAIMS}/{claim}/status", made)

    server.each(range(2 * nodes), one)


def published(server, nodes, epoch):
    """Whether the records of a hundred nodes, including the first and the last, name all slices of a registration."""
    some = {*range(0, nodes, max(nodes // 100, 1)), nodes - 1}
    for node in some:
        record = server.ask("GET", f"{GPU_NODES}/{name(node)}")["status"].get("published", {})
        if record.get("sliceCount") != GPUS + 1 or record.get("epoch") != epoch:
            return False
    return True

