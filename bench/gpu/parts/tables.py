"""Shows which of NVIDIA's private tables libraries ask for. The shim does not see calls through them: CTX_CREATE_BYPASS makes
contexts, and can be refused if nobody asks for it."""

from harness.machine import module, python
from harness.result import guarded, row, taken, with_target

TITLE = "the private tables that PyTorch, JAX, CuPy and cuBLAS ask for"
KNOWN = "00010203-0405-0607-0809-0a0b0c0d0e0f"
BYPASS = "0ca50b8c-1004-929a-89a7-d0df10e77286"
NAMES = {
    "6bd5fb6c-5bf4-e74a-8987-d93912fd9df9": "CUDART_INTERFACE",
    "42d85a81-23f6-cb47-8298-f6e78a3aecdc": "TOOLS_TLS",
    "a094798c-2e74-2e74-93f2-0800200c0a66": "TOOLS_RUNTIME_CALLBACK_HOOKS",
    "c693336e-1121-df11-a8c3-68f355d89593": "CONTEXT_LOCAL_STORAGE",
    BYPASS: "CTX_CREATE_BYPASS",
    "195bcbf4-d67d-024a-acc5-1d29cea631ae": "HEAP_ACCESS",
    "b10541e1-f7c7-c74a-9f64-f223be99f1e2": "DEVICE_EXTENDED_RT",
    "d4082055-bde6-704b-8d34-ba123c66e1f2": "INTEGRITY_CHECK",
    "21318c60-9714-3248-8ca6-41ff7324c8f2": "CUDART 13",
    "263e8860-7cd2-6143-92f6-bbd5006dfa7e": "CONTEXT_CHECKS",
}


def run(machine):
    for library in ("driver", "torch", "jax", "cupy"):
        if library != "driver" and not module(library):
            yield row(library, "absent", f"no module {library}")
        else:
            yield from guarded(library, rows(machine, library))


def rows(machine, library):
    asked = machine.result(machine.run(python("export_tables", library), seconds=100))["asked"]
    if library == "driver":
        (seen,) = asked.values()
        yield with_target("a known UUID is seen", seen == [KNOWN], seen == [KNOWN], "True")
        return
    for stage, uuids in asked.items():
        names = ", ".join(NAMES.get(one, one) for one in uuids)
        yield taken(f"{library}, {stage}: asks for", names or "none", uuids=uuids)
    everything = [one for uuids in asked.values() for one in uuids]
    yield with_target(f"{library}: asks for CTX_CREATE_BYPASS", BYPASS in everything, BYPASS not in everything, "False")
