"""Rows of whole layers: all variants compute the same, and a group names all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedops._core import dtypes
from fusedops.bench.contenders import ContenderCall, peers_of
from fusedops.bench.layers import LAYERS, MOE_LAYER
from fusedops.cli.bench.ops import _specs
from fusedops.specs import all_specs

CPU = torch.device("cpu")


def test_group_names_ops_and_layers() -> None:
    names = [spec.name for spec in _specs(["moe"])]
    assert {"moe_route", "moe_permute", "moe_unpermute", "grouped_mm", "moe_mlp"} < set(names)
    assert names[-1] == "moe_layer"
    assert set(names[:-1]) < set(all_specs())
    assert [spec.name for spec in _specs(["gelu", "moe_layer", "gelu"])] == ["gelu", "moe_layer"]
    assert not set(LAYERS) & {spec.name for spec in _specs([])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants_of_the_layer_agree(dtype: torch.dtype) -> None:
    call = ContenderCall.of(MOE_LAYER, MOE_LAYER.samples(CPU, dtype)[0])
    wide = call.double()

    def results(call: ContenderCall, function: Callable[..., Any]) -> list[Any]:
        output = call.forward(function)
        return [output.detach(), *call.backward(output)]

    truth, eager = results(wide, MOE_LAYER.eager), results(call, MOE_LAYER.eager)
    for name, function in {"ours": MOE_LAYER.op, **peers_of(MOE_LAYER.name)}.items():
        for actual, base, want in zip(results(call, function), eager, truth, strict=True):
            budget = dtypes.error_budget(base, want, dtype, depth=256)
            assert ((actual.double() - want).abs() <= budget).all(), name


def test_work_of_the_layer_is_that_of_its_three_products() -> None:
    case = MOE_LAYER.bench_cases[0]
    assert case.label == "1024x1024, 8 experts of 1408, top-2"
    assert case.flops_forward == 2 * (1024 * 2) * 1024 * (3 * 1408)
    assert case.flops_backward == 2 * case.flops_forward
