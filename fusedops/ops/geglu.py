"""GEGLU, the gate of Gemma's and T5's MLP: ``_glu_math.py``, as ``swiglu``."""

from __future__ import annotations

import torch

from fusedops._core import checks
from fusedops._core.activation import GELU_VARIANTS
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
        Autocast does not change the call.

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


_OP = _glu_math.define("geglu", GELU_VARIANTS)
