"""Describes jobs to the step queue of ``csrc/host``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusedops.ops.adamw import Draw
from fusedops.optim._state import MOMENTS
from fusedops.runtime import host_module


@dataclass(frozen=True)
class Basis:
    """The scalar arguments of a step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    bias_correction: bool
    grad_factor: float  # negative to maximize
    decays: tuple[float, ...]  # weight decay of each member
    steps: tuple[float, ...]  # number of this step, of each member


def describe(
    current: dict[str, torch.Tensor],
    shadow: dict[str, torch.Tensor],
    grad: torch.Tensor,
    copy: torch.Tensor,
    basis: Basis,
    member: int,
    draw: Draw | None,
) -> SimpleNamespace:
    """Describe the step of a member's tensor, which reads ``current`` and writes ``shadow``.

    Addresses are 0 where there is no tensor; dtypes are named. Scalars are computed as
    ``csrc/cpu/optimizer/adamw.cpp`` does, to the bit.
    """

    def at(tensors: dict[str, torch.Tensor], name: str) -> int:
        return tensors[name].data_ptr() if name in tensors else 0

    drawn = draw or Draw(0, 0, 1, 1)
    lr, (beta1, beta2), step = basis.lr, basis.betas, basis.steps[member]
    return SimpleNamespace(
        param=at(current, "master"),
        new_param=at(shadow, "master"),
        **{name: at(current, name) for name in MOMENTS},
        **{f"new_{name}": at(shadow, name) for name in MOMENTS},
        grad=grad.data_ptr(),
        copy=copy.data_ptr(),
        numel=grad.numel(),
        param_dtype=_word(current["master"]),
        grad_dtype=_word(grad),
        state_dtype=_word(current["exp_avg"]),
        copy_dtype=_word(copy),
        step_size=lr / (1.0 - beta1**step) if basis.bias_correction else lr,
        inverse_root=1.0 / math.sqrt(1.0 - beta2**step) if basis.bias_correction else 1.0,
        decay=lr * basis.decays[member],
        key=drawn.key,
        offset=2 * int(step),
        base=drawn.base,
        run=max(1, drawn.run),
        pitch=drawn.pitch,
    )


def missing() -> str | None:
    """Return ``None`` when the queue is there, else the reason why it is not."""
    loaded = host_module.load()
    return loaded if isinstance(loaded, str) else None


def most_threads() -> int:
    """Return the largest number of threads of a queue; ``missing`` must not name a reason."""
    return int(host_module.load().MOST_THREADS)


def new_queue(threads: int) -> Any:
    """Start a queue; ``missing`` must not name a reason."""
    return host_module.load().StepQueue(threads)


def identities(objects: list[Any], dictionaries: dict[Any, Any]) -> int:
    """Return a number that another object changes: in the list, or in one of the dictionaries.

    An object that took the place of one that no longer exists may have the same number. ``missing``
    must not name a reason.
    """
    return int(host_module.load().identities(objects, dictionaries))


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
