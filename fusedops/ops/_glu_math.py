"""What ``swiglu`` and ``geglu`` share: ``y = act(gate) * up``, element by element.

``act`` is a name of ``_core/activation.py``: ``silu`` or a variant of GELU. The gradients are
``dy * up * act'(gate)`` and ``dy * act(gate)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding


def check(op: str, gate: Any, up: Any) -> None:
    checks.tensor(op, "gate", gate)
    checks.like(op, "up", up, "gate", gate, dtype=True)
    checks.shape(op, "up", up, gate.shape, "that of gate")


def define(name: str, variants: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Register an op and return what calls it.

    With ``variants``, name -> activation, the op has the argument ``approximate``; else it is silu.
    """

    def activation(options: Sequence[str]) -> str:
        return "silu" if variants is None else variants[options[0]]

    def reference(gate: torch.Tensor, up: torch.Tensor, *options: str) -> torch.Tensor:
        wide = dtypes.statistics_dtype(gate.dtype)
        result = value(gate.to(wide), activation(options)) * up.to(wide)
        return result.to(gate.dtype).contiguous()

    def backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        grad_output, gate, up, *options, output_mask = args
        act, wide = activation(options), dtypes.statistics_dtype(gate.dtype)
        grad, x = grad_output.to(wide), gate.to(wide)
        grad_gate = grad_up = None
        if output_mask[0]:
            grad_gate = gradient(grad * up.to(wide), x, act).to(gate.dtype).contiguous()
        if output_mask[1]:
            grad_up = (grad * value(x, act)).to(gate.dtype).contiguous()
        return grad_gate, grad_up

    contract: dict[str, str | tuple[str, ...]] = {"gate, up, output": "T [*shape]"}
    names = ("gate", "up")
    return define_op(
        name,
        f"(Tensor gate, Tensor up{', str approximate' if variants else ''}) -> (Tensor output)",
        contract=contract | ({"approximate": tuple(variants)} if variants else {}),
        reference=reference,
        gradient=Gradient(inputs=names, outputs=("output",), saves=names, reference=backward),
        triton=__name__.rpartition(".ops.")[0] + f".kernels.{name}",
        shard=_shard,
    )


def _shard(gate: Any) -> list[Sharding]:
    """Elements are independent: any dim may be sharded."""
    return [([dim], [dim, dim]) for dim in (REPLICATE, *range(gate.ndim))]
