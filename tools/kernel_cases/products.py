"""Configurations that are compiled for the static report: products and experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops.kernels import _grouped, _launch, baddbmm, linear_act, linear_glu, moe_mlp
from fusedops.kernels._products import GROUP_M, blocks_of, group_of
from kernel_cases.case import DTYPES, descriptor_type, report_case


def linear_act_cases() -> list[dict[str, Any]]:
    cases = []
    for dtype, name in DTYPES:
        pointers = ("x", "weight", "bias", "kept", "y", "dy", "dz", "hidden")
        types = {f"{pointer}_ptr": f"*{name}" for pointer in pointers} | {"dbias_ptr": "*fp32"}
        flags: dict[str, Any] = {"HAS_BIAS": True, "KEEPS": True, "TMA_MODE": "none"}
        flags |= {"ACTIVATION": "gelu", "PRECISION": "ieee", "stride_xk": 1, "stride_wk": 1}
        cases += matrix_cases(
            linear_act._forward_kernel, dtype, types, flags, weights=("weight_ptr",)
        )
        wants = {"WANTS_GRAD": True, "WANTS_HIDDEN": True, "WANTS_BIAS": True}
        flags = {"ACTIVATION": "gelu"} | wants | linear_act._GRADIENT_TILE
        cases.append(report_case(linear_act._gradient_kernel, types, flags, resident=8))
    return cases


def linear_glu_cases() -> list[dict[str, Any]]:
    cases = []
    for dtype, name in DTYPES:
        weights = ("gate_weight_ptr", "up_weight_ptr")
        types = dict.fromkeys(("x_ptr", *weights, "gate_ptr", "up_ptr", "y_ptr"), f"*{name}")
        flags: dict[str, Any] = {"KEEPS": True, "PRECISION": "ieee", "TMA_MODE": "none"}
        flags |= {"ACTIVATION": "silu", "stride_xk": 1, "stride_wk": 1}
        tiles: dict[str, Any] = {"weights": weights, "tiles_per_block": 2}
        kernel, blocks = linear_glu._forward_kernel, linear_glu._blocks
        cases += matrix_cases(kernel, dtype, types, flags, blocks, **tiles)
    return cases


def baddbmm_cases() -> list[dict[str, Any]]:
    cases = []
    for dtype, name in DTYPES:
        types = dict.fromkeys(("addend_ptr", "a_ptr", "b_ptr", "y_ptr"), f"*{name}")
        types |= {"beta": "fp32", "alpha": "fp32"}
        flags: dict[str, Any] = {"HAS_ADDEND": True, "GROUP_M": GROUP_M, "PRECISION": "ieee"}
        flags |= {"stride_ak": 1, "stride_bn": 1, "stride_cn": 1}
        cases += matrix_cases(baddbmm._forward_kernel, dtype, types, flags, baddbmm._blocks)
    return cases


def grouped_cases(*, gathers: bool) -> list[dict[str, Any]]:
    cases = []
    for dtype, name in DTYPES:
        types, matrix = _grouped_types(name), dtype == torch.bfloat16
        common: dict[str, Any] = {"PRECISION": "ieee", "GROUP_M": GROUP_M, "GROUPS": 128}
        plain = common | {"ACTIVATION": "identity", "KEEPS": False, "GATHERS": False}
        plain |= {"HAS_BIAS": True, "SCALES": False, "stride_xk": 1, "stride_wk": 1}
        plain |= {"TMA_MODE": "none"}
        # A label, and in which pointers and flags a product differs from the plain one.
        forms: tuple[tuple[str, dict[str, str], dict[str, Any]], ...] = (
            ("", {}, {"KEEPS": True, "ACTIVATION": "gelu"}),
        )
        if gathers:
            # An expert's second product, the first once more, the gradient of what the second gets.
            forms = (
                ("scaled", {}, {"SCALES": True}),
                ("recomputed", {}, {"GATHERS": True}),
                ("gathered", {"y_ptr": "*fp32"}, {"GATHERS": True, "HAS_BIAS": False}),
            )
        for label, pointers, differing in forms:
            form = plain | differing
            gathered: dict[str, bool] = {"gathers": form["GATHERS"]}
            blocks = functools.partial(_grouped._product_blocks, **gathered)
            cases += matrix_cases(
                *(_grouped._product_kernel, dtype, types | pointers, form, blocks),
                **{"label": label, "weights": ("weight_ptr",), "leading": 1} | gathered,
            )
        flags = common | {"GATHERS_X": gathers, "GATHERS_Y": False, "ADDS": not gathers}
        flags |= {"stride_xk": 1, "stride_yn": 1, "stride_on": 1}
        out = types if gathers else types | {"out_ptr": "*fp32"}
        kernel = _grouped._weight_gradient_kernel
        for chips, mma_sync in (((80, 120), True), ((90, 100), False)):
            blocks, options = _grouped._gradient_blocks(dtype, gathers=gathers, mma_sync=mma_sync)
            case = report_case(
                kernel, out, flags | blocks, options, matrix=matrix, capabilities=chips
            )
            cases.append(case)
        flags = {"GATHERS": gathers, "SCALES": gathers, "ADDS": False} | _grouped._SUM_TILE
        cases.append(report_case(_grouped._row_sums_kernel, types, flags))
    return cases


def moe_mlp_cases() -> list[dict[str, Any]]:
    cases = grouped_cases(gathers=True)
    for dtype, name in DTYPES:
        types = _grouped_types(name) | {"permutation_ptr": "*i32", "dprobs_ptr": "*fp32"}
        types |= {"d_ptr": "*fp32"} | dict.fromkeys(
            ("z_ptr", "b2_ptr", "dz_ptr", "hidden_ptr"), f"*{name}"
        )
        flags: dict[str, Any] = {"HAS_BIAS": True, "KEEPS": True, "PRECISION": "ieee"}
        flags |= {"GROUP_M": GROUP_M, "GROUPS": 128, "stride_xk": 1, "TMA_MODE": "none"}
        forms = (("halves", "silu", "stride_wk"), ("pairs", "swiglu_oai", "stride_wn"))
        for gate, activation, dense in forms:
            form = {"GATE": gate, "ACTIVATION": activation}
            tiles = {"weights": ("weight_ptr",), "tiles_per_block": 2 if gate == "halves" else 1}
            blocks, constexprs = functools.partial(moe_mlp._blocks, gate=gate), flags | form
            cases += matrix_cases(
                *(moe_mlp._expert_kernel, dtype, types, constexprs | {dense: 1}, blocks),
                **{"leading": 1, "gathers": True} | tiles,
            )
            wants = dict.fromkeys(("WANTS_GRAD", "WANTS_HIDDEN", "WANTS_PROBS", "HAS_B2"), True)
            values = form | wants | {"GROUPS": 128} | moe_mlp._PASS_BLOCK
            cases.append(report_case(moe_mlp._pass_kernel, types, values))
    return cases


def _grouped_types(name: str) -> dict[str, str]:
    """Return the argument types of these kernels for the static report."""
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "kept_ptr", "y_ptr", "dy_ptr", "values_ptr")
    types = dict.fromkeys((*pointers, "out_ptr"), f"*{name}") | {"scale_ptr": "*fp32"}
    lists = ("rows_ptr", "x_rows_ptr", "dy_rows_ptr", "offsets_ptr")
    return types | dict.fromkeys(lists, "*i32")


def matrix_cases(
    kernel: Any,
    dtype: torch.dtype,
    types: dict[str, str],
    flags: dict[str, Any],
    blocks: Callable[..., _launch.Tiling] = blocks_of,
    *,
    label: str = "",
    weights: Sequence[str] = (),
    tiles_per_block: int = 1,
    leading: int = 0,
    gathers: bool = False,
) -> list[dict[str, Any]]:
    """Describe a matrix kernel's compilations for the static report, one for each of its tiles.

    Args:
        kernel: a ``@triton.jit`` function.
        dtype: of the operands.
        types: as ``report_case`` takes them.
        flags: its constexprs but the tile sizes; without ``GROUP_M`` that of ``group_of``.
        blocks: gives tile sizes and options as ``blocks_of`` does.
        label: as ``report_case`` takes it.
        weights: what large tiles read by descriptors too, besides ``x_ptr``.
        tiles_per_block: how many of the weights share the columns of a tile.
        leading: dims of the weights before the matrix.
        gathers: whether ``x_ptr`` stays a pointer.
    """
    matrix, cases = dtype != torch.float32, []
    for num_rows in (16, 64, 4096) if matrix else (4096,):
        new, old = (blocks(dtype, num_rows, mma_sync=mma_sync) for mma_sync in (False, True))
        of_gpus = ((new, None),) if new == old else ((new, (90, 100)), (old, (80, 120)))
        for (sizes, options), gpus in of_gpus:
            values = {"GROUP_M": group_of(num_rows, sizes)} | flags | sizes
            case = functools.partial(report_case, kernel, options=options, label=label)
            case = functools.partial(case, matrix=matrix, few_rows=num_rows < 64)
            cases.append(case(types, values, capabilities=gpus))
            if not weights or not matrix or num_rows < 4096 or gpus == (80, 120):
                continue
            columns = dict.fromkeys(weights, sizes["BLOCK_N"] // tiles_per_block)
            for mode, chips in (("plain", (90, 100)), ("transposed", (90,))):
                form = _by_tma(mode, types, values, columns, leading=leading, gathers=gathers)
                cases.append(case(*form, suffix=f"TMA {mode}", capabilities=chips))
    return cases


def _by_tma(
    tma_mode: str,
    types: dict[str, str],
    constexprs: dict[str, Any],
    weights: dict[str, int],
    *,
    leading: int,
    gathers: bool,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return types and constexprs of a matrix kernel that reads by descriptors.

    ``types`` and ``constexprs`` are those without descriptors, ``weights`` are names of arguments
    and how many of its columns a tile reads; the mode is ``"plain"`` or ``"transposed"``.
    """
    name, depth = types["x_ptr"].removeprefix("*"), constexprs["BLOCK_K"]
    kinds = dict(types)
    if not gathers:
        kinds["x_ptr"] = descriptor_type(name, [constexprs["BLOCK_M"], depth])
    for argument, columns in weights.items():
        block = [depth, columns] if tma_mode == "transposed" else [columns, depth]
        kinds[argument] = descriptor_type(name, [1] * leading + block)
    dense, other = "stride_wk", "stride_wn"
    if tma_mode == "transposed":
        dense, other = other, dense
    values = {name: value for name, value in constexprs.items() if name != other}
    return kinds | {other: "i32"}, values | {"TMA_MODE": tma_mode, dense: 1}
