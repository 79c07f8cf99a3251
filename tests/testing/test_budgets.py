"""A training step communicates as much as ``parallel/budgets.py`` declares, and no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import parity_models
import pytest
import torch
from torch import nn

from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel import budgets
from fusedops.parallel.budgets import Budget
from fusedops.parallel.comm import collectives
from fusedops.parallel.pipeline.schedules import table
from fusedops.testing import Case, threads, token_batch
from fusedops.testing.case_run import Subject
from fusedops.testing.fuzzer import adamw, token_loss
from fusedops.testing.standard import standard

BATCH, TOKENS, HIDDEN, WORDS, BYTES = 2, 16, 16, 19, 8  # of float64
ACTIVATION = BATCH * TOKENS * HIDDEN * BYTES
STATISTICS = BATCH * TOKENS * 4 * BYTES


def recorded(rank: int, subject: Subject, case: Case) -> collectives.Log:
    parallel = standard(subject.model(case), None, case)
    batch = subject.batch(case, case.generator(0))
    with collectives.recorded() as log:
        parallel.forward_backward(batch)
    return log


def logs(
    name: str,
    layers: int,
    mesh: dict[str, int],
    record: Any = recorded,
    batch_size: int = BATCH,
    dropout: float = 0.0,
    **options: Any,
) -> list[Any]:
    """Return what each rank recorded in a step."""
    drops = {"dropout": dropout, "attention_dropout": dropout}
    factory = partial(parity_models.small, name, num_layers=layers, **drops)
    batch = partial(token_batch, vocab_size=WORDS)
    subject = Subject({"": factory}, standard, batch, token_loss, adamw)
    case = Case(mesh=mesh, options=options, batch_size=batch_size, seq_len=TOKENS)
    return threads.run(record, case.ranks, subject, case)


def size_of(module: nn.Module) -> int:
    return BYTES * sum(parameter.numel() for parameter in module.parameters())


def said(ranks: int) -> Budget:
    return budgets.all_reduces(ranks, [BYTES, 2 * BYTES])


def assert_within_budget(
    found: list[collectives.Log], budget: Budget, *, exact: bool = True
) -> None:
    for log in found:
        assert not budget.exceeded(log), (budget.exceeded(log), log.counts())
        assert log.counts() == dict(budget.calls)
        if exact:
            assert log.bytes() == budget.bytes
    # No slack: the fullest rank sends most of it.
    assert max(log.bytes() for log in found) > 0.6 * budget.bytes


@pytest.mark.parametrize(("ranks", "halves"), [(2, 1), (4, 1), (2, 2)])
def test_tensor_parallel(ranks: int, halves: int) -> None:
    ends = budgets.vocabulary_ends(ranks, ACTIVATION, STATISTICS, sequence=False)
    layer = budgets.tensor_layer(ranks, ACTIVATION, halves=halves)
    assert_within_budget(
        logs("tiny-gpt2", 3, {"tp": ranks}, overlap_microbatches=halves == 2), layer * 3 + ends
    )


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"cp": 2}], ids=str)
def test_dropout_sends_one_seed_a_step(mesh: dict[str, int]) -> None:
    without, seeded = (
        logs("tiny-gpt2", 2, mesh, batch_size=4, microbatches=2, dropout=dropout)
        for dropout in (0.0, 0.2)
    )
    for rank, (log, other) in enumerate(zip(seeded, without, strict=True)):
        assert log.counts() == other.counts() | {"broadcast": 1}
        assert log.bytes() - other.bytes() == (16 if rank == 0 else 0)


def test_heads_that_ranks_share_add_up_their_gradients() -> None:
    width = HIDDEN // 4 * 2  # two heads of keys
    shared = budgets.all_reduces(4, [width * HIDDEN * BYTES] * 2)
    layer = budgets.tensor_layer(4, ACTIVATION) + shared
    ends = budgets.vocabulary_ends(4, ACTIVATION, STATISTICS, sequence=False)
    assert_within_budget(logs("tiny-llama", 2, {"tp": 4}), layer * 2 + ends)


@pytest.mark.parametrize(
    ("ranks", "overlap", "halves"),
    [(2, True, 1), (4, True, 1), (2, False, 1), (4, False, 1), (2, True, 2)],
)
def test_sequence_parallel(ranks: int, overlap: bool, halves: int) -> None:
    """Gradients of norms and biases are summed once for all halves."""
    vector = HIDDEN * BYTES
    norms = budgets.all_reduces(ranks, [2 * vector] * 2)  # weight and bias at once
    biases = budgets.all_reduces(ranks, [vector] * 2)
    ends = budgets.vocabulary_ends(ranks, ACTIVATION, STATISTICS, sequence=True)
    ends += budgets.all_reduces(ranks, [2 * vector, 64 * vector])  # norm, table of positions
    layer = budgets.sequence_layer(ranks, ACTIVATION, overlap=overlap, halves=halves)
    options: Any = {"sp": True, "overlap": overlap, "overlap_microbatches": halves == 2}
    assert_within_budget(
        logs("tiny-gpt2", 3, {"tp": ranks}, **options), (layer + norms + biases) * 3 + ends
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_context_parallel(kind: str, ranks: int) -> None:
    model = parity_models.small("tiny-gpt2", num_layers=3)
    layer = {
        "ring": budgets.ring_layer(ranks, 2 * ACTIVATION),
        "all_to_all": budgets.all_to_all_layer(ranks, ACTIVATION, 2 * ACTIVATION),
    }[kind]
    marks = BYTES * len(list(model.parameters()))
    sums = budgets.replicas(ranks, size_of(model), marks, buckets=1)
    found = logs("tiny-gpt2", 3, {"cp": ranks}, context=kind)
    assert_within_budget(found, layer * 3 + sums + said(ranks), exact=kind != "ring")


def add_up(counts: torch.Tensor, gate: nn.Module, given: Any, made: Any) -> None:
    counts += made[1].tokens_per_expert


def routed(rank: int, subject: Subject, case: Case) -> tuple[collectives.Log, list[int]]:
    """Record a second step; return also how many rows go to each expert, in all layers."""
    counts = torch.zeros(4, dtype=torch.int64)
    parallel = standard(subject.model(case), None, case)
    parallel.forward_backward(subject.batch(case, case.generator(0)))
    for layer in parallel.model.layers.values():
        layer.feed_forward.gate.register_forward_hook(partial(add_up, counts))
    batch = subject.batch(case, case.generator(0))
    with collectives.recorded() as log:
        parallel.forward_backward(batch)
    return log, counts.tolist()


@pytest.mark.parametrize(("ranks", "halves"), [(2, 1), (4, 1), (2, 2)])
def test_expert_parallel(ranks: int, halves: int) -> None:
    mesh, layers, each = {"dp": ranks}, 3, {"ep": ranks, "overlap_microbatches": halves == 2}
    found = logs("tiny-mixtral", layers, mesh, routed, batch_size=ranks * halves, **each)
    model = parity_models.small("tiny-mixtral", num_layers=layers)
    copied = [p for name, p in model.named_parameters() if ".experts." not in name]
    sizes = BYTES * sum(each.numel() for each in copied)
    sums = budgets.replicas(ranks, sizes, BYTES * len(copied), buckets=1)
    here = 4 // ranks  # experts
    for rank, (log, counts) in enumerate(found):
        mine = slice(rank * here, (rank + 1) * here)
        leaving = sum(counts) - sum(counts[mine])
        arriving = sum(sum(each[mine]) for _, each in found) - sum(counts[mine])
        row = PayloadLayout(HIDDEN, torch.float64, torch.float64, pairs=1).stride
        travels: Any = {"row": row, "result": HIDDEN * BYTES, "halves": halves}
        exchange = budgets.expert_layer(ranks, leaving, arriving, **travels)
        words = budgets.expert_layer(ranks, 0, 0, row=0, result=0, halves=halves)
        tokens = budgets.all_reduces(ranks, [8] * layers)  # how many there are: the router's loss
        assert [call.label for call in log.calls].count("router loss") == layers
        assert_within_budget([log], exchange + words * (layers - 1) + tokens + sums + said(ranks))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_parallel(stage: int) -> None:
    model = parity_models.small("tiny-gpt2", num_layers=3)
    layers = size_of(model.layers)
    rest = size_of(model) - layers + HIDDEN * BYTES  # 19 words are 20 rows over two ranks
    budget = budgets.divided(2, [layers, rest], again=[layers] if stage == 3 else [])
    if stage == 0:
        marks = BYTES * len(list(model.parameters()))
        budget = budgets.replicas(2, size_of(model), marks, buckets=1)
    assert_within_budget(
        logs("tiny-gpt2", 3, {"dp": 2}, zero=stage), budget + said(2), exact=stage == 0
    )


def second_step(rank: int, subject: Subject, case: Case) -> collectives.Log:
    """Record a step after one that has told of shapes."""
    parallel = standard(subject.model(case), None, case)
    batch = subject.batch(case, case.generator(0))
    parallel.forward_backward(batch)
    with collectives.recorded() as log:
        parallel.forward_backward(batch)
    return log


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])  # with and without a tied head
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_pipeline_parallel(schedule: str, name: str) -> None:
    parts, layers = 4, 4
    order = table(schedule, 2, parts)
    given: dict[str, Any] = {"microbatches": parts, "pipeline_schedule": schedule}
    found = logs(name, layers, {"pp": 2}, second_step, batch_size=2 * parts, **given)
    # The V has the first and the last stage on one rank.
    shared = name == "tiny-gpt2" and schedule != "zbv"
    words = WORDS * HIDDEN * BYTES if shared else 0
    for rank, log in enumerate(found):
        budget = budgets.pipeline(order.boundaries(rank), parts, ACTIVATION, words=words)
        assert_within_budget([log], budget + budgets.all_reduces(2, [2 * BYTES]))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_divided_parameters_of_a_backward_in_two_parts(stage: int) -> None:
    """Sums as often as of a whole backward; with stage 3 weights come once more for its second."""
    parts, blocks = 4, 3  # of a process: two layers, and what stands before or behind them
    given: dict[str, Any] = {"pipeline_schedule": "zero_bubble", "microbatches": parts}
    mesh, more = {"pp": 2, "dp": 2}, {"zero": stage, "bucket_bytes": 1, **given}
    found = logs("tiny-llama", 4, mesh, second_step, batch_size=2 * parts, **more)
    for rank, log in enumerate(found):
        gathered = blocks
        if stage == 3:  # ends stay from a forward to its backward
            gathered = parts * (2 * blocks - 1)
            gathered += parts * blocks if rank >= 2 else 0
        counts = log.counts()
        assert counts["all_gather"] == gathered
        assert counts["reduce_scatter"] == blocks * (1 if stage == 1 else parts)


def test_what_is_too_much_is_told() -> None:
    found = logs("tiny-gpt2", 2, {"tp": 2})[0]
    assert Budget({"all_reduce": 9, "all_gather": 1}, 10).exceeded(found) == [
        "10 calls of all_reduce, of which there may be 9",
        f"{found.bytes()} bytes sent, of which there may be 10",
    ]
