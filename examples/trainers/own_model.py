"""fusedops with a model of your own classes: padding mask, tied head, autocast, checkpointing.

python own_model.py [stock]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedops

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 32


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.type_as(x) * self.weight


def rotate(x, table):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, table, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (rotate(q, table), rotate(k, table), v))
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
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(0, size, 2) / size))
        table = torch.polar(torch.ones_like(angles), angles)[:, None]
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids, mask):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, self.table, mask, use_reentrant=False)
        return self.head(self.norm(x))


def make_batch():
    """Return tokens, the mask of what each may attend to, and labels: the next tokens."""
    ids = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(LENGTH, LENGTH - 8, -1)
    padding = torch.arange(LENGTH) >= lengths[:, None]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & ~padding[:, None, None, :]
    labels = ids.masked_fill(padding, -100).roll(-1, 1)
    labels[:, -1] = -100
    return ids, mask, labels


def main():
    torch.manual_seed(0)
    ids, mask, labels = make_batch()
    model = Model()
    cross_entropy = F.cross_entropy
    if "stock" not in sys.argv:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            print(fusedops.patch(model, level="O3", example=(ids, mask)))
        cross_entropy = fusedops.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, mask)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
