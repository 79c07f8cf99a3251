"""GEGLU: the gate of Gemma's and T5's MLP, element by element.

    y = gelu(gate) * up

with the three variants of ``ops/gelu.py``. Kernels: ``csrc/cpu/elementwise/glu.*`` and
``kernels/_glu.py``, which ``swiglu`` shares; the formulae are in ``ops/_glu_math.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.activation import GELU_VARIANTS
from fusedops._core.library import Gradient, define_op
from fusedops.ops import _glu_math


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Multiply ``up`` by the Gaussian error linear unit of ``gate``.

    ``y = gelu(gate) * up``

    Args:
        gate: any shape, any floating dtype, any strides: ``x.chunk(2, -1)`` is not copied.
        up: shape and dtype of ``gate``.
        approximate: ``"none"`` (erf), ``"tanh"`` (Gemma, T5 v1.1) or ``"fast"``
            (``x * sigmoid(1.702 x)``): see ``fusedops.gelu``.

    Returns:
        Shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, or ``approximate`` is unknown.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once, where eager torch
        also rounds ``gelu(gate)``. Finite inputs do not overflow. Saves ``gate`` and ``up`` only.
        Backends: cpp, triton, torch. Autocast does not change the call.

    Reference:
        Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Example:
        >>> import torch, fusedops
        >>> fusedops.geglu(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 2.0]), "tanh")
        tensor([-0.1588,  0.0000,  3.9092])
    """
    _glu_math.check("geglu", gate, up)
    checks.choice("geglu", "approximate", approximate, GELU_VARIANTS)
    return _OP(gate, up, approximate)


def _reference(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> torch.Tensor:
    return _glu_math.forward(gate, up, GELU_VARIANTS[approximate])


def _backward_reference(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, gate, up, approximate, output_mask = args
    return _glu_math.backward(grad_output, gate, up, GELU_VARIANTS[approximate], output_mask)


_OP = define_op(
    "geglu",
    "(Tensor gate, Tensor up, str approximate) -> (Tensor output)",
    contract={
        "gate, up, output": "T [*shape]",
        "approximate": tuple(GELU_VARIANTS),
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("gate", "up"),
        outputs=("output",),
        saves=("gate", "up"),
        reference=_backward_reference,
    ),
    triton="fusedops.kernels.geglu",
    shard=_glu_math.shard,
)
