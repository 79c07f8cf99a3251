"""The sum of the squares of each of many tensors: what a norm over a whole model is made of.

    sums[i] = sum over tensor i of x^2

in float64, whose range holds the square of every float32: a sum is inf or NaN if and only if an
element is. Kernels: ``csrc/cpu/adamw.*``, ``kernels/square_sums.py``. Norms are made of it in
``fusedops.optim``; across processes these sums are what is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.library import define_op


def square_sums(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each tensor.

    Args:
        inputs: at least one, of any shapes and floating dtypes, on one device.

    Returns:
        float64 ``[len(inputs)]``, on their device.

    Note:
        Each tensor is cut into pieces by its own size and the pieces' sums are added in order: the
        same bits for any number of threads, and whatever other tensors there are. Backends: cpp,
        triton, torch.

    Example:
        >>> import torch
        >>> from fusedops.ops.square_sums import square_sums
        >>> square_sums([torch.tensor([3.0, 4.0]), torch.zeros(0)])
        tensor([25.,  0.], dtype=torch.float64)
    """
    return _OP(list(inputs))


def _reference(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double().square().sum() for each in inputs])


def _fake(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return inputs[0].new_empty((len(inputs),), dtype=torch.float64)


_OP = define_op(
    "square_sums",
    "(Tensor[] inputs) -> (Tensor sums)",
    contract={"inputs": "each float [*shape]", "sums": "float64 [len(inputs)]"},
    reference=_reference,
    fake=_fake,
    triton="fusedops.kernels.square_sums",
    part_of="optim",
)
