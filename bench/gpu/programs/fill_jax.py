"""Fills a share by JAX until it is refused: fill_jax.py PIECE. XLA_PYTHON_CLIENT_PREALLOCATE selects how it allocates."""

import json
import sys

import jax
import jax.numpy as jnp


def main(piece):
    size, kept, kind, message = int(piece), [], "", ""
    device = jax.devices("gpu")[0]
    works = int(jnp.arange(1000).sum()) == 499500
    while size >= 16 << 20:
        try:
            one = jnp.zeros(size, dtype=jnp.uint8, device=device)
            kept.append(one.block_until_ready())
        except Exception as error:  # any error is a result
            kind, message, size = type(error).__name__, str(error), size // 2
    refused = "RESOURCE_EXHAUSTED" if "RESOURCE_EXHAUSTED" in message else kind
    stats = device.memory_stats() or {}
    reached = sum(one.nbytes for one in kept)
    found = {"total": stats.get("bytes_limit"), "reached": reached, "kind": refused, "works": works}
    print(json.dumps({**found, "expected": "RESOURCE_EXHAUSTED", "version": jax.__version__}))


main(sys.argv[1])
