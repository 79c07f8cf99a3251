"""Which backend would run an op for a module: a small call of the op is watched, not executed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops._core import backends
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.ops.attention import attention
from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.ops.bias_gelu import bias_gelu
from fusedops.ops.cross_entropy import cross_entropy
from fusedops.ops.geglu import geglu
from fusedops.ops.gelu import gelu
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.linear_act import linear_act
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.mlp import mlp
from fusedops.ops.moe_mlp import moe_mlp
from fusedops.ops.moe_route import moe_route
from fusedops.ops.rms_norm import rms_norm
from fusedops.ops.swiglu import swiglu


def empty_like_parameters(module: nn.Module) -> torch.Tensor:
    """Return an empty tensor of the dtype and on the device of a module's parameters.

    A plain one, whatever they are: a quantised weight cannot make others like itself. A layer
    whose weights are packed in integers has none; what it computes is float32.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return torch.empty(0)


def resolution(op: str, module: nn.Module) -> str:
    """Return which backend would run an op for this module, and why.

    Args:
        op: the op's name.
        module: on whose parameters' device it would run.
    """
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "known when the parameters are on a device"
    try:
        with torch.no_grad(), _Watch(op):
            _call_op(op, empty_like_parameters(module))
    except _WatchedError as watched:
        return str(watched.resolution)
    except Exception as error:  # the module's forward would say so: a report never does
        return f"not known: {error}"
    return "not known"


class _WatchedError(Exception):
    """Carries the answer out of the call that was watched."""

    def __init__(self, resolution: backends.Resolution) -> None:
        super().__init__()
        self.resolution = resolution


class _Watch(TorchDispatchMode):
    """Asks for the backend of the first call of one op, which is then not executed."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == f"fusedops::{self.op}":
            raise _WatchedError(backends.resolve(self.op, *args))
        return func(*args, **(kwargs or {}))


def _call_op(op: str, example: torch.Tensor) -> None:
    """Call an op on new tensors of the dtype and on the device of ``example``."""
    row = example.new_zeros(1, 2)
    match op:
        case "attention":
            heads = example.new_zeros(1, 1, 2, 8)
            attention(heads, heads, heads)
        case "add_layer_norm":
            add_layer_norm(row, row, (2,), row[0])
        case "add_rms_norm":
            add_rms_norm(row, row, (2,), row[0])
        case "bias_gelu":
            bias_gelu(row, row[0])
        case "bias_dropout_add":
            bias_dropout_add(row, None, row)
        case "cross_entropy":
            cross_entropy(row, row.new_zeros(1, dtype=torch.int64))
        case "gelu":
            gelu(row)
        case "layer_norm":
            layer_norm(row, (2,))
        case "rms_norm":
            rms_norm(row, (2,))
        case "linear_act":
            linear_act(row, row, activation="gelu")
        case "linear_glu":
            linear_glu(row, row, row)
        case "mlp":
            mlp(row, row, None, row.t(), None, activation="gelu")
        case "moe_mlp":
            row = example.new_zeros(1, 8)
            ids = torch.zeros(1, 1, dtype=torch.int32, device=row.device)
            plan = RoutingPlan.from_choices(ids, row.new_ones(1, 1).float(), 1)
            moe_mlp(row, plan, row.new_zeros(1, 8, 16), row.new_zeros(1, 8, 8))
        case "moe_route":
            moe_route(row, 1)
        case "geglu":
            geglu(row, row)
        case "swiglu":
            swiglu(row, row)
        case _:
            raise ValueError(f"there is no small call of {op}")
