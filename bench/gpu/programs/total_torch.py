"""The GPU's total memory as PyTorch reads it."""

import json

import torch

print(json.dumps({"total": torch.cuda.mem_get_info()[1]}))
