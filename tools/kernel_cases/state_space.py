"""Configurations that are compiled for the static report: convolution and state space models."""

from __future__ import annotations

from typing import Any

from fusedops.kernels import causal_conv1d
from kernel_cases.case import report_case


def causal_conv1d_cases() -> list[dict[str, Any]]:
    types = {"rows_ptr": "*i64", "ends_ptr": "*i64", "parts_ptr": "*fp32"}
    # Tokens first in memory: channels are neighbours.
    form: dict[str, Any] = {"ACTIVATION": "silu", "HAS_BIAS": True, "WIDTH": 4}
    form |= {"BLOCK_C": causal_conv1d._CHANNELS}
    plain = form | {"PACKED": False, "HAS_STATE": False}
    packed = form | {"PACKED": True, "HAS_STATE": True}
    forward = {"stride_yc": 1, "BLOCK_T": causal_conv1d._TOKENS}
    usual = {"stride_dxc": 1, "HAS_OUTPUT": True, "BLOCK_T": causal_conv1d._BACKWARD_TOKENS}
    usual |= {"ADDS_STATE": False, "INITIAL": False, "BLOCK_W": 8}
    kernels = causal_conv1d._forward_kernel, causal_conv1d._backward_kernel
    cases = [(0, "plain", plain | forward), (0, "packed", packed | forward)]
    cases += [(1, "plain", plain | usual), (1, "packed", packed | usual | {"ADDS_STATE": True})]
    cases += [(1, "initial state", cases[-1][2] | {"INITIAL": True})]
    return [
        report_case(kernels[n], types, constexprs, label=label) for n, label, constexprs in cases
    ]
