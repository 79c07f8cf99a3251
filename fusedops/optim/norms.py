"""The norm of the gradients of a whole model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.device_tensors import to_device
from fusedops.ops.square_sums import square_sums
from fusedops.optim import _shards

# Torch's own: keeps the coefficient finite where the norm is 0.
_EPS = 1e-6


def global_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all elements of all tensors.

    Args:
        tensors: floating tensors, of any shapes, dtypes and devices; a DTensor counts with all its
            shards, and each process of its mesh must call this.

    Returns:
        float64, no dimensions, on the device of the first tensor (without tensors, the CPU). inf or
        NaN if and only if an element is (of float64 elements also where the sum of squares exceeds
        its range).

    Raises:
        TypeError: an element is not a dense floating tensor.

    Note:
        Sums are float64, in an order that depends on each tensor's own size: the same bits for any
        number of threads. On the CPU the sums of the tensors are added without rounding, so that
        their order has no effect either. The shards of a DTensor are summed locally: another
        sharding may change the last bit of the float64. The function does not wait for a GPU.

    Example:
        >>> import torch, fusedops.optim
        >>> fusedops.optim.global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(5., dtype=torch.float64)
    """
    every = _listed("global_norm", "tensors", tensors)
    for tensor in every:
        checks.tensor("global_norm", "each of tensors", tensor)
    if not every:
        return torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        every = [_shards.summed(tensor) for tensor in every]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in every:
            by_device.setdefault(tensor.device, []).append(tensor)
        totals = []
        for members in by_device.values():
            sums = square_sums([_shards.local(member) for member in members])
            totals.append(total(sums, members))
        # From the host to the device, for which nobody waits.
        target = next((part.device for part in totals if part.is_cuda), totals[0].device)
        return _added(torch.stack([to_device(part, target) for part in totals])).sqrt()


def total(sums: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all tensors of a device, from those of their local parts.

    ``tensors`` may be empty where none is sharded.
    """
    return _added(_shards.sum_over_shards(sums, tensors))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``; on the CPU it needs one pass if no scaling is
    necessary. ``AdamW(max_norm=...)`` does the same inside its step, without a pass that writes.

    Args:
        parameters: parameters without a gradient are ignored; DTensors as in ``global_norm``.
        max_norm: largest norm that is not scaled.
        norm_type: must be 2.
        error_if_nonfinite: raise if the norm is inf or NaN.
        foreach: accepted, without effect.

    Returns:
        The norm before clipping, as ``global_norm`` gives it.

    Raises:
        ValueError: ``norm_type`` is not 2, or ``max_norm`` is negative or NaN.
        TypeError: an argument has a wrong type.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; gradients are unchanged.

    Example:
        >>> import torch, fusedops.optim
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> fusedops.optim.clip_grad_norm_([weight], 1.0)
        tensor(5., dtype=torch.float64)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    checks.number("clip_grad_norm_", "norm_type", norm_type)
    checks.flag("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        checks.flag("clip_grad_norm_", "foreach", foreach)
    if norm_type != 2:
        checks.fail(
            "clip_grad_norm_", "norm_type", "2 (others: torch.nn.utils.clip_grad_norm_)", norm_type
        )
    checks.number("clip_grad_norm_", "max_norm", max_norm)
    if not max_norm >= 0:
        checks.fail("clip_grad_norm_", "max_norm", "at least 0", max_norm)
    every = _listed("clip_grad_norm_", "parameters", parameters)
    grads = [parameter.grad for parameter in every if parameter.grad is not None]
    norm = global_norm(grads)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm.item()}, so they cannot be "
            "clipped; error_if_nonfinite=False lets them pass"
        )
    scale_gradients(grads, clip_coefficient(norm, float(max_norm)))
    return norm


def scale_gradients(grads: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
    """Multiply gradients in place; on the CPU 1 costs no pass."""
    if coefficient.device.type == "cpu" and coefficient.item() == 1.0:
        return
    with torch.no_grad():
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in map(_shards.local, grads):
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, dtype), members in by_kind.items():
            # In half precision the coefficient itself would be rounded.
            wide = dtype if dtype == torch.float64 else torch.float32
            torch._foreach_mul_(members, coefficient.to(device, wide))


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are multiplied by: 1 where they need not be clipped."""
    return (max_norm / (norm + _EPS)).clamp(max=1.0)


def _listed(op: str, argument: str, tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, Iterable):
        checks.fail_type(op, argument, "an iterable of tensors", tensors)
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not all(isinstance(tensor, torch.Tensor) for tensor in every):
        checks.fail_type(op, argument, "an iterable of tensors", tensors)
    return every


def _added(sums: torch.Tensor) -> torch.Tensor:
    if sums.device.type != "cpu":
        return sums.sum()
    values = sums.tolist()
    # fsum refuses infinities of both signs, of which squares have one, and overflows by raising.
    finite = all(map(math.isfinite, values))
    try:
        exact = math.fsum(values) if finite else sum(values)
    except OverflowError:
        exact = math.inf
    return torch.tensor(exact, dtype=torch.float64)
