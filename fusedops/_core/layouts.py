"""Layouts of tensors that ops and their Triton kernels share. No Triton."""

from __future__ import annotations

import torch


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a matrix ``[rows, features]``."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def heads_inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, S, D]`` laid out in memory as ``[B, S, H, D]``, as torch's own SDPA does.

    A model's next step is to join the heads of a token: then that costs nothing. There is no copy
    of a tensor that has this layout.
    """
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
