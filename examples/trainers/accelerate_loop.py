"""fusedops with accelerate: `prepare` patches the models among its arguments.

python accelerate_loop.py [stock]        # or: accelerate launch accelerate_loop.py
"""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from fusedops.integrations.accelerate import prepare

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randint(256, (8, 32)).repeat(10, 1), batch_size=8)

accelerator = Accelerator(cpu=True)  # without cpu=True on a GPU
if "stock" in sys.argv:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
else:
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.6f}")
