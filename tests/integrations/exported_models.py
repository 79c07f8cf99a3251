"""Small models as one exports them, tensors in and logits out, with inputs of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from families import BERT, DENSE, GPT2, SPARSE, T5, VIT
from torch import nn
from torch.export import Dim

import fusedops


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(2, batch * length + 2).mul(7).remainder(97).view(batch, length)


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, length * 2 // 3 :] = 0
    return mask


def pixels(batch: int, length: int) -> torch.Tensor:
    return torch.sin(torch.arange(batch * 3.0 * 16 * 16)).view(batch, 3, 16, 16)


@dataclass(frozen=True)
class Model:
    """A model, what it takes, and of what sizes.

    Attributes:
        make: returns the model.
        inputs: by name, from batch and length.
        options: further arguments of its forward.
    """

    make: Callable[[], nn.Module]
    inputs: dict[str, Callable[[int, int], torch.Tensor]]
    options: dict[str, Any]

    def pair(self) -> tuple[nn.Module, nn.Module]:
        """Return the model patched, and stock, both from tensors to logits."""
        stock = self.make().eval()
        patched = copy.deepcopy(stock)
        fusedops.patch(patched)
        return _Logits(patched, self), _Logits(stock, self)

    def of(self, batch: int, length: int) -> tuple[torch.Tensor, ...]:
        """Return inputs of a size."""
        return tuple(make(batch, length) for make in self.inputs.values())

    @property
    def dynamic(self) -> Any:
        """The sizes that an export leaves open: batch and length of all inputs."""
        both = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        batch = {0: Dim.DYNAMIC}
        return (tuple(batch if make is pixels else both for make in self.inputs.values()),)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module, kind: Model) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.kind.inputs, args, strict=True)), **self.kind.options)[0]


def _causal(make: Callable[[], nn.Module]) -> Model:
    return Model(make, {"input_ids": tokens}, {"use_cache": False})


MODELS = {
    "GPT2": _causal(GPT2.model),
    "Llama": _causal(DENSE["Llama"].model),
    "Qwen3": _causal(DENSE["Qwen3"].model),
    "Mixtral": _causal(SPARSE["Mixtral"].model),
    "Qwen3Moe": _causal(SPARSE["Qwen3Moe"].model),
    "Bert": Model(BERT.model, {"input_ids": tokens, "attention_mask": padding}, {}),
    "T5": Model(
        T5.model,
        {"input_ids": tokens, "attention_mask": padding, "decoder_input_ids": tokens},
        {"use_cache": False},
    ),
    "ViT": Model(VIT.model, {"pixel_values": pixels}, {}),
}
# What the families differ in: products by Conv1D, experts, cross-attention, an additive mask.
SIZES = ((3, 12), (2, 5), (5, 20), (1, 7))
