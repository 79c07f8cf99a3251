"""Configurations that are compiled for the static report: the optimizer."""

from __future__ import annotations

from typing import Any

from fusedops.kernels import adamw, square_sums
from fusedops.kernels._pointer_table import BLOCK
from kernel_cases.case import report_case


def adamw_cases() -> list[dict[str, Any]]:
    types = {"table_ptr": "*i64", "blocks_ptr": "*i32", "scalars_ptr": "*fp32"}
    types |= {"steps_ptr": "*fp64", "factor_ptr": "*fp64", "found_inf_ptr": "*fp32"}
    types |= dict.fromkeys(("beta1", "beta2", "rest1", "rest2", "eps"), "fp32")
    mixed = {"param_ptr": "*fp32", "state_ptr": "*fp32"}
    usual = {"MAXIMIZE": False, "AMSGRAD": False, "VECTORIZES": True, "COLUMNS": adamw._COLUMNS}
    usual |= {"HAS_FACTOR": True, "HAS_FOUND_INF": True, "BLOCK": BLOCK}
    plain = {"COPY": True, "DRAW_STATE": False, "DRAW_PARAM": False}
    drawn = {"COPY": False, "DRAW_STATE": True, "DRAW_PARAM": True}
    counted = {"table_ptr": "*i64", "found_inf_ptr": "*fp32", "step_ptr": "*fp32"}
    counted["counts_ptr"] = "*fp64"
    return [
        report_case(adamw._step_kernel, types | mixed, usual | plain),
        report_case(adamw._step_kernel, types, usual | drawn),
        report_case(adamw._count_kernel, counted, usual | {"BLOCK": adamw._COUNTED}),
    ]


def square_sums_cases() -> list[dict[str, Any]]:
    types = {"table_ptr": "*i64", "blocks_ptr": "*i32", "parts_ptr": "*fp64", "sums_ptr": "*fp64"}
    usual = {"VECTORIZES": True, "COLUMNS": square_sums._COLUMNS, "BLOCK": BLOCK}
    return [
        report_case(square_sums._parts_kernel, types, usual),
        report_case(square_sums._sums_kernel, types, usual),
    ]
