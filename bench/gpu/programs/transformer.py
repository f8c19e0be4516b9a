"""A small transformer whose sequence grows by one block a step: transformer.py COUNT. Milliseconds of each step."""

import json
import sys
import time

import torch


def main(count):
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).to("cuda", torch.bfloat16).eval()
    times = []
    with torch.inference_mode():
        model(torch.randn(1, 8, 512, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
        for step in range(1, int(count) + 1):
            # One token more at each step, as in decoding without a cache.
            tokens = torch.randn(1, 64 + step, 512, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(tokens)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
    print(json.dumps({"milliseconds": times}))


main(sys.argv[1])
