"""The states of AdamW: which dtypes they have, and whether given ones belong to a parameter.

Keys are torch's (``step``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``), so that states go
there and back; ``master`` is ours, and torch's AdamW carries it along unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from fusedops._core import checks
from fusedops.optim import _shards

_HALF = (torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class Storage:
    """How the state of one parameter is kept."""

    device: torch.device
    moments: torch.dtype
    master: torch.dtype | None  # of the copy that is stepped in the parameter's place
    draws: bool  # whether its step rounds stochastically


@dataclass(frozen=True)
class OptimizerPolicy:
    """What holds for all parameters of an optimizer and is no hyperparameter of a group."""

    master_weights: bool
    state_dtype: torch.dtype | None
    stochastic_rounding: bool | None
    max_norm: float | None
    skip_non_finite: bool
    no_decay: tuple[str, ...]
    seed: int

    @property
    def needs_norm(self) -> bool:
        """Whether a step needs the norm of the gradients."""
        return self.max_norm is not None or self.skip_non_finite

    def storage(self, param: torch.Tensor, *, offloaded: bool = False) -> Storage:
        """Return how the state of a parameter is kept.

        One that is ``offloaded`` is stepped in host memory, where a master must then be.
        """
        master = offloaded or (self.master_weights and param.dtype in _HALF)
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        moments = self.state_dtype or (torch.float32 if master else param.dtype)
        if param.dtype == torch.float64:
            moments = wide
        rounded = torch.bfloat16 in (moments, None if master else param.dtype)
        return Storage(
            device=torch.device("cpu") if offloaded else param.device,
            moments=moments,
            master=wide if master else None,
            draws=bool(self.stochastic_rounding) and rounded,
        )


def new_policy(op: str, **options: Any) -> OptimizerPolicy:
    """Check the options of an optimizer, in the words of its user, and return them."""
    policy = OptimizerPolicy(**options)
    stochastic, no_decay = policy.stochastic_rounding, policy.no_decay
    checks.flag(op, "master_weights", policy.master_weights)
    checks.flag(op, "skip_non_finite", policy.skip_non_finite)
    checks.integer(op, "seed", policy.seed)
    if policy.state_dtype not in (None, torch.float32, torch.bfloat16):
        checks.fail(op, "state_dtype", "None, torch.float32 or torch.bfloat16", policy.state_dtype)
    if stochastic is None:
        stochastic = policy.state_dtype == torch.bfloat16
    checks.flag(op, "stochastic_rounding", stochastic)
    if policy.max_norm is not None:
        checks.positive(op, "max_norm", policy.max_norm)
        policy = replace(policy, max_norm=float(policy.max_norm))
    listed = isinstance(no_decay, Iterable) and not isinstance(no_decay, str)
    if not listed or not all(isinstance(pattern, str) for pattern in no_decay):
        raise TypeError(
            f"{op}: no_decay must be a sequence of patterns such as ('*.bias',), got {no_decay!r}"
        )
    return replace(policy, stochastic_rounding=stochastic, no_decay=tuple(no_decay))


def check_group(
    op: str,
    *,
    lr: Any,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    **flags: Any,
) -> None:
    """Check the options of a group of parameters, in the words of its user."""
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        checks.fail_type(op, "betas", "a pair of floats", betas)
    numbers = [("eps", eps), ("weight_decay", weight_decay)]
    for name, value in (("lr", lr), *(("betas", beta) for beta in betas)):
        if not isinstance(value, torch.Tensor):
            numbers.append((name, value))
        elif value.numel() != 1:
            checks.fail(op, name, "a float or a tensor of one element", list(value.shape))
    for name, value in numbers:
        of_numpy = isinstance(value, Real) and not isinstance(value, int)
        checks.finite(op, name, float(value) if of_numpy else value, least=0.0)
    for name, value in flags.items():
        if value is not None:
            checks.flag(op, name, value)


def new_state(param: torch.Tensor, storage: Storage, *, amsgrad: bool) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step; DTensors for a DTensor."""
    # Where the step is made: one that GradScaler skips must not be counted, and only the device
    # knows which.
    step = torch.zeros((), dtype=_step_dtype(), device=storage.device)
    state: dict[str, torch.Tensor] = {"step": step}
    for name in MOMENTS[: 3 if amsgrad else 2]:
        state[name] = torch.zeros_like(param, dtype=storage.moments, device=storage.device)
    if storage.master is not None:
        state["master"] = new_master(param, storage)
    return state


def new_master(param: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the copy of a parameter that is stepped in its place."""
    return param.detach().to(device=storage.device, dtype=storage.master, copy=True)


def read_parameter(param: torch.Tensor, master: torch.Tensor) -> bool:
    """Let a master take the elements of its parameter that it does not round to.

    Returns:
        Whether there were any. The others keep the bits that the parameter does not have.
    """
    ours = _shards.local(master)
    now = _shards.local(param).to(ours.device)
    changed = ours.to(now.dtype) != now
    if not bool(changed.any()):
        return False
    ours.copy_(torch.where(changed, now.to(ours.dtype), ours))
    return True


def check_state(
    op: str,
    title: str,
    param: torch.Tensor,
    state: dict[str, Any],
    storage: Storage,
    had: tuple[torch.device, torch.dtype] | None = None,
) -> None:
    """Raise unless a parameter is still what its state was made for.

    ``storage`` is how its state would be kept now; ``had`` are its device and dtype then, where the
    state does not tell.
    """
    now = f"of {title}, as its state was made (make the optimizer after changing the model)"
    if had is not None and param.device != had[0]:
        checks.fail(op, "the device", f"{had[0]} {now}", param.device)
    if had is not None and param.dtype != had[1]:
        checks.fail(op, "the dtype", f"{had[1]} {now}", param.dtype)
    moment = state["exp_avg"]
    if moment.device != storage.device:
        checks.fail(op, "the device", f"{moment.device} {now}", storage.device)
    if moment.shape != param.shape:
        checks.fail(op, "the shape", f"{list(moment.shape)} {now}", list(param.shape))
    has_master = "master" in state
    if moment.dtype != storage.moments or has_master != (storage.master is not None):
        checks.fail(op, "the dtype", f"the one {now}", param.dtype)


def check_given(op: str, title: str, param: torch.Tensor, given: dict[str, Any]) -> None:
    for name in (*MOMENTS, "master"):
        value = given.get(name)
        if value is None:
            if name in MOMENTS[:2] and given:
                checks.fail(op, "state_dict", f"one with {name} of {title}", sorted(given))
            continue
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            got = list(value.shape) if isinstance(value, torch.Tensor) else checks.shown(value)
            expected = f"of this model: {name} of {title} has shape {list(param.shape)}"
            checks.fail(op, "state_dict", expected, got)


def fitting_state(
    param: torch.Tensor, given: dict[str, Any], storage: Storage, *, amsgrad: bool
) -> dict[str, Any]:
    """Return a saved state in the dtypes, on the device and with the strides of ``new_state``.

    The master is the saved one, else a copy of the parameter. Further entries, from another
    optimizer, are kept.
    """
    state = dict(given)
    step = torch.as_tensor(given["step"])
    state["step"] = step.to(device=storage.device, dtype=_step_dtype(), copy=True)
    if amsgrad and given.get("max_exp_avg_sq") is None:
        state["max_exp_avg_sq"] = given["exp_avg_sq"].clone()
    for name in MOMENTS:
        if name in state:
            state[name] = _like(param, state[name], storage.device, storage.moments)
    state.pop("master", None)
    if storage.master is not None:
        saved = given.get("master")
        if saved is None:
            state["master"] = new_master(param, storage)
        else:
            state["master"] = _like(param, saved, storage.device, storage.master)
    return state


def _like(
    param: torch.Tensor, value: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    value = value.to(device=device, dtype=dtype)
    if _shards.is_dtensor(value) or value.is_contiguous() == param.is_contiguous():
        return value
    return torch.empty_like(param, dtype=dtype, device=device).copy_(value)


def _step_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
