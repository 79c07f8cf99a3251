"""Configurations that are compiled for the static report: recurrences in chunks of tokens."""

from __future__ import annotations

from typing import Any

from fusedops.kernels import gated_delta_rule
from kernel_cases.case import report_case


def gated_delta_rule_cases() -> list[dict[str, Any]]:
    """Return the cases of a gate per head and of one per channel."""
    inputs = ("q_ptr", "k_ptr", "v_ptr", "grad_ptr", "out_ptr", "dv_ptr")
    size = 128
    flags: dict[str, Any] = {"HEAD_DIM": size, "VALUE_DIM": size, "NORM": True, "GROUP": 2}
    flags |= {"INITIAL": True, "FINAL": True, "PACKED": True, "PRECISION": "tf32"}
    cases = []
    for gates in (1, size):
        for kernel, keeps in (
            (gated_delta_rule.prepare_kernel, False),
            (gated_delta_rule.forward_kernel, False),
            (gated_delta_rule.forward_kernel, True),
            (gated_delta_rule.backward_kernel, False),
            (gated_delta_rule.gradients_kernel, False),
        ):
            pointers = {name for name in kernel.arg_names if name.endswith("_ptr")}
            types = dict.fromkeys(pointers - {*inputs}, "*fp32")
            types |= {"ends_ptr": "*i64", "scale": "fp32"}
            sizes, options = gated_delta_rule._blocks(kernel, gates, size, size)
            constants = flags | sizes | {"GATES": gates, "KEEPS": keeps}
            # A gate per channel makes products of keys by sums.
            matrix = kernel is not gated_delta_rule.prepare_kernel or gates == 1
            case = report_case(
                kernel,
                types,
                constants,
                options,
                suffix="kept" if keeps else "",
                matrix=matrix,
                few_rows=matrix,
            )
            cases.append(case)
    return cases
