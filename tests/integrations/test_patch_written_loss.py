"""Models that compute a cross-entropy in their own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from encoder_families import BY_CODE
from patch_testing import assert_same_training, counted, gradients, patched_pair
from torch import nn

import fusedops

transformers = pytest.importorskip("transformers")

VOCABULARY = 96
TOKENS = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(3))
LABELS = TOKENS.masked_fill(torch.arange(11) > 8, -100)


def through_closures(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method as transformers does: it is the one value of the wrapper's closure."""

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


def through_a_list(function: Callable[..., Any]) -> Callable[..., Any]:
    held = [function]

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return held[0](self, *args, **kwargs)

    return wrapper


class Written(nn.Module):
    """A language model with its head, and the loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.head = nn.Linear(32, VOCABULARY)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, VOCABULARY))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits.view(-1, VOCABULARY)


class NanoGPTLoss(Written):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = torch.where(labels < 0, -1, labels)
        return F.cross_entropy(self.logits(tokens), labels.view(-1), ignore_index=-1)


class SmoothedLoss(Written):
    @through_closures
    @through_closures
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        loss: torch.Tensor = criterion(self.logits(tokens), labels.view(-1))
        return loss / 24


class WeightedLoss(Written):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.logits(tokens), labels.view(-1), self.weight)
        assert isinstance(loss, torch.Tensor)
        return loss


class ClassesSecond(Written):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens).view(*tokens.shape, VOCABULARY)
        return F.cross_entropy(logits.transpose(1, 2), labels)


class HiddenLoss(Written):
    @through_a_list
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(tokens), labels.view(-1))


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(TOKENS, LABELS)
    return loss


@pytest.mark.parametrize(
    ("cls", "calls"),
    [(NanoGPTLoss, 1), (SmoothedLoss, 1), (WeightedLoss, 0), (ClassesSecond, 0), (HiddenLoss, 0)],
)
def test_a_home_made_loss_is_the_same(cls: type[Written], calls: int) -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(cls())
    with counted() as counts:
        loss_of(patched)
    assert counts["cross_entropy"] == calls
    assert_same_training(patched, stock, loss_of, draws=3)
    before = gradients(stock, loss_of)
    fusedops.unpatch(patched)
    for name, gradient in gradients(patched, loss_of).items():
        assert torch.equal(gradient, before[name]), name


def test_compiled_code_is_the_same_in_one_graph() -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(SmoothedLoss())
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    with counted() as counts:
        actual = gradients(patched, lambda model: loss_of(compiled))
    assert counts["cross_entropy"] == 1
    eager = gradients(patched, loss_of)
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, eager[name])
    torch.compiler.reset()


def test_the_loss_of_a_few_classes_stays() -> None:
    bart = replace(BY_CODE["Bart"], cls="BartForSequenceClassification")
    model = bart.model(num_labels=3)
    assert "cross_entropy" not in fusedops.patch(model).counts


class SelfAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        result = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return result.transpose(1, 2).flatten(2)


class AttentionAndLoss(Written):
    """A file such as nanoGPT's, whose attention and loss read the same ``F``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.attention(self.embedding(tokens)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def test_attention_of_the_same_file_is_fused_as_well() -> None:
    torch.manual_seed(0)
    model = AttentionAndLoss()
    for level, calls in ("O2", 0), ("O3", 1):
        fusedops.patch(model, level=level)
        with counted() as counts:
            loss_of(model)
        assert (counts["attention"], counts["cross_entropy"]) == (calls, 1)


def test_a_classifier_leaves_the_attention_of_its_file_fused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.FalconConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    for name in ("FalconModel", "FalconForSequenceClassification", "FalconModel"):
        model = getattr(transformers, name)(config)
        fusedops.patch(model, level="O3")
        with counted() as counts:
            model(TOKENS)
        assert counts["attention"] == 1
