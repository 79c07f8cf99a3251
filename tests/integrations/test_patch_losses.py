"""Losses of transformers' models, and of models that compute them in their own forward.

They have the same values, whoever's loss it is, and go back to where they came from.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import BART_LIKE, BERT, DENSE, IDS, loss, transformers
from patch_testing import (
    assert_close,
    assert_same_training,
    counted,
    gradients,
    patched_pair,
)
from torch import nn
from torch.nn.functional import cross_entropy as loss_of_classes
from transformers.loss import loss_utils

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe
from fusedops.integrations.hf.rules import losses

CLASSES = 53
CAUSAL = (losses.causal_lm_loss, loss_utils.ForCausalLMLoss)
MASKED = (losses.masked_lm_loss, loss_utils.ForMaskedLMLoss)
LLAMA = DENSE["Llama"]


def labels(ignored: int = -100) -> torch.Tensor:
    """Return labels of 3 sequences, one of which counts for nothing."""
    found = torch.arange(3 * 11).mul(7).remainder(CLASSES).view(3, 11)
    found[0, 2:5] = found[2] = ignored
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "divided by a number": {"num_items_in_batch": 40},
    "divided by a tensor": {"num_items_in_batch": torch.tensor(40)},
    "another index": {"labels": labels(3), "ignore_index": 3},
    "more arguments": {"output_attentions": True},
    "shifted": {"labels": None, "shift_labels": labels()},
    "shifted and divided": {"shift_labels": labels().roll(1), "num_items_in_batch": 20},
}


def run(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.sin(torch.arange(3.0 * 11 * CLASSES) * 3).mul(4).view(3, 11, CLASSES).bfloat16()
    logits = logits.to(dtype).requires_grad_()
    value = function(logits=logits, vocab_size=CLASSES, **({"labels": labels()} | options))
    return value.detach(), *torch.autograd.grad(value, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("ours", "theirs"), [CAUSAL, MASKED], ids=["causal", "masked"])
def test_the_loss_is_theirs(
    ours: Any,
    theirs: Any,
    options: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if theirs is loss_utils.ForMaskedLMLoss and "shift_labels" in options:
        options = {"labels": labels()} | {"num_items_in_batch": 20}
    with counted() as calls:
        found = run(ours, dtype, options)
    eager = run(theirs, dtype, options)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    truth = run(theirs, torch.float64, options)
    assert calls == {"cross_entropy": 1, "cross_entropy_backward": 1}
    for actual, stock, exact in zip(found, eager, truth, strict=True):
        assert actual.dtype == stock.dtype
        precision = torch.float32 if dtype == torch.float64 else actual.dtype
        budget = dtypes.error_budget(stock, exact, precision, depth=CLASSES)
        assert ((actual.double() - exact).abs() <= budget).all()


def test_all_labels_ignored_is_nan_and_out_of_range_an_error() -> None:
    for function in CAUSAL:
        value, gradient = run(function, torch.float32, {"labels": labels().fill_(-100)})
        assert value.isnan() and torch.count_nonzero(gradient) == 0
        with pytest.raises((ValueError, IndexError), match=f"{CLASSES}"):
            run(function, torch.float32, {"labels": labels().fill_(CLASSES)})


@pytest.mark.parametrize("wrong", [labels().int(), labels().float()])
def test_what_the_op_does_not_take_is_left_to_theirs(wrong: torch.Tensor) -> None:
    with pytest.raises(RuntimeError) as expected:
        run(CAUSAL[1], torch.float32, {"labels": wrong})
    with counted() as calls, pytest.raises(RuntimeError) as found:
        run(CAUSAL[0], torch.float32, {"labels": wrong})
    assert str(found.value) == str(expected.value)
    assert not calls


def mine(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return logits.square().mean() + labels.sum()


def test_a_loss_of_the_users_is_kept_and_reported() -> None:
    model = LLAMA.model()
    model.loss_function = mine
    for report in (fusedops.patch(model, strict=True), describe(model)):
        entry = report["loss_function"]
        assert (entry.cls, entry.replaced, entry.failed) == ("mine", False, False)
        assert entry.reason == "a loss of its own"
    with counted() as calls:
        loss(model)
    assert calls["cross_entropy"] == 0
    fusedops.unpatch(model)
    assert model.loss_function is mine
    patched, _ = LLAMA.pair()
    patched.loss_function = mine
    assert not describe(patched)["loss_function"].replaced
    fusedops.unpatch(patched)
    assert patched.loss_function is mine


def test_unpatch_gives_their_loss_back_where_it_came_from() -> None:
    model = LLAMA.model()
    attributes = set(vars(model))
    fusedops.patch(model)
    assert model.loss_function is losses.causal_lm_loss
    assert "cross_entropy" in describe(model).counts
    fusedops.patch(model, level="O1")
    assert describe(model)["loss_function"].reason == "not patched"
    fusedops.unpatch(model)
    assert set(vars(model)) == attributes
    assert model.loss_function is loss_utils.ForCausalLMLoss
    model.loss_function = loss_utils.ForMaskedLMLoss  # chosen against the class
    fusedops.patch(model)
    assert model.loss_function is losses.masked_lm_loss
    fusedops.unpatch(model)
    assert model.loss_function is loss_utils.ForMaskedLMLoss


def test_strict_that_fails_keeps_the_losses_of_before() -> None:
    model = LLAMA.model()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: None)
    with pytest.raises(fusedops.UnsupportedError):
        fusedops.patch(model, strict=True)
    assert model.loss_function is loss_utils.ForCausalLMLoss
    fusedops.patch(model)
    with pytest.raises(fusedops.UnsupportedError):
        fusedops.patch(model, strict=True)
    assert model.loss_function is losses.causal_lm_loss


def test_a_model_inside_another_and_its_copy() -> None:
    stock = nn.ModuleDict({"inner": LLAMA.model()})
    patched = copy.deepcopy(stock)
    assert fusedops.patch(patched)["inner.loss_function"].op == "cross_entropy"
    twin = copy.deepcopy(patched)
    fusedops.unpatch(patched)
    with counted() as calls:
        assert_close(loss(twin["inner"]), loss(patched["inner"]))
    assert calls["cross_entropy"] == 1


@pytest.mark.parametrize("name", [name for name in BART_LIKE if name != "NllbMoe"])
def test_a_head_with_its_loss_written_out_returns_tuples_as_well(name: str) -> None:
    patched, _ = BART_LIKE[name].pair()
    inputs = BART_LIKE[name].inputs(patched)
    plain, tuples = (patched(**inputs, return_dict=as_dict) for as_dict in (True, False))
    assert isinstance(tuples, tuple) and torch.equal(tuples[0], plain.loss)
    assert "cross_entropy" in describe(patched).counts


def test_a_head_with_a_loss_of_its_own_returns_what_theirs_does() -> None:
    patched, stock = BERT.pair()
    nones = [None] * 6
    with counted() as calls:
        found = patched(IDS, labels=IDS, output_hidden_states=True)
        pair = patched(IDS, labels=IDS, return_dict=False)
        by_position = patched(IDS, *nones, IDS)
    assert calls["cross_entropy"] == 3
    expected = stock(IDS, labels=IDS, output_hidden_states=True)
    assert list(found) == list(expected)
    assert_close(found.loss, expected.loss)
    assert isinstance(pair, tuple) and len(pair) == 2
    assert torch.equal(pair[0], found.loss) and torch.equal(by_position.loss, found.loss)
    assert "loss" not in patched(IDS)
    patched.config.return_dict = False
    assert isinstance(patched(IDS, labels=IDS), tuple)


# Models that compute a cross-entropy in their own forward.

VOCABULARY = 96
TOKENS = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(3))
WRITTEN_LABELS = TOKENS.masked_fill(torch.arange(11) > 8, -100)


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


class RenamedLoss(Written):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of_classes(self.logits(tokens), labels.view(-1))


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


def written_loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(TOKENS, WRITTEN_LABELS)
    return loss


@pytest.mark.parametrize(
    ("cls", "calls"),
    [
        *[(NanoGPTLoss, 1), (RenamedLoss, 1), (SmoothedLoss, 1)],
        *[(WeightedLoss, 0), (ClassesSecond, 0), (HiddenLoss, 0)],
    ],
)
def test_a_home_made_loss_is_the_same(cls: type[Written], calls: int) -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(cls())
    with counted() as counts:
        written_loss(patched)
    assert counts["cross_entropy"] == calls
    assert_same_training(patched, stock, written_loss, draws=3)
    before = gradients(stock, written_loss)
    fusedops.unpatch(patched)
    for name, gradient in gradients(patched, written_loss).items():
        assert torch.equal(gradient, before[name]), name


def test_the_written_loss_a_few_classes_stays() -> None:
    bart = replace(BART_LIKE["Bart"], cls="BartForSequenceClassification")
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
            written_loss(model)
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
