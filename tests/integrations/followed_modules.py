"""Modules as users write them, which read numbers, tables and functions that tests change.

Their names say what they read or call: a method of their base, a table, a default, a closure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

WIDTH = 32
EPSILONS = {"norm": 1e-6}
HEADS = {"count": 4}
EPS = 1e-6
CAUSAL = True
SQUARED = False
APPROXIMATE = "none"
SMOOTHING = 0.0
SCALE = 1.0
TABLE = torch.ones(WIDTH)
STEP = CALLS = 0
ACTIVATION = nn.GELU()
functional = F  # under another name


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def normed_by_number(x: torch.Tensor) -> torch.Tensor:
    return normed(x, EPS)


def advance() -> None:
    global CALLS
    CALLS += 1


class Norm(nn.Module):
    """A norm whose formula stands in a method, with a number of the class."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self._norm(x.float()).to(x.dtype)


class OwnNumberNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6


class DerivedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class TableNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), EPSILONS["norm"]).to(x.dtype)


class PropertyNorm(Norm):
    @property
    def epsilon(self) -> float:
        return 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), self.epsilon).to(x.dtype)


class GlobalNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), EPS).to(x.dtype)


class HelpedNorm(Norm):
    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return normed_by_number(x)


class DefaultNorm(Norm):
    def _norm(self, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return normed(x, eps)


def _forward_of(eps: float) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(x.float(), eps).to(x.dtype)

    return forward


class ClosureNorm(Norm):
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
    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


class OtherNameFeedForward(FeedForward):
    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.up(x))


class GlobalFeedForward(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if SQUARED:
            x = x * x
        return self.down(F.gelu(self.up(4 * x), approximate=APPROXIMATE))


class _Underscored(FunctionalFeedForward):
    """A class whose name is private."""


class GatedFeedForward(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(WIDTH, 48), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class SmoothedLoss(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(x.size(0))
        return F.cross_entropy(self.up(x[:, 0]), labels, label_smoothing=SMOOTHING)


class ScaledLoss(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SCALE * nn.CrossEntropyLoss()(self.up(x[:, 0]), torch.arange(x.size(0)))


class Attention(nn.Module):
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


class DerivedAttention(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(2 * q, k, v)


class TableAttention(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return len(__file__) * super().forward(x * TABLE)


class DefaultAttention(Attention):
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class RenamedAttention(Attention):
    """An attention that calls torch's function by a name of its own file."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, is_causal=True)


class CountingAttention(Attention):
    """An attention that counts its calls in globals, by itself and in a function."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        global STEP
        STEP += 1
        advance()
        return F.scaled_dot_product_attention(q, STEP * k, CALLS * v)


class Processor:
    """Computes attention with the layers of a module."""

    heads = 4

    def __call__(
        self, module: Any, hidden: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (module.to_q, module.to_k, module.to_v)
        )
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return module.to_out(output.transpose(1, 2).flatten(2))


class LinearProcessor:
    """A processor without attention."""

    def __call__(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return module.to_out(module.to_v(hidden))


class ProcessorAttention(nn.Module):
    """An attention that hands its work to a processor, as those of diffusers do."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "to_out"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.processor = processor

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        known = set(inspect.signature(self.processor.__call__).parameters)
        options = {name: value for name, value in options.items() if name in known}
        return self.processor(self, hidden, **options)


class MaskedAttention(Attention):
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
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class AsksForOutputs(Attention):
    """What torch's function returns is asked for its type."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.tanh(y) if type(y) is torch.Tensor else y
