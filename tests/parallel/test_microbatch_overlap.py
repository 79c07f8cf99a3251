"""Micro-batch overlap: which communication overlaps which product, forward and backward."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import full_tensor
from run_ranks import on_threads

from fusedops import memory
from fusedops._core.checks import UnsupportedError
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import COMPUTE, Log
from fusedops.testing import threads

MARKS = runpy.run_path(str(Path(__file__).parents[2] / "docs/gen_microbatch_overlap.py"))
LAYERS, SEQUENCES, TOKENS = 3, 4, 12
TP_SP = {"tp": 2, "sp": True}
PRODUCTS = ("query, key, value", "attention", "feed-forward", "experts")
EXCHANGES = ("tokens to experts", "experts' results", "gradients of tokens", "gradients of results")


def _engine(
    name: str,
    *,
    layers: int = LAYERS,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **values: Any,
) -> TrainEngine:
    sizes: dict[str, Any] = {"num_layers": layers, "vocab_size": 131, "seq_len": 32}
    drops = {"dropout": dropout, "attention_dropout": dropout}
    whole = Transformer(replace(preset(name), **sizes, **drops), device="meta", dtype=dtype)
    return parallelize(whole, ParallelConfig(**values), seed=0)


def _step(run: TrainEngine) -> tuple[torch.Tensor, Log, Log]:
    """Return the loss, and what was recorded before and after it was known."""
    model: Any = run.model
    generator = torch.Generator().manual_seed(1)
    shape = SEQUENCES * run.data_ranks, TOKENS + 1
    text = torch.randint(model.config.vocab_size, shape, generator=generator)
    shard = run.shard_batch(run.rows(text[:, :-1]), run.rows(text[:, 1:]))
    count = run.count(shard.labels)
    run.begin(last=True)
    torch.manual_seed(2)
    MARKS["begin_marks"]()
    with collectives.recorded() as forward:
        loss = run.loss(model(*shard[:2], positions=shard.positions), count)
    loss = MARKS["end_marks"](loss)
    with collectives.recorded() as backward:
        loss.backward()
    return loss.detach(), forward, backward


def _recorded(rank: int, name: str, values: dict[str, Any]) -> tuple[Log, Log]:
    return _step(_engine(name, **values))[1:]


def _hidden(log: Log, kinds: tuple[str, ...]) -> list[bool]:
    """Return whether products of the other half run beside a communication that a turn begins.

    Of each communication of these kinds, and of each exchange of tokens.
    """
    places = {(event.number, event.phase): i for i, event in enumerate(log.events)}
    turns = [
        (event.label, places[event.number, "start"], places[event.number, "end"])
        for event in log.events
        if event.kind == COMPUTE and event.phase == "end"
    ]
    found = []
    for call in log.calls:
        begin = places[call.number, "start"]
        end = places.get((call.number, "end"), len(log.events))
        owners = [label for label, first, last in turns if first < begin < last]
        if owners and (call.kind in kinds or call.label in EXCHANGES):
            inside = [label for label, first, last in turns if begin < first and last < end]
            others = [label for label in inside if label[:6] != owners[0][:6]]
            found.append(any(label.split(": ")[1].startswith(PRODUCTS) for label in others))
    return found


# Model, sizes, what is looked at, how many of them, how many have nothing beside them each way.
# Layers whose weights come and go are called one by one: there the halves meet after each.
OVERLAPS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int, int]] = {
    "tp2": ("tiny-gpt2", {"tp": 2}, ("all_reduce",), 4 * LAYERS, 1),
    "tp2-sp": ("tiny-gpt2", TP_SP, ("all_gather", "reduce_scatter"), 8 * LAYERS, 2),
    "dp2-tp2-zero3": (
        "tiny-gpt2",
        {"dp": 2, "tp": 2, "zero": 3, "bucket_layers": (0, 1, 2)},
        ("all_reduce",),
        4 * LAYERS,
        LAYERS,
    ),
    "ep2": ("tiny-mixtral", {"dp": 2, "ep": 2}, (), 4 * LAYERS, 1),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_communication_of_one_half_runs_beside_products_of_the_other(case: str) -> None:
    name, values, kinds, count, bare = OVERLAPS[case]
    ranks = ParallelConfig(**values).sizes.ranks
    with MARKS["backward_marked"]():
        recorded = threads.run(_recorded, ranks, name, values | {"overlap_microbatches": True})
    for logs in recorded:
        for log in logs:
            hidden = _hidden(log, kinds)
            assert len(hidden) == count and hidden.count(False) == bare


def test_gradients_of_norms_and_biases_are_summed_with_their_layer() -> None:
    """Not after all layers: buckets of data parallelism would wait for them."""
    values = TP_SP | {"overlap_microbatches": True}
    with MARKS["backward_marked"]():
        logs = threads.run(_recorded, 2, "tiny-gpt2", values)
    for _, backward in logs:
        assert len(_hidden(backward, ("all_reduce",))) == 4 * LAYERS


def _pair(name: str, **values: Any) -> list[TrainEngine]:
    """Return engines without overlap and with it."""
    return [_engine(name, **values, overlap_microbatches=overlaps) for overlaps in (False, True)]


def _assert_bits_of_activations(rank: int, name: str, values: dict[str, Any]) -> None:
    """Compare the loss, and the gradient of the first activation, which the table of words gets."""
    expected, found = _pair(name, **values)
    assert torch.equal(_step(found)[0], _step(expected)[0])
    tables = [each.model.embedding.tokens.weight for each in (found, expected)]
    assert torch.equal(*(full_tensor(table.grad) for table in tables))


@pytest.mark.parametrize("more", [{}, {"sp": True, "overlap": False, "dropout": 0.2}], ids=str)
def test_the_loss_and_gradients_of_activations_keep_their_bits(more: dict[str, Any]) -> None:
    """Dropout drops what it drops without overlap."""
    threads.run(_assert_bits_of_activations, 2, "tiny-llama", {"tp": 2} | more)


@on_threads(2)
def test_gradients_of_experts_are_added_in_float32(rank: int) -> None:
    """Of other weights autograd adds the two halves' gradients in bfloat16, a rounding more."""
    models = _pair("tiny-mixtral", layers=1, dtype=torch.bfloat16, dp=2, ep=2)
    for model in models:
        _step(model)
    named = [model.model.named_parameters() for model in models]
    one, two = ({name: full_tensor(p.grad) for name, p in each} for each in named)
    differ = {name: float((one[name] != two[name]).double().mean()) for name in one}
    experts = max(part for name, part in differ.items() if ".experts." in name)
    assert 10 * experts < differ["layers.0.attention.query.weight"]


@on_threads(4)
def test_weights_are_gathered_once_for_both_halves(rank: int) -> None:
    """Those of experts too, which other ranks share than the rest of a layer."""
    found = []
    for engine in _pair("tiny-mixtral", layers=1, dp=4, ep=2, zero=3):
        logs = _step(engine)[1:]
        weights = [e for log in logs for e in log.calls if e.label in ("weights", "gradients")]
        found.append((len(weights), sum(weight.bytes for weight in weights)))
    assert found[0] == found[1] and found[0][0] > 0


@pytest.mark.distributed
def test_on_processes(on_processes: Callable[..., Any]) -> None:
    on_processes(_assert_bits_of_activations, 2, "tiny-llama", TP_SP | {"overlap": False})


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("tiny-mixtral", "layers.*.attention", "layers.0.attention must not be named by a mem"),
        ("tiny-mixtral", "layers.*.feed_forward", "layers.0.feed_forward must not be named by a"),
        ("tiny-bert", None, "overlap_microbatches must be False for a model with post_norm"),
        ("tiny-pangu", None, "overlap_microbatches must be False for a model with query"),
    ],
)
@on_threads(2)
def test_what_phases_cannot_run_is_refused(
    rank: int, name: str, policy: str | None, message: str
) -> None:
    """A policy for a module whose parts run in phases has no effect; one sequence is not split."""
    ran = 0
    with pytest.raises(UnsupportedError, match=message):
        engine = _engine(name, tp=2, overlap_microbatches=True)
        if policy is not None:
            memory.apply(engine.model, memory.Policy(memory.recompute(policy)))
        for sequences in (1, 2):
            engine.model(torch.arange(4 * sequences).reshape(-1, 4))
            ran = sequences
    assert ran == (0 if policy is None else 1)


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        ({"tp": 2, "overlap_microbatches": 2}, TypeError, "overlap_microbatches must be a bool"),
        ({"mode": "manual"}, ValueError, "must be False with mode 'manual'"),
        ({"dp": 2, "ep": 2, "ep_deterministic": True}, UnsupportedError, "with ep_deterministic"),
        ({"dp": 2, "cp": 2}, ValueError, "must be False with tp 1 and ep 1, where no comm"),
        ({"offload": ("experts",)}, UnsupportedError, "must be False with offload 'experts'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_has_no_halves_is_refused(
    values: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        ParallelConfig(**{"overlap_microbatches": True, **values})
