"""Configurations that are compiled for the static report: norms, softmax and cross-entropy."""

from __future__ import annotations

import functools
from typing import Any

from fusedops.kernels import (
    _launch,
    _norm,
    cross_entropy,
    gated_rms_norm,
    scaled_masked_softmax,
)
from kernel_cases.case import report_case


def norm_cases(centred: bool, *, residual: bool = False) -> list[dict[str, Any]]:
    types = dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32")
    types |= dict.fromkeys(("eps", "scale", "weight_offset"), "fp32")
    types |= {"seed_ptr": "*i64"} if residual else {}
    present = {"CENTRED": centred, "ROUND_FIRST": not centred, "HAS_WEIGHT": True}
    present |= {"HAS_BIAS": centred, "HAS_RESIDUAL": residual, "HAS_DSUMMED": residual}
    present |= {"WANTS_RESIDUAL": True, "WANTS_WEIGHT": True, "WANTS_BIAS": centred}
    label = "centred" if centred else "not centred"
    cases = []
    for mode in ("none", "draw") if residual else ("none",):
        # Without dropout the gradient of input is that of residual.
        drawn: dict[str, Any] = present | {"DROPOUT": mode, "WANTS_INPUT": mode != "none"}
        suffix = f"{label}, dropout {mode}" if residual else label
        case = functools.partial(report_case, types=types, suffix=suffix)
        for cols in (1024, 4096, 8192, 16384):
            sizes, options = drawn | {"BLOCK_M": 1, "BLOCK_N": cols}, _launch.row_options(cols)
            cases.append(case(_norm._forward_kernel, constexprs=sizes, options=options))
        # Rows of 8192 have launch options of their own on sm_120.
        of_chips = ((1024, None), (4096, None), (8192, (80, 90, 100)), (8192, (120,)))
        for cols, chips in of_chips:
            sizes = drawn | {"BLOCK_N": cols}
            options = _norm._backward_options(cols, newest=chips == (120,))
            resident = _launch.resident(options["num_warps"])
            more: dict[str, Any] = {"resident": resident, "capabilities": chips}
            cases.append(case(_norm._backward_kernel, constexprs=sizes, options=options, **more))
    if not residual:
        for kernel, block in (
            (_norm._forward_long_kernel, _norm._LONG_BLOCK),
            (_norm._backward_input_long_kernel, _norm._LONG_BLOCK),
            (_norm._backward_parameters_long_kernel, 1024),
        ):
            sizes, options = present | {"BLOCK_N": block}, _launch.row_options(block)
            cases.append(report_case(kernel, types, sizes, options, suffix=label))
    return cases


def gated_rms_norm_cases() -> list[dict[str, Any]]:
    types = {"rstd_ptr": "*fp32", "dweight_ptr": "*fp32", "eps": "fp32"}
    flags: dict[str, Any] = dict.fromkeys(("WANTS_INPUT", "WANTS_GATE", "WANTS_WEIGHT"), True)
    flags |= {"HAS_WEIGHT": True}
    cases = []
    for cols, first, activation in (
        (128, True, "silu"),
        (128, True, "sigmoid"),
        (1024, False, "silu"),
        (4096, False, "silu"),
        (8192, False, "silu"),
    ):
        tile, options = gated_rms_norm._tile(cols)
        sizes = flags | {"NORM_FIRST": first, "ACTIVATION": activation} | tile
        suffix = f"{activation} {'after' if first else 'before'} the norm"
        unfused = options | gated_rms_norm._UNFUSED
        kernel = gated_rms_norm._forward_kernel
        cases.append(report_case(kernel, types, sizes, unfused, suffix=suffix))
        kernel, resident = gated_rms_norm._backward_kernel, _launch.resident(options["num_warps"])
        cases.append(report_case(kernel, types, sizes, options, suffix=suffix, resident=resident))
    return cases


def scaled_masked_softmax_cases() -> list[dict[str, Any]]:
    types = {"scale": "fp32"}
    cases = []
    for cols in (256, 2048, 16384):
        blocks, options = scaled_masked_softmax._tile(cols)
        for mask, causal in (("none", True), ("keep", False), ("additive", False)):
            kind = types | ({"mask_ptr": "*u8"} if mask == "keep" else {})
            chosen = {"MASK": mask, "MASK_COL": int(mask != "none"), "CAUSAL": causal} | blocks
            kernel = scaled_masked_softmax._forward_kernel
            cases.append(report_case(kernel, kind, chosen, options, label=mask))
        cases.append(report_case(scaled_masked_softmax._backward_kernel, types, blocks, options))
        chosen = {"WANTS_INPUT": True, "BLOCK_N": cols}
        kernel, options = scaled_masked_softmax._backward_mask_kernel, _launch.row_options(2 * cols)
        cases.append(report_case(kernel, types, chosen, options))
    long = {"BLOCK_N": scaled_masked_softmax._LONG_BLOCK}
    chosen = {"MASK": "additive", "MASK_COL": 1, "CAUSAL": True} | long
    options = _launch.row_options(scaled_masked_softmax._LONG_BLOCK)
    cases.append(report_case(scaled_masked_softmax._forward_long_kernel, types, chosen, options))
    for chips in ((80, 90, 120), (100,)):
        options = scaled_masked_softmax._long_options(chips[0] // 10)
        kernel = scaled_masked_softmax._backward_long_kernel
        cases.append(report_case(kernel, types, long, options, capabilities=chips))
    return cases


def cross_entropy_cases(*, tokens: bool = False) -> list[dict[str, Any]]:
    sums = ("loss", "statistics", "largest", "others", "values", "label", "dloss", "total", "count")
    types = {f"{name}_ptr": "*fp32" for name in sums} | {"target_ptr": "*i64"}
    types |= dict.fromkeys(("smoothing", "z_loss", "softcap", "cooling"), "fp32")
    options = cross_entropy._options(cross_entropy._BLOCK)
    cases = []
    for capped in (False, True):
        form: dict[str, Any] = {"CAPPED": capped, "TOKENS": tokens}
        # Pieces are products that linear_cross_entropy made, unrounded.
        for piece in (False, True):
            smooth = piece and not tokens
            chosen = {"smooth": smooth or tokens, "capped": capped}
            launch = cross_entropy._sums_launch(cross_entropy._BLOCK, **chosen)
            flags = form | {"FIRST": not piece, "LAST": not piece, "SMOOTH": smooth}
            flags |= {"BLOCK": launch["BLOCK"]}
            of_kind = types | ({"x_ptr": "*fp32"} if piece else {})
            cases.append(report_case(cross_entropy._sums_kernel, of_kind, flags, launch))
        for logits in ("*bf16", "*fp32"):
            flags = form | {"BLOCK": cross_entropy._BLOCK}
            of_kind = types | {"x_ptr": logits}
            cases.append(report_case(cross_entropy._backward_kernel, of_kind, flags, options))
    if tokens:
        return cases
    kernel, sizes = cross_entropy._total_kernel, {"BLOCK": cross_entropy._SUM_BLOCK}
    return [*cases, report_case(kernel, types, sizes, cross_entropy._OPTIONS)]
