"""Modules as users write them, which read numbers, tables and functions that tests change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32
FACTORS = {"norm": 1.0}
HEADS = {"count": 4}
CAUSAL = True
ACTIVATION = nn.GELU()


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    """A norm whose formula stands in a method, with a number of the class and a default."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def _norm(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return factor * normed(x, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self._norm(x.float()).to(x.dtype)


class OwnNumberNorm(Norm):
    """A norm whose number is the instance's."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6


class DerivedNorm(Norm):
    """A norm that calls the forward of its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class TableNorm(Norm):
    """A norm that reads a number of a global table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (FACTORS["norm"] * normed(x.float(), 1e-6)).to(x.dtype)


class PropertyNorm(Norm):
    """A norm whose number is computed by a property."""

    @property
    def epsilon(self) -> float:
        return 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), self.epsilon).to(x.dtype)


def _forward_of(eps: float) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), eps).to(x.dtype)

    return forward


class ClosureNorm(Norm):
    """A norm whose number is in a closure."""

    forward = _forward_of(1e-6)


class FeedForward(nn.Module):
    """A feed-forward layer with a global activation, a method, and a flag of the class."""

    doubled = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATION(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.activated(x))
        return 2 * y if self.doubled else y


class FunctionalFeedForward(FeedForward):
    """A feed-forward layer that calls torch's function."""

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


class _Underscored(FunctionalFeedForward):
    """A class whose name is private."""


class GatedFeedForward(FeedForward):
    """A gated layer whose activation is a child."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(WIDTH, 48), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """An attention that calls torch's function."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS["count"], -1)
        return parts.permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(*self.heads(x)).transpose(1, 2).flatten(2)


class MaskedAttention(Attention):
    """An attention with a mask that the caller gives."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


class WrittenAttention(Attention):
    """An attention that writes its products out."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.softmax(self.scores(q, k), -1), v)


class TwoValues(WrittenAttention):
    """Weights after dropout are used twice: both products see the same ones."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = F.dropout(torch.softmax(self.scores(q, k), -1), 0.5, self.training)
        return torch.cat([torch.matmul(weights, v), torch.matmul(weights, v)], -1)


class AsksForTensors(WrittenAttention):
    """Scores are capped if they are a tensor."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = self.scores(q, k)
        if isinstance(scores, torch.Tensor) and torch.is_tensor(scores):
            scores = torch.tanh(scores)
        return torch.matmul(torch.softmax(scores, -1), v)


class FilledRows(WrittenAttention):
    """The first row of the scores has no key: torch gives the average of the values."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
        hidden[0] = True
        scores = self.scores(q, k).masked_fill(hidden, -1e9)
        return torch.matmul(torch.softmax(scores, -1), v)


class CallingDropout(Attention):
    """An attention that hands a probability of dropout to torch's function."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class AsksForOutputs(Attention):
    """What torch's function returns is asked for its type."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.tanh(y) if type(y) is torch.Tensor else y


class Counting(nn.Module):
    """A layer with state that is no tensor, and a buffer that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.shapes = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.seen += x.numel()
        return self.linear(self.norm(x))


class CountingBlock(nn.Module):
    """A gated layer whose children count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = Counting(), Counting(), Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
