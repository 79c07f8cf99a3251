"""The demo's training: all contenders get the same, and only rounding tells them apart."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from gpt2_demo import half_memory, training
from gpt2_demo.corpus import Corpus
from gpt2_demo.report import LOSS_DIFFERENCE_MARK
from gpt2_demo.training import COMPARED, FUSED, STOCK, Contender, Settings, Trainer

TWIN = Contender("twin", lambda model: None)


def final_norm_scaled(name: str, factor: float) -> Contender:
    def prepare(model: torch.nn.Module) -> None:
        model.transformer.ln_f.weight.data.mul_(factor)

    return Contender(name, prepare)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_rounding_and_changes_tell_contenders_apart(
    corpus: Corpus, settings: Settings, dtype: str
) -> None:
    """The time limit is over at once: the steps that are compared run nevertheless."""
    contenders = (STOCK, TWIN, FUSED, final_norm_scaled("changed", 1.05))
    many = replace(settings, steps=10 * COMPARED)
    comparison, trainers = training.compare(contenders, corpus, many, dtype, seconds=0.0)
    losses = comparison.losses
    assert {name: len(values) for name, values in losses.items()} == dict.fromkeys(losses, COMPARED)
    assert len(comparison.timing.rounds["stock"]) == COMPARED - training.UNTIMED
    assert comparison.loss_differences("stock", "twin") == [0.0] * COMPARED
    assert max(comparison.loss_differences("stock", "changed")) > LOSS_DIFFERENCE_MARK
    rounding = LOSS_DIFFERENCE_MARK if dtype == "float32" else torch.finfo(torch.bfloat16).eps
    assert max(comparison.loss_differences("stock", "fusedops")[:4]) <= rounding
    assert dtype != "float32" or max(comparison.loss_differences("stock", "fusedops")) <= rounding
    assert losses["fusedops"][-1] < losses["fusedops"][0]
    assert comparison.reports["fusedops"].num_replaced > 0
    states = [trainers[name].model.state_dict() for name in ("stock", "fusedops")]
    assert states[0].keys() == states[1].keys()
    assert all(weight.dtype == torch.float32 for state in states for weight in state.values())
    if dtype == "bfloat16":
        exact, _ = training.compare((STOCK,), corpus, replace(settings, steps=4), "float32")
        assert exact.losses["stock"] != losses["stock"][:4]


def test_contenders_take_turns_and_each_is_first_in_its_turn() -> None:
    plan = training.turns(4 * training.BLOCK, ["a", "b"])
    assert [name for name, _ in plan] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_loss_that_is_not_finite_stops_the_training(corpus: Corpus, settings: Settings) -> None:
    with pytest.raises(FloatingPointError, match="broken, float32: the loss of step 0"):
        training.compare((final_norm_scaled("broken", torch.inf),), corpus, settings, "float32")


def test_validation_loss_is_the_mean_over_the_batches(corpus: Corpus, settings: Settings) -> None:
    few = replace(settings, steps=1, validation_batches=3)
    comparison, trainers = training.compare((STOCK,), corpus, few, "float32")
    training.inspect(comparison, trainers, corpus)
    model = trainers["stock"].model
    assert model.training
    rows = torch.cat(corpus.validation_batches(batch_size=2, seq_len=16, max_batches=3))
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert comparison.validation_losses["stock"] == pytest.approx(expected.item())


def test_peak_memory_counts_weights_states_gradients_and_activations(
    corpus: Corpus, settings: Settings
) -> None:
    trainer = Trainer(STOCK, training.build_model(settings), settings, "float32")
    trainer.step(corpus.batch(0, seed=0, batch_size=2, seq_len=16), 1.0)
    before = copy.deepcopy(trainer.model.state_dict())
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    small = trainer.peak_memory(corpus.batch(1, seed=0, batch_size=2, seq_len=16))
    large = trainer.peak_memory(corpus.batch(1, seed=0, batch_size=8, seq_len=16))
    assert small > 4 * weights  # weights, gradients, Adam's two moments
    logits = 16 * settings.vocab_size * 4
    assert large - small > 6 * 2 * logits  # six more sequences: logits and their gradient at least
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_sample_is_of_the_model_trained_on(corpus: Corpus, settings: Settings) -> None:
    """The learning rate falls, the seed decides, and a prompt beyond the context is shortened."""
    model = training.build_model(settings)
    trainer = Trainer(FUSED, model, replace(settings, warmup=1), "float32")
    training.train_on(trainer, corpus, 10)
    assert len(trainer.losses) == 10
    (group,) = trainer.optimizer.param_groups
    assert group["lr"] == pytest.approx(settings.learning_rate / 10)
    first = training.generate(trainer, corpus, "def", 12)
    torch.rand(3)  # the state of the generator must not matter
    assert training.generate(trainer, corpus, "def", 12) == first
    assert first.startswith("def") and len(first) > len("def")
    ids = corpus.tokenizer.encode("return a " * 20).ids
    kept = corpus.tokenizer.decode(ids[-settings.seq_len // 2 :])
    written = training.generate(trainer, corpus, "return a " * 20, 100)
    assert len(ids) > settings.seq_len and written.startswith(kept) and len(written) > len(kept)
    assert trainer.model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_recomputed_model_loses_the_same_in_half_of_the_activation_memory(
    corpus: Corpus, settings: Settings, dtype: str
) -> None:
    deep = replace(settings, layers=4, steps=5, seq_len=16)
    found = half_memory.measure(corpus, deep, dtype)
    assert found.same_losses
    assert found.losses["fusedops"] == found.losses["recomputed"]
    assert found.activations["recomputed"] < 0.5 * found.activations["fusedops"]
    assert all(speed > 0 for speed in found.tokens_per_second.values())
