"""Speed up a Hugging Face model; docs/tutorials/speed_up.md explains the steps."""

# %%
import copy
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

print(fusedops.tune_host())

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
stock = LlamaForCausalLM(config)
model = copy.deepcopy(stock)  # the same weights, to compare with
print(f"{stock.num_parameters() / 1e6:.1f} million parameters")

# %%
report = fusedops.patch(model)
print(report)

# %%
generator = torch.Generator().manual_seed(1)
batches = [torch.randint(8192, (4, 256), generator=generator) for _ in range(12)]


def train_step(model, optimizer, ids):
    """Train on one batch, and return the loss and the seconds."""
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), time.perf_counter() - start


stock_optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ratios = []
for step, ids in enumerate(batches):
    # The two models alternate, so that other work on the machine slows both.
    stock_loss, stock_seconds = train_step(stock, stock_optimizer, ids)
    loss, seconds = train_step(model, optimizer, ids)
    if step % 3 == 0:
        print(f"step {step:2}  loss: stock {stock_loss:.5f}, patched {loss:.5f}")
    if step >= 2:  # the first steps also allocate memory
        ratios.append(stock_seconds / seconds)
print(f"a patched step is {statistics.median(ratios):.2f} times as fast")

# %%
prompt = batches[0][:1, :16]
expected = stock.eval().generate(prompt, max_new_tokens=8, do_sample=False)
tokens = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
print("both generate the same tokens:", torch.equal(tokens, expected))

# %%
fusedops.unpatch(model)
print(type(model.model.layers[0].mlp))
model.save_pretrained("model")
