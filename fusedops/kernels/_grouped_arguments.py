"""The arguments of grouped_mm and moe_mlp in the order of their schemas, for ops and kernels alike.

Tensors stand first and ``activation`` follows them; the backward's operators have the incoming
gradient before the tensors, the kept pre-activation after them and the mask of outputs at the end.
Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch


class GroupedMM(NamedTuple):
    """Of ``fusedops::grouped_mm``; in sharding rules specs stand for the tensors."""

    input: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    keep_preactivation: bool

    @property
    def keeps(self) -> bool:
        """Whether the forward returns the pre-activation; the identity's is the output."""
        return self.keep_preactivation and self.activation != "identity"


class MoeMLP(NamedTuple):
    """Of ``fusedops::moe_mlp``; in sharding rules specs stand for the tensors."""

    input: torch.Tensor
    probs: torch.Tensor
    permutation: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    activation: str
    gated: bool
    interleaved: bool
    keep_preactivation: bool

    @property
    def form(self) -> tuple[str, bool, bool]:
        """What stands between the two products."""
        return self.activation, self.gated, self.interleaved


Arguments = TypeVar("Arguments", GroupedMM, MoeMLP)


def of_backward(
    kind: type[Arguments], args: Sequence[Any]
) -> tuple[torch.Tensor, Arguments, torch.Tensor, Sequence[bool]]:
    """Return incoming gradient, the op's arguments, the kept pre-activation and the mask."""
    end = 1 + kind._fields.index("activation")
    return args[0], kind(*args[1:end], *args[end + 1 : -1]), args[end], args[-1]
