"""Train on long sequences with little memory; docs/tutorials/long_sequences.md explains it."""

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from fusedops import memory

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
model = LlamaForCausalLM(config)
ids = torch.randint(8192, (1, 2048))
batch = {"input_ids": ids, "labels": ids}
print(f"{model.num_parameters() / 1e6:.1f} million parameters, {ids.numel()} tokens")


def measure(name, model):
    """Print and return the memory of a training step at its peak."""
    report = memory.report(model, batch)
    print(f"{name:32} {report.peak / 2**20:6.0f} MiB")
    return report


# %%
stock = measure("stock", model)
fusedops.patch(model)
patched = measure("patched", model)

# %%
print(patched)


# %%
class ChunkedLoss(torch.nn.Module):
    """A causal language model whose logits are never all in memory."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        hidden = self.model.model(input_ids).last_hidden_state
        return fusedops.linear_cross_entropy(
            hidden[:, :-1],
            self.model.lm_head.weight,
            labels[:, 1:],  # a token predicts the next one
            recompute=True,  # compute the logits a second time in the backward
        )


chunked = ChunkedLoss(model)
losses = model(**batch).loss.item(), chunked(**batch).item()
print("losses: complete logits {:.5f}, chunks {:.5f}".format(*losses))
measure("patched, chunked loss", chunked)


# %%
def gradients():
    """Return the gradients of a training step."""
    chunked.zero_grad()
    chunked(**batch).backward()
    return [parameter.grad.clone() for parameter in chunked.parameters()]


expected = gradients()
memory.apply(chunked, memory.Policy(memory.recompute("model.model.layers.*")))
measure("... layers recomputed", chunked)
equal = all(map(torch.equal, gradients(), expected))
print("the gradients have the same bits:", equal)

# %%
keep_attention = memory.Policy(
    memory.recompute("model.model.layers.*"),
    memory.save(ops="attention"),  # the expensive part is not computed twice
)
memory.apply(chunked, keep_attention)
measure("... but attention saved", chunked)

# %%
offload = memory.Policy(memory.offload("model.model.layers.*"))
memory.apply(chunked, offload)
measure("... layers offloaded instead", chunked)

# %%
memory.remove(chunked)
BUDGET = 100 * 2**20
optimizer = fusedops.optim.AdamW(chunked.parameters(), lr=1e-3)
print(memory.fit(chunked, batch, budget=BUDGET, optimizer=optimizer))
for step in range(3):
    loss = chunked(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
