"""What PyTorch takes for the GPU's memory."""

import json

import torch

print(json.dumps({"total": torch.cuda.mem_get_info()[1]}))
