"""Repeats the previous optimizer step: same parameters and states, other gradients.

On a GPU the host must be done with a step before the GPU is, and a look at each of several hundred
tensors in Python takes milliseconds. After a step that looked at all of them, this one asks the
compiled library (``csrc/known_tensors.cpp``) whether something has changed, and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from fusedops._core import backends
from fusedops.ops.adamw import RepeatedBatch
from fusedops.ops.square_sums import RepeatedSums
from fusedops.optim import _shards, _step_queue
from fusedops.optim._batches import GroupBatch
from fusedops.optim._state import MOMENTS
from fusedops.optim.norms import total

Numbers = Callable[[dict[str, Any], torch.device], dict[str, Any]]


class RepeatedStep:
    """The kernel launches of a step, reused for the next step on the same tensors.

    It refers to no tensor of the optimizer, so that states can be freed or moved between steps.
    """

    def __init__(
        self, optimizer: Any, grads: Sequence[torch.Tensor], batches: Sequence[GroupBatch]
    ) -> None:
        numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
        self._batches = [
            (numbers[id(group)], torch.tensor(places), RepeatedBatch(collected.tensors))
            for group, places, collected in batches
        ]
        given = [_shards.local(grad) for grad in grads]
        self._sums = RepeatedSums(given) if optimizer.policy.needs_norm else None
        params = _params(optimizer)
        self._has_grad = [param.grad is not None for param in params]
        self._sharded = any(_shards.is_dtensor(param) for param in params)
        self._identity = self._identities(optimizer, params)
        self._options = _options(optimizer)
        self._changes = backends.changes()
        stepped = [param for param in params if param.grad is not None]
        states = [optimizer.state[param] for param in stepped]
        read = ("step", *MOMENTS, "master")
        tensors = [state[name] for state in states for name in read if name in state]
        kept = [_shards.stored(tensor) for tensor in (*stepped, *tensors)]
        self._known = torch.classes.fusedops_native.KnownTensors(kept, given)
        self._grads: list[Any] = []

    @classmethod
    def after(
        cls, optimizer: Any, grads: Sequence[torch.Tensor], batches: Sequence[GroupBatch]
    ) -> RepeatedStep | None:
        """Return what repeats the step just made; ``None`` if it cannot be repeated.

        ``grads`` are those of all parameters that have one, in their order.
        """
        for *_, collected in batches:
            rearranged = collected.write_back or collected.copies_gradients
            if rearranged or not RepeatedBatch.serves(collected.tensors):
                return None
        if _step_queue.missing() is not None:
            return None
        if optimizer.policy.needs_norm:
            if len({grad.device for grad in grads}) > 1:
                return None
            if not RepeatedSums.serves([_shards.local(grad) for grad in grads]):
                return None
        return cls(optimizer, grads, batches)

    def take(self, optimizer: Any) -> bool:
        """Use the current gradients; return whether all else is unchanged since the last step.

        Where something has, nothing was written, and this object is of no more use.
        """
        params = _params(optimizer)
        if self._changes != backends.changes() or self._options != _options(optimizer):
            return False
        if self._identity != self._identities(optimizer, params):
            return False
        grads = [param.grad for param in params]
        if [grad is not None for grad in grads] != self._has_grad:
            return False
        if not all(self._has_grad):
            grads = [grad for grad in grads if grad is not None]
        self._grads = grads
        if self._sharded:
            stepped = (param for param, has in zip(params, self._has_grad, strict=True) if has)
            pairs = zip(grads, stepped, strict=True)
            if any(_shards.placed_like(grad, param) is not grad for grad, param in pairs):
                return False
            grads = [_shards.local(grad) for grad in grads]
        moved = self._known.update(grads)
        if moved > 0:
            addresses = self._known.addresses()
            for _, places, batch in self._batches:
                batch.move_gradients(addresses[places])
            if self._sums is not None:
                self._sums.move(addresses)
        return bool(moved >= 0)

    def norm(self) -> torch.Tensor:
        """Return the norm of these gradients, as ``global_norm`` does."""
        assert self._sums is not None
        return total(self._sums(), self._grads if self._sharded else ()).sqrt()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Numbers,
        factor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        self._grads = []
        for group, _, batch in self._batches:
            given = numbers(optimizer.param_groups[group], batch.device)
            batch.step(**given, **scaling_on(batch.device, factor, found_inf))
        self._known.count_writes()
        if self._sharded:  # and those whose local parts are known
            _shards.count_writes(param for param in _params(optimizer) if param.grad is not None)

    def _identities(self, optimizer: Any, params: list[Any]) -> int:
        # A tensor that is gone is no longer known, so that another of its identity is seen.
        stored = [_shards.stored(param) for param in params] if self._sharded else []
        return _step_queue.identities(params + stored, optimizer.state)


def scaling_on(
    device: torch.device, factor: torch.Tensor | None, found_inf: torch.Tensor | None
) -> dict[str, Any]:
    """Return the two numbers that gradients are scaled and steps are skipped by, on a device."""
    return {
        "grad_factor": None if factor is None else factor.to(device, non_blocking=True),
        "found_inf": None if found_inf is None else found_inf.to(device, non_blocking=True),
    }


def _params(optimizer: Any) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _options(optimizer: Any) -> tuple[Any, ...]:
    """Return what the launches of a step depend on, in addition to tensors."""
    groups = [
        (len(group["params"]), group["amsgrad"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    return optimizer.policy, groups
