"""SwiGLU: the gate of Llama's MLP, element by element.

    y = silu(gate) * up,   silu(x) = x * sigmoid(x)

Kernels: ``csrc/cpu/elementwise/glu.*`` and ``kernels/_glu.py``, which ``geglu`` shares; the
formulae are in ``ops/_glu_math.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.library import Gradient, define_op
from fusedops.ops import _glu_math


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Multiply ``up`` by the sigmoid linear unit of ``gate``.

    ``y = gate * sigmoid(gate) * up``

    Args:
        gate: any shape, any floating dtype, any strides: ``x.chunk(2, -1)`` is not copied.
        up: shape and dtype of ``gate``.

    Returns:
        Shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once, where eager torch
        also rounds ``silu(gate)``. Finite inputs do not overflow. Saves ``gate`` and ``up`` only.
        Backends: cpp, triton, torch. Autocast does not change the call.

    Reference:
        Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Example:
        >>> import torch, fusedops
        >>> fusedops.swiglu(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 2.0]))
        tensor([-0.2689,  0.0000,  3.5232])
    """
    _glu_math.check("swiglu", gate, up)
    return _OP(gate, up)


def _reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _glu_math.forward(gate, up, "silu")


def _backward_reference(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return _glu_math.backward(grad_output, gate, up, "silu", output_mask)


_OP = define_op(
    "swiglu",
    "(Tensor gate, Tensor up) -> (Tensor output)",
    contract={"gate, up, output": "T [*shape]"},
    reference=_reference,
    gradient=Gradient(
        inputs=("gate", "up"),
        outputs=("output",),
        saves=("gate", "up"),
        reference=_backward_reference,
    ),
    triton="fusedops.kernels.swiglu",
    shard=_glu_math.shard,
)
