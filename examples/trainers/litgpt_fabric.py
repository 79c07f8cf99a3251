"""fusedops with litgpt: patch its GPT before Fabric wraps it.

python litgpt_fabric.py [stock]
"""

import sys

import torch
from lightning.fabric import Fabric
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

import fusedops

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
torch.manual_seed(0)
config = Config.from_name(
    "Llama-3.2-1B", n_layer=2, n_embd=64, n_head=4, n_query_groups=2, intermediate_size=176
)
config.padded_vocab_size = config.vocab_size = 256
config.head_size = config.rope_n_elem = 16
model = GPT(config)
if "stock" not in sys.argv:
    # Level O3 also fuses attention that plain code calls, as litgpt's does.
    print(fusedops.patch(model, level="O3"))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
ids = torch.randint(256, (8, 32))
for _ in range(10):
    logits = model(ids)
    loss = chunked_cross_entropy(logits[:, :-1], ids[:, 1:], chunk_size=0)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
