"""A small call of each op, from which a rule learns the backend of a module's device and dtype."""

from __future__ import annotations

import torch

from fusedops.ops._routing_plan import RoutingPlan
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


def call_op(op: str, example: torch.Tensor) -> None:
    """Call an op on new tensors of the dtype and on the device of ``example``."""
    row = example.new_zeros(1, 2)
    match op:
        case "attention":
            heads = example.new_zeros(1, 1, 2, 8)
            attention(heads, heads, heads)
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
            raise ValueError(f"a rule whose first op is {op} needs a probe of its own")
