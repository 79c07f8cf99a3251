"""SwiGLU, the gate of Llama's MLP: ``_glu_math.py``, as ``geglu``."""

from __future__ import annotations

import torch

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
        Autocast does not change the call.

    Reference:
        Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Example:
        >>> import torch, fusedops
        >>> fusedops.swiglu(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 2.0]))
        tensor([-0.2689,  0.0000,  3.5232])
    """
    _glu_math.check("swiglu", gate, up)
    return _OP(gate, up)


_OP = _glu_math.define("swiglu")
