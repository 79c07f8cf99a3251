"""Speed up a model of your own; docs/tutorials/own_model.md explains the steps."""

# %%
import copy
import statistics
import time
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops

fusedops.tune_host()
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 256, 4, 4, 160


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def rotate(self, q, k, table):
        """Rotate the pairs (2i, 2i + 1) of queries and keys, as complex numbers."""
        for x in (q, k):
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            yield torch.view_as_real(pairs * table[:, None]).flatten(-2).type_as(x)

    def forward(self, x, table, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = self.rotate(q, k, table)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RMSNorm(WIDTH), Attention()
        self.norm2, self.feed_forward = RMSNorm(WIDTH), FeedForward()

    def forward(self, x, table, mask):
        x = x + self.attention(self.norm1(x), table, mask)
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(0, size, 2) / size))
        table = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids, mask):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, self.table, mask, use_reentrant=False)
        return self.head(self.norm(x))


# %%
def make_batch(seed):
    """Return bytes of text, the keys that each may attend to, and labels: the next bytes."""
    numbers = torch.randint(99, (8, 8, 2), generator=torch.Generator().manual_seed(seed))
    rows = [" ".join(f"{a} times {b} is {a * b}." for a, b in row) for row in numbers.tolist()]
    rows = [torch.tensor(list(row.encode())) for row in rows]
    ids = torch.zeros(8, LENGTH, dtype=torch.long)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row[:LENGTH]
    padding = ids == 0
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    labels = ids.masked_fill(padding, -100).roll(-1, 1)
    labels[:, -1] = -100
    return ids, causal & ~padding[:, None, None, :], labels


torch.manual_seed(0)
stock = Model()
model = copy.deepcopy(stock)
ids, mask, labels = make_batch(0)
with torch.autocast("cpu", dtype=torch.bfloat16):  # as in the loop below
    print(fusedops.patch(model, level="O3", example=(ids, mask)))


# %%
class FormulaNorm(nn.Module):
    """Is recognised: the mean of the squares, in any spelling, and with any names."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5) * self.scale


class LengthNorm(nn.Module):
    """Is not recognised: another formula, although it has almost the same values."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * x.size(-1) ** 0.5 * self.scale


class RoundedNorm(nn.Module):
    """Is not recognised: it casts its result to bfloat16, not to the dtype of its input."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        return normed.bfloat16()


class PackedFeedForward(nn.Module):
    """Is recognised: gate and up projection may be one layer."""

    def __init__(self, width):
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class WrittenAttention(nn.Module):
    """Is not recognised: call F.scaled_dot_product_attention instead."""

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT / q.size(-1) ** 0.5, -1) @ v


layers = FormulaNorm(64), LengthNorm(64), RoundedNorm(64), PackedFeedForward(64), WrittenAttention()
print(fusedops.patch(nn.ModuleList(layers), level="O3"))


# %%
class FusedAttention(Attention):
    def rotate(self, q, k, table):
        cos, sin = (part.repeat_interleave(2, -1) for part in (table.real, table.imag))
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # heads before positions
        q, k = fusedops.rotary_embedding(q, k, cos, sin, interleaved=True)
        return q.transpose(1, 2), k.transpose(1, 2)


class FusedBlock(Block):
    def __init__(self):
        super().__init__()
        self.attention = FusedAttention()

    def forward(self, x, table, mask):
        y = self.attention(self.norm1(x), table, mask)
        scale = self.norm2.weight
        # x = x + y, and normed = norm2(x); "hf": rounds before it multiplies by the weight
        normed, x = fusedops.add_rms_norm(y, x, (WIDTH,), scale, eps=1e-6, rounding="hf")
        return x + self.feed_forward(normed)


called = Model(FusedBlock)
called.load_state_dict(stock.state_dict())
with torch.autocast("cpu", dtype=torch.bfloat16):
    report = fusedops.patch(called, level="O3", example=(ids, mask))
print(report.step)


# %%
def loss_of(model, cross_entropy, batch, autocast=True):
    ids, mask, labels = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return cross_entropy(model(ids, mask).flatten(0, 1), labels.flatten())


def logits_of(model, autocast=True):
    """Return the logits in evaluation, without those of padding."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(ids, mask)[ids != 0]
    model.train()
    return logits


def gradients(model, cross_entropy, autocast=True):
    loss_of(model, cross_entropy, make_batch(0), autocast).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return grads


def relative_error(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


variants = {
    "stock": (stock, F.cross_entropy),
    "patched": (model, F.cross_entropy),
    "ops called": (called, fusedops.cross_entropy),
}
exact = copy.deepcopy(stock).double()
# In the float64 copy, code that asks for float32 would round: float(), to(torch.float32), dtype=.
method = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
with method, mock.patch.multiple(torch, float=torch.float64, float32=torch.float64):
    logits = logits_of(exact, autocast=False)
    expected = gradients(exact, F.cross_entropy, autocast=False)
for name, variant in variants.items():
    error = max(map(relative_error, gradients(*variant), expected))
    print(f"{name}: largest relative error of a gradient {error:.4f}", end=", ")
    print(f"of the logits {relative_error(logits_of(variant[0]), logits):.4f}")

# %%
losses, seconds = {name: [] for name in variants}, {name: [] for name in variants}
optimizers = {
    name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, (model, _) in variants.items()
}
for step in range(20):
    for name, optimizer in optimizers.items():
        begin = time.perf_counter()
        loss = loss_of(*variants[name], make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name].append(loss.item())
        seconds[name].append(time.perf_counter() - begin)
for step in (0, 10, 19):
    print(
        f"step {step:2}  loss:", ", ".join(f"{name} {losses[name][step]:.4f}" for name in variants)
    )
medians = {name: statistics.median(seconds[name][2:]) for name in variants}
for name in ("patched", "ops called"):
    print(f"{name}: {medians['stock'] / medians[name]:.2f} times as fast as stock")

# %%
torch.save(called.state_dict(), "model.pt")
loaded = Model()  # the stock classes
loaded.load_state_dict(torch.load("model.pt"))
with torch.no_grad():
    saved = loss_of(called, fusedops.cross_entropy, make_batch(20))
    difference = loss_of(loaded, F.cross_entropy, make_batch(20)) - saved
print(f"difference of the losses: {abs(difference):.0e}")
