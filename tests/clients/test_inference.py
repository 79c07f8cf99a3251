"""torchao's quantised weights, before and after ``patch``, and torch.export."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import OPS, Trained, Trial, batches
from outcomes import Table
from torch import nn


def evaluate(model: nn.Module) -> Trained:
    """Return the losses of a model that is not trained, and the logits in the weights' place."""
    model.eval()
    with torch.no_grad():
        found = [model(input_ids=ids, labels=ids) for ids in batches()]
    return Trained(
        [each.loss.item() for each in found],
        {f"logits of batch {i}": each.logits for i, each in enumerate(found)},
    )


def quantized(model: nn.Module, kind: str) -> nn.Module:
    import torchao.quantization as torchao

    torchao.quantize_(model, getattr(torchao, kind)())
    return model


def exported(model: nn.Module) -> Trained:
    """As ``evaluate``, by the program that ``torch.export`` writes."""
    model.eval()
    ids = batches()[0]
    with torch.no_grad():
        program = torch.export.export(
            model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, strict=False
        )
    return evaluate(_Program(program.module()))


class _Program(nn.Module):
    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program

    def eval(self) -> nn.Module:
        return self  # an exported program is what it was when it was exported

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.program(**inputs, use_cache=False)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_quantize(kind: str, order: str, table: Table) -> None:
    """The gated layer's weights are quantised: it steps aside. torchao quantises float32 only."""
    place: Any = {"before": "prepare", "after": "finish"}[order]
    trial = Trial(
        evaluate,
        ops={**OPS, "linear_glu": 0},
        suffix="",
        exactly=None,
        **{place: partial(quantized, kind=kind)},
    )
    table.compare(trial, "torchao", f"quantize_ {order} patch, {kind}")


def test_export(table: Table) -> None:
    # The fused loss leaves the fake tensors of an export to the stock one, as sharded logits.
    ops = {**OPS, "cross_entropy": 0}
    table.compare(Trial(exported, ops=ops, suffix=""), "torch", "torch.export")
