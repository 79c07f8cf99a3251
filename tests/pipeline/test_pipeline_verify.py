"""``fusedops.verify`` draws pipelines: schedules, what training keeps, where states lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fusedops
from fusedops.models import Transformer, preset
from fusedops.parallel.pipeline.schedules import SCHEDULES


def model() -> Transformer:
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "intermediate_size": 32}
    dropping = {"dropout": 0.2, "attention_dropout": 0.2}
    return Transformer(
        replace(preset("tiny-gpt2"), vocab_size=40, num_heads=2, **sizes, **dropping)
    )


def _verified(schedules: list[str], cases: int, **more: Any) -> None:
    report = fusedops.verify(
        model,
        [{"pp": 2}],
        options={"pipeline_schedule": schedules, "microbatches": [4], **more},
        cases=cases,
        batch_sizes=(4, 8),
        seq_lens=(5, 8),
    )
    assert len(report.passed) == cases, report


def test_a_few_pipelines() -> None:
    _verified(["1f1b", "zbv"], 2, recompute=["full"])


@pytest.mark.slow
def test_all_schedules_with_what_they_keep() -> None:
    offload = [(), ("optimizer",), ("activations",)]
    recompute = ["none", "full", "selective"]
    _verified(list(SCHEDULES), 63, offload=offload, recompute=recompute)
