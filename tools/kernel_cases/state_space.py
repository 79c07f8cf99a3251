"""Configurations that are compiled for the static report: convolution and state space models."""

from __future__ import annotations

import itertools
from typing import Any

from fusedops.kernels import causal_conv1d, selective_state_space
from kernel_cases.case import DTYPES, report_case


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


def selective_state_space_cases() -> list[dict[str, Any]]:
    wide = ("steps", "a", "d", "initial", "kept", "dkept", "last", "db", "dc", "dsteps", "da", "dd")
    types = {f"{name}_ptr": "*fp32" for name in wide}
    types |= {f"{name}_ptr": "*i64" for name in ("starts", "chunks", "sequences")}
    chips = ((9, (90,)), (8, (80, 100, 120)))
    cases = []
    for (dtype, name), (major, capabilities) in itertools.product(DTYPES, chips):
        data = dict.fromkeys(("x_ptr", "b_ptr", "c_ptr", "y_ptr", "dy_ptr", "dx_ptr"), f"*{name}")
        form = {"PRECISION": "ieee", "HAS_D": True, "HAS_INITIAL": True}
        for kernel, label, reverse, channels in (
            (selective_state_space._state_kernel, "states", False, 64),
            (selective_state_space._state_kernel, "gradients of states", True, 64),
            (selective_state_space._output_kernel, "outputs", False, 32),
            (selective_state_space._gradient_kernel, "gradients", False, 32),
        ):
            blocks = selective_state_space._blocks(dtype, 64, channels)
            constexprs = form | blocks | {"REVERSE": reverse}
            given = (kernel, types | data, constexprs, selective_state_space._options(dtype, major))
            more: dict[str, Any] = {"matrix": name == "bf16", "capabilities": capabilities}
            cases.append(report_case(*given, label=f"{name} {label}", **more))
    return cases
