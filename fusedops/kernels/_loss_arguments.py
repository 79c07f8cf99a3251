"""The arguments of the cross-entropies in the order of their schemas, for ops and kernels alike.

Tensors stand first and ``ignore_index`` follows them; the backward's operators have the incoming
gradient before the tensors, what the forward kept after them and the mask of outputs at the end.
Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch


class LossOptions(NamedTuple):
    """The numbers of the loss as the registered ops take them; ``softcap`` 0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


class CrossEntropy(NamedTuple):
    """Of ``fusedops::cross_entropy``; in sharding rules specs stand for the tensors."""

    logits: torch.Tensor
    target: torch.Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    dtype: torch.dtype

    @property
    def options(self) -> LossOptions:
        """Return the numbers of the loss."""
        return LossOptions(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)


class LinearCrossEntropy(NamedTuple):
    """Of ``fusedops::linear_cross_entropy``; in sharding rules specs stand for the tensors.

    Attributes:
        all_classes: 0, or the number of all classes of which those of ``weight`` are a part.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    chunk_size: int
    keep_logits: bool
    all_classes: int

    @property
    def num_classes(self) -> int:
        """Return the number of all classes."""
        return self.all_classes or self.weight.shape[0]

    @property
    def options(self) -> LossOptions:
        """Return the numbers of the loss."""
        return LossOptions(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)


Arguments = TypeVar("Arguments", CrossEntropy, LinearCrossEntropy)


def of_backward(
    kind: type[Arguments], args: Sequence[Any]
) -> tuple[torch.Tensor, Arguments, Sequence[torch.Tensor], Sequence[bool]]:
    """Return incoming gradient, the op's arguments, what the forward kept, and the mask."""
    tensors = 1 + kind._fields.index("ignore_index")
    numbers = tensors - len(kind._fields) - 2
    return args[0], kind(*args[1:tensors], *args[numbers:-1]), args[tensors:numbers], args[-1]
