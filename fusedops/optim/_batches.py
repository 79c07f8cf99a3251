"""What a step is given: the local tensors of the parameters of a group, in one layout each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops.ops.adamw import Draw, TensorLists
from fusedops.optim import _shards


@dataclass
class Collected:
    """A batch, and where the results of parameters go whose memory has gaps."""

    tensors: TensorLists = field(default_factory=TensorLists)
    write_back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copies_gradients: bool = False  # whether one is not read where it lies

    def add(
        self, param: Any, state: dict[str, Any], *, decay: float, amsgrad: bool, draw: Draw | None
    ) -> None:
        batch = self.tensors
        moment = _shards.local(state["exp_avg"])
        local = _shards.local(param)
        dense = _as(moment, local)
        if dense is not local:
            self.write_back.append((local, dense))
        if "master" in state:
            batch.copies.append(dense)
            dense = _shards.local(state["master"])
        batch.params.append(dense)
        placed = _shards.placed_like(param.grad, param)
        grad = _shards.local(placed)
        batch.grads.append(_as(moment, grad))
        self.copies_gradients |= placed is not param.grad or batch.grads[-1] is not grad
        batch.exp_avgs.append(moment)
        batch.exp_avg_sqs.append(_shards.local(state["exp_avg_sq"]))
        if amsgrad:
            batch.max_exp_avg_sqs.append(_shards.local(state["max_exp_avg_sq"]))
        batch.steps.append(_shards.local(state["step"]))
        batch.weight_decays.append(decay)
        if draw is not None:
            batch.draws.append(draw)


# What one call of the op steps: a group, which members of the step these are, and their tensors.
GroupBatch = tuple[dict[str, Any], list[int], Collected]


def _as(layout: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as another one: itself, where it already is."""
    if tensor.stride() == layout.stride() or (tensor.is_contiguous() and layout.is_contiguous()):
        return tensor
    return torch.empty_like(layout, dtype=tensor.dtype).copy_(tensor)
