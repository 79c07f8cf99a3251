"""``fusedops bench --shape``: sizes of the user's own; layers and groups of ops; ``--version``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bench_records import invoke

import fusedops
from fusedops._core import dtypes
from fusedops.bench.contenders import ContenderCall, peers_of
from fusedops.bench.layers import LAYERS, MOE_LAYER
from fusedops.cli.bench.rows import case_of, example, specs_of
from fusedops.specs import all_specs
from fusedops.terminal.files import UserError

SPECS = {**all_specs(), **LAYERS}
bench = partial(invoke, "bench")
# What stands for a word in each op that takes one.
WORDS = {"approximate": "tanh", "activation": "gelu", "what": "causal", "target": "capacity"}
WORDS |= {"mask": "causal", "rounding": "hf", "format": "int8"}


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.bench_case])
def test_every_op_has_the_sizes_that_are_asked_for(name: str) -> None:
    sizes = {"N": "4", "NxN": "2x3", "0.1": "0.0", "true": "true"}
    words = []
    for word in example(SPECS[name]).split(","):
        dimension, placeholder = word.strip("[]").split("=")
        words.append(f"{dimension}={sizes.get(placeholder) or WORDS[dimension]}")
    case = case_of(SPECS[name], ",".join(words))
    sample = case.make(torch.device("cpu"), torch.float32)
    assert sample.tensors and case.bytes_forward(torch.float32) > 0
    SPECS[name].op(*sample.args, **sample.kwargs)


def test_dimensions_go_where_they_belong() -> None:
    for name, text, shape in (
        ("layer_norm", "rows=5, columns=7", (5, 7)),
        ("gelu", "shape=3x5x7,approximate=none", (3, 5, 7)),
        ("baddbmm", "batch=2,rows=3,inner=4,columns=5", (2, 3, 5)),
        ("attention", "batch=2,heads=6,rows=9,size=8,key_heads=3", (2, 6, 9, 8)),
    ):
        sample = case_of(SPECS[name], text).make(torch.device("cpu"), torch.float32)
        assert sample.tensors[0].shape == shape


def test_an_op_without_a_shape_says_so() -> None:
    with pytest.raises(UserError, match="gelu has no --shape: --sizes chooses one of its sizes"):
        case_of(replace(SPECS["gelu"], bench_case=None), "rows=3")


@pytest.mark.usefixtures("known_limits")
def test_a_shape_is_measured_and_sizes_that_do_not_fit_together_are_a_note() -> None:
    assert "nan is no number of seconds" in bench("layer_norm", "--seconds", "nan").output
    given = ("--quick", "--dtype", "float32", "--seconds", "0.01")
    shape = "batch=1,heads=3,rows=8,size=16,key_heads=2"
    done = bench("attention", "--shape", shape, *given)
    assert done.exit_code == 0 and "no rows: Number of heads" in done.output
    done = bench("geglu", "--shape", "rows=2,columns=3,approximate=erf", *given)
    assert done.exit_code == 0 and "no rows: KeyError('erf')" in done.output
    done = bench("gelu", "--shape", "shape=8x16,approximate=tanh", *given)
    assert done.exit_code == 0 and "8x16 tanh" in done.output


def test_the_version_is_told() -> None:
    done = invoke("--version")
    assert done.exit_code == 0
    assert done.output.startswith(f"fusedops {fusedops.__version__} (torch {torch.__version__}")


CPU = torch.device("cpu")


def test_group_names_ops_and_layers() -> None:
    names = [spec.name for spec in specs_of(["moe"])]
    assert {"moe_route", "moe_permute", "moe_unpermute", "grouped_mm", "moe_mlp"} < set(names)
    assert names[-1] == "moe_layer"
    assert set(names[:-1]) < set(all_specs())
    assert [spec.name for spec in specs_of(["gelu", "moe_layer", "gelu"])] == ["gelu", "moe_layer"]
    assert not set(LAYERS) & {spec.name for spec in specs_of([])}


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
