"""What the tables of model types share: a row, and how a model is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from patch_testing import patched_pair
from torch import nn

transformers = pytest.importorskip("transformers")

LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = LAYERS | {"vocab_size": 97}
IDS = torch.arange(2 * 12).mul(7).remainder(97).view(2, 12)
LEFT_PADDING = torch.ones_like(IDS)
LEFT_PADDING[0, :3] = 0
Inputs = Callable[[nn.Module], dict[str, torch.Tensor]]


def labelled(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a causal language model in training."""
    return {"input_ids": IDS, "labels": IDS}


def padded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a causal language model in evaluation."""
    return {"input_ids": IDS, "attention_mask": LEFT_PADDING}


@dataclass(frozen=True)
class Family:
    """A model type in a size that runs in milliseconds; the tests of all types are its columns.

    Attributes:
        name: of the tests; of a causal language model what its classes begin with.
        cls: of the model.
        config: of its configuration's class.
        options: of the configuration.
        ops: how often each op runs in a step of training without checkpointing.
        inputs: the arguments of the model, labels included.
        prompt: its arguments in evaluation, of which generation takes those that it knows.
        valid: takes from the logits of ``prompt`` those that are not of padding.
        logits_name: of the model's output.
        objective: the loss, from the model's output.
        dropout: the options that are probabilities of dropout.
        smooth: options without ReLU, for half precision: its slope jumps, and whichever way an
            argument near 0 is rounded is right.
        draws: of the weights that a comparison under autocast takes the largest errors of; 0: one,
            without a redraw. A scalar parameter needs several, and so does the bias of a key, whose
            gradient is a difference of large numbers.
        seed: for a type with experts one with which every choice of experts survives noise of
            some 2%: where half precision flips a choice, the result jumps, and no two programs
            flip the same.
        varied: parts of the names of parameters and buffers that are not left ones and zeros.
        frozen: parts of the names of parameters that a step gives no gradient.
        failed: the classes that have a rule, of which modules are not replaced.
        generates: whether the model has ``generate``.
    """

    name: str
    cls: str
    config: str
    options: dict[str, Any]
    ops: dict[str, int]
    inputs: Inputs = labelled
    prompt: Inputs = padded
    valid: Callable[[torch.Tensor], torch.Tensor] = field(
        default=lambda logits: logits[LEFT_PADDING > 0]
    )
    logits_name: str = "logits"
    objective: Callable[[Any], torch.Tensor] = field(default=lambda output: output.loss)
    dropout: tuple[str, ...] = ()
    smooth: dict[str, Any] = field(default_factory=dict)
    draws: int = 0
    seed: int = 0
    varied: tuple[str, ...] = ("norm",)
    frozen: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    generates: bool = False

    def model(self, **options: Any) -> nn.Module:
        """Return a model in training, the same at every call."""
        options = self.options | options
        model = build(self.cls, self.config, options, seed=self.seed, varied=self.varied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        """Return the model patched, and stock."""
        return patched_pair(self.model(**options))

    def loss(self, model: nn.Module) -> torch.Tensor:
        return self.objective(model(**self.inputs(model)))

    def logits(self, model: nn.Module) -> torch.Tensor:
        """Return the logits that are not of padding."""
        return self.valid(getattr(model(**self.prompt(model)), self.logits_name))


def by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


def variant(family: Family, label: str, options: dict[str, Any], **ops: int) -> Family:
    """Return a row with other options; an op that does not run has the count 0."""
    ops = {op: count for op, count in (family.ops | ops).items() if count}
    name = f"{family.name}, {label}"
    return replace(family, name=name, options=family.options | options, ops=ops)


def needs_sdpa(family: Family) -> None:
    """Skip the test if this transformers has no ``sdpa`` for a family, as 5.24 for Gemma 2."""
    if not getattr(transformers, family.cls)._supports_sdpa:
        pytest.skip(f"{family.name} has no sdpa")


def build(
    name: str, config: str, options: dict[str, Any], *, seed: int = 0, varied: Sequence[str]
) -> nn.Module:
    """Return a model in training, the same at every call.

    ``varied`` are parts of the names of the parameters and buffers that are not left ones and
    zeros, which hide for which of two modules a weight was.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).train()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in key.lower() for part in varied):
                value.add_(torch.randn_like(value), alpha=0.1)
    return model
