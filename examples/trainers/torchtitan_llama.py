"""fusedops with torchtitan: patch its Llama before anything shards or compiles it.

    python torchtitan_llama.py [stock]

In torchtitan's trainer, call `fusedops.patch(model)` first in the model's `parallelize_fn`.
"""

import sys

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import fusedops

torch.manual_seed(0)
config = llama3_configs["debugmodel"](attn_backend="flex")
for layer in config.layers:  # flex attention has no backward on CPUs; leave it on a GPU
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
model = config.build()
model.init_states(buffer_device=torch.device("cpu"))
if "stock" not in sys.argv:
    print(fusedops.patch(model))

ids = torch.randint(2048, (4, 32))
positions = torch.arange(32).expand(4, -1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    logits = model(ids, positions)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
