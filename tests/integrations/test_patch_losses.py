"""Losses of transformers' models: the same values, whoever's loss it is, and back again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import DENSE, IDS, SPARSE, loss
from encoder_families import BY_CODE, FAMILIES
from patch_testing import assert_close, counted, losses_of, make_trainer
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe
from fusedops.integrations.hf.rules import losses

pytest.importorskip("accelerate")

from transformers.loss import loss_utils

CLASSES = 53
CAUSAL = (losses.causal_lm_loss, loss_utils.ForCausalLMLoss)
MASKED = (losses.masked_lm_loss, loss_utils.ForMaskedLMLoss)
LLAMA = DENSE["Llama"]
BERT = FAMILIES["BertForMaskedLM"]


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


def test_a_changed_transformers_is_not_taken_for_the_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LLAMA.model()
    fusedops.patch(model, level="O2")

    def smoothed(source: Any, target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(source, target, label_smoothing=0.1)

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", smoothed)
    with pytest.raises(fusedops.UnsupportedError, match="loss_function: .*fixed_cross_entropy"):
        fusedops.patch(model, strict=True)
    with counted() as calls:
        report = fusedops.patch(model)
        loss(model)
    assert report["loss_function"].failed
    assert calls["cross_entropy"] == 0


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


@pytest.mark.parametrize("name", [name for name in BY_CODE if name != "NllbMoe"])
def test_a_head_with_its_loss_written_out_returns_tuples_as_well(name: str) -> None:
    patched, _ = BY_CODE[name].pair()
    inputs = BY_CODE[name].inputs(patched)
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


def trained(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Return the losses of Trainer, whose batches differ in how many labels count."""
    rows = []
    for start in range(32):
        ids = (torch.arange(12) * 3 + start * 11) % 97
        rows.append({"input_ids": ids, "labels": ids.where(torch.arange(12) >= start % 9, -100)})
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = make_trainer(model, folder, rows, max_steps=6, **batches, **options)
    return [*losses_of(trainer), trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", [LLAMA, BERT, SPARSE["Mixtral"]], ids=lambda family: family.name)
def test_trainer_with_accumulation_and_its_own_smoothing(
    family: Any, smoothing: float, tmp_path: Path
) -> None:
    options = {"output_router_logits": True} if family.name == "Mixtral" else {}
    patched, stock = family.pair(**options)
    expected = trained(stock, tmp_path / "stock", label_smoothing_factor=smoothing)
    with counted() as calls:
        found = trained(patched, tmp_path / "patched", label_smoothing_factor=smoothing)
    assert len(found) == 7
    for actual, wanted in zip(found, expected, strict=True):
        assert abs(actual - wanted) <= 1e-4 * wanted
    # The Trainer smooths the labels itself, from the logits, and takes the labels away for it.
    assert calls["cross_entropy_backward"] == (12 if smoothing == 0.0 else 0)
    assert calls["moe_mlp_backward"] == 12 * family.ops.get("moe_mlp", 0)
