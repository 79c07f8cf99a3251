"""Configurations that are compiled for the static report: element-wise kernels."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from fusedops._core.activation import GELU_VARIANTS
from fusedops.kernels import _glu, bias_dropout_add, bias_gelu, gelu, rotary_embedding
from kernel_cases.case import report_case


def gelu_cases() -> list[dict[str, Any]]:
    return [
        report_case(kernel, {}, {"ACTIVATION": activation, "BLOCK": gelu._BLOCK}, label=approximate)
        for kernel in (gelu._forward_kernel, gelu._backward_kernel)
        for approximate, activation in GELU_VARIANTS.items()
    ]


def bias_gelu_cases() -> list[dict[str, Any]]:
    types = {"dbias_ptr": "*fp32"}
    flags = {"WANTS_INPUT": True, "WANTS_BIAS": True} | bias_gelu._tile(4096)
    return [
        report_case(kernel, types, flags | {"ACTIVATION": form}, label=label, resident=resident)
        for kernel, resident in ((bias_gelu._forward_kernel, None), (bias_gelu._backward_kernel, 8))
        for label, form in GELU_VARIANTS.items()
    ]


def glu_cases(activations: Collection[str]) -> list[dict[str, Any]]:
    constexprs = {"BLOCK": _glu._BLOCK, "WANTS_GATE": True, "WANTS_UP": True}
    return [
        report_case(kernel, {}, constexprs | {"ACTIVATION": activation}, label=activation)
        for kernel in (_glu._forward_kernel, _glu._backward_kernel)
        for activation in activations
    ]


def bias_dropout_add_cases() -> list[dict[str, Any]]:
    types = {"dbias_ptr": "*fp32", "seed_ptr": "*i64", "scale": "fp32"}
    usual = bias_dropout_add._TILE | {"DROPOUT": "draw"}
    usual |= dict.fromkeys(("HAS_BIAS", "WANTS_INPUT", "WANTS_BIAS"), True)
    return [
        report_case(bias_dropout_add._forward_kernel, types, usual),
        report_case(bias_dropout_add._backward_kernel, types, usual, resident=8),
    ]


def rotary_embedding_cases() -> list[dict[str, Any]]:
    cases = []
    sizes = ((64, 64), (128, 128), (32, 80), (512, 512))
    for (rotary_dim, head_dim), interleaved, inverse in itertools.product(
        sizes, (False, True), (False, True)
    ):
        blocks = rotary_embedding._blocks(32, rotary_dim, head_dim)
        constexprs = {"HEAD_DIM": head_dim, "ROTARY_DIM": rotary_dim} | blocks
        constexprs |= {"INTERLEAVED": interleaved, "INVERSE": inverse}
        form = "interleaved" if interleaved else "half"
        label = f"{form}, {'inverse' if inverse else 'forward'}"
        kernel, options = rotary_embedding._kernel, rotary_embedding._OPTIONS
        cases.append(report_case(kernel, {}, constexprs, options, label=label))
    return cases
