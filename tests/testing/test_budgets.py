"""What a step sends that the planner does not predict exactly: seeds and experts.

Every other layout is compared with ``parallel/budgets.py`` in ``tests/planner/test_traffic.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import parity_models
import pytest
import torch
from torch import nn

from fusedops._core import collectives as op_collectives
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel import budgets
from fusedops.parallel.comm import collectives
from fusedops.parallel.expert.metadata import METADATA_BYTES
from fusedops.testing import Case, threads, token_batch
from fusedops.testing.case_run import Subject
from fusedops.testing.fuzzer import adamw, token_loss
from fusedops.testing.standard import standard

TOKENS, HIDDEN, WORDS, BYTES = 16, 16, 19, 8  # of float64


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
    batch_size: int = 2,
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


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"cp": 2}], ids=str)
def test_dropout_sends_one_seed_a_step(mesh: dict[str, int]) -> None:
    without, seeded = (
        logs("tiny-gpt2", 2, mesh, batch_size=4, microbatches=2, dropout=dropout)
        for dropout in (0.0, 0.2)
    )
    for rank, (log, other) in enumerate(zip(seeded, without, strict=True)):
        assert log.counts() == other.counts() | {"broadcast": 1}
        assert log.bytes() - other.bytes() == (16 if rank == 0 else 0)


def test_a_log_that_is_closed_listens_to_no_op() -> None:
    before = list(op_collectives.listeners)
    for _ in range(2):
        with collectives.recorded(), collectives.recorded():
            assert len(op_collectives.listeners) == len(before) + 1
        assert op_collectives.listeners == before


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
        assert log.notes["expert_rows"] == arriving + sum(counts[mine])
        row = PayloadLayout(HIDDEN, torch.float64, torch.float64, pairs=1).stride
        # Metadata, and rows and results in forward and backward.
        metadata = halves * METADATA_BYTES * (ranks - 1)
        words = budgets.Budget({"all_to_all": halves * 5}, metadata)
        exchange = budgets.Budget({}, (leaving + arriving) * (row + HIDDEN * BYTES))
        tokens = budgets.all_reduces(ranks, [8] * layers)  # how many there are: the router's loss
        assert [call.label for call in log.calls].count("router loss") == layers
        loss = budgets.all_reduces(ranks, [BYTES, 2 * BYTES])
        budget = exchange + words * layers + tokens + sums + loss
        assert not budget.exceeded(log) and log.bytes() == budget.bytes, log.counts()
        assert log.counts() == dict(budget.calls)
