"""Modules as users write them, which read numbers, tables and functions that tests change.

Their names say what they read or call: a function, a default, a method of their base.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32
HEADS = 4
EPS = 1e-6
CAUSAL = True
SQUARED = False
APPROXIMATE = "none"
SMOOTHING = 0.0
STEP = CALLS = 0
ACTIVATION = nn.GELU()


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


class HelpedNorm(Norm):
    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return normed_by_number(x)


class DefaultNorm(Norm):
    def _norm(self, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return normed(x, eps)


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


class Attention(nn.Module):
    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, -1)
        return parts.permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(*self.heads(x)).transpose(1, 2).flatten(2)


class DerivedAttention(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(2 * q, k, v)


class DefaultAttention(Attention):
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


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


class CallingDropout(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
