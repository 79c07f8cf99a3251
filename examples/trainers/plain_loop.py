"""fusedops in a loop of your own: patch the model, and train as before.

python plain_loop.py [stock]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
if "stock" not in sys.argv:
    print(fusedops.patch(model))

ids = torch.randint(256, (8, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
