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


def test_two_stock_models_lose_the_same_to_the_bit(corpus: Corpus, settings: Settings) -> None:
    few = replace(settings, steps=10)
    comparison, _ = training.compare((STOCK, TWIN), corpus, few, "float32")
    assert comparison.losses["stock"] == comparison.losses["twin"]
    assert comparison.loss_differences("stock", "twin") == [0.0] * 10


def test_a_changed_model_is_told_apart(corpus: Corpus, settings: Settings) -> None:
    def disturb(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.transformer.ln_f.weight.mul_(1.05)

    few = replace(settings, steps=4)
    contenders = (STOCK, Contender("changed", disturb))
    comparison, _ = training.compare(contenders, corpus, few, "float32")
    assert max(comparison.loss_differences("stock", "changed")) > LOSS_DIFFERENCE_MARK


def test_fused_losses_are_stocks_within_rounding(corpus: Corpus, settings: Settings) -> None:
    comparison, trainers = training.compare((STOCK, FUSED), corpus, settings, "float32")
    assert len(comparison.losses["fusedops"]) == COMPARED
    assert max(comparison.loss_differences("stock", "fusedops")) <= LOSS_DIFFERENCE_MARK
    assert comparison.losses["fusedops"][-1] < comparison.losses["fusedops"][0]
    assert comparison.reports["fusedops"].num_replaced > 0
    assert (
        trainers["fusedops"].model.state_dict().keys()
        == trainers["stock"].model.state_dict().keys()
    )


def test_bfloat16_runs_under_autocast_and_keeps_float32_weights(
    corpus: Corpus, settings: Settings
) -> None:
    few = replace(settings, steps=4)
    comparison, trainers = training.compare((STOCK, FUSED), corpus, few, "bfloat16")
    weights = [*trainers["stock"].model.parameters(), *trainers["fusedops"].model.parameters()]
    assert {weight.dtype for weight in weights} == {torch.float32}
    exact, _ = training.compare((STOCK,), corpus, few, "float32")
    assert comparison.losses["stock"] != exact.losses["stock"]
    rounding = torch.finfo(torch.bfloat16).eps
    assert max(comparison.loss_differences("stock", "fusedops")) < rounding


@pytest.mark.parametrize("steps", [1, 4, 6, 13])
def test_each_contender_trains_each_step_once_in_order(steps: int) -> None:
    plan = training.turns(steps, ["a", "b", "c"])
    for name in "abc":
        trained = [step for each, block in plan if each == name for step in block]
        assert trained == list(range(steps))


def test_each_contender_is_first_in_its_turn() -> None:
    plan = training.turns(4 * training.BLOCK, ["a", "b"])
    assert [name for name, _ in plan] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_first_steps_are_not_timed(corpus: Corpus, settings: Settings) -> None:
    comparison, _ = training.compare((STOCK,), corpus, replace(settings, steps=6), "float32")
    assert len(comparison.losses["stock"]) == 6
    assert len(comparison.timing.rounds["stock"]) == 6 - training.UNTIMED


def test_time_limit_leaves_the_compared_steps(corpus: Corpus, settings: Settings) -> None:
    many = replace(settings, steps=10 * COMPARED)
    comparison, _ = training.compare((STOCK, TWIN), corpus, many, "float32", seconds=0.0)
    assert [len(losses) for losses in comparison.losses.values()] == [COMPARED, COMPARED]


def test_a_loss_that_is_not_finite_stops_the_training(corpus: Corpus, settings: Settings) -> None:
    def break_it(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.transformer.ln_f.weight.fill_(float("inf"))

    with pytest.raises(FloatingPointError, match="broken, float32: the loss of step 0"):
        training.compare((Contender("broken", break_it),), corpus, settings, "float32")


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


def test_train_on_lets_the_learning_rate_fall(corpus: Corpus, settings: Settings) -> None:
    model = training.build_model(settings)
    trainer = Trainer(STOCK, model, replace(settings, warmup=1), "float32")
    training.train_on(trainer, corpus, 10)
    assert len(trainer.losses) == 10
    (group,) = trainer.optimizer.param_groups
    assert group["lr"] == pytest.approx(settings.learning_rate / 10)


def test_sample_begins_with_the_prompt_and_follows_the_seed(
    corpus: Corpus, settings: Settings
) -> None:
    trainer = Trainer(FUSED, training.build_model(settings), settings, "float32")
    first = training.generate(trainer, corpus, "def", 12)
    torch.rand(3)  # the state of the generator must not matter
    assert training.generate(trainer, corpus, "def", 12) == first
    assert first.startswith("def") and len(first) > len("def")
    assert trainer.model.training


def test_prompt_longer_than_the_context_is_shortened(corpus: Corpus, settings: Settings) -> None:
    trainer = Trainer(STOCK, training.build_model(settings), settings, "float32")
    prompt = "return a " * 20
    ids = corpus.tokenizer.encode(prompt).ids
    assert len(ids) > settings.seq_len
    kept = corpus.tokenizer.decode(ids[-settings.seq_len // 2 :])
    written = training.generate(trainer, corpus, prompt, 100)
    assert written.startswith(kept) and len(written) > len(kept)


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
