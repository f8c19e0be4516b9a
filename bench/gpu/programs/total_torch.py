"""The GPU's total memory as PyTorch reads it by two calls; vLLM uses the second."""

import json

import torch

properties = torch.cuda.get_device_properties(0)
print(json.dumps({"mem_get_info": torch.cuda.mem_get_info()[1], "get_device_properties": properties.total_memory}))
