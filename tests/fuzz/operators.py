"""Calls of ``torch.ops.fusedops.*``, forward and backward, that nothing has checked before.

Calls that are right are recorded from the specs' samples; one to three arguments of one are then
changed. The process must live. Any exception is a right answer. A result is one only if the
reference in torch takes the call as well: otherwise the contract permits too much.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fusedops
from fusedops.specs import all_specs, multi_tensor_specs, tensors_in
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

from . import mutate
from .engine import WrongResultError

# Larger calls say no more about bounds, and slow the others down.
MOST_ELEMENTS = 12_000
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Operators:
    """Wrong calls of operators."""

    name = "operators"
    batch = 4000

    def __init__(self, only: str | None = None) -> None:
        self.calls = _recorded(only)
        self.names = sorted(self.calls)
        assert self.names, f"no operator's name contains {only!r}"

    def _make(self, rng: random.Random) -> tuple[Any, list[Any]]:
        calls = self.calls[rng.choice(self.names)]
        func, args = rng.choice(calls)
        made = _own(func, args)
        kind = rng.random()
        if kind < 0.15:
            mutate.sizes(rng, made)
        for _ in range(rng.choice((0, 1)) if kind < 0.15 else rng.choice((1, 1, 2, 3))):
            place = rng.randrange(len(made))
            if rng.random() < 0.15:
                made[place] = _own(func, rng.choice(calls)[1])[place]
            elif isinstance(made[place], torch.Tensor):
                made[place] = mutate.tensor(rng, made[place])
            elif _takes_tensors(func, place):
                made[place] = mutate.tensors(rng, made[place])
            else:
                made[place] = mutate.other(rng, made[place])
        return func, made

    def run(self, rng: random.Random) -> str:
        """Make a call and run it."""
        func, made = self._make(rng)
        copied = _own(func, made)
        try:
            with torch.no_grad():
                result = func(*made)
        except Exception:
            return "refused"
        _compare(func, result, copied)
        return "returned"

    def describe(self, rng: random.Random) -> str:
        """Return the operator and its arguments."""
        func, made = self._make(rng)
        return mutate.described(func._opname, made)


def _compare(func: Any, result: Any, args: Sequence[Any]) -> None:
    """Raise if the reference refuses the sizes or dtypes of a call that returned, or differs.

    Only of forward operators without indices: a backward may be given saved results that belong to
    other inputs, and changed indices or lengths leave rows undefined.
    """
    if not any(tensor.numel() for tensor in tensors_in(result)[:1]):
        return
    tensors, numbers = tensors_in(args), [arg for arg in args if isinstance(arg, float)]
    if func._opname.endswith("_backward") or not all(
        tensor.is_cpu and tensor.is_floating_point() and bool((tensor.abs() < 1e3).all())
        for tensor in (*tensors, torch.tensor(numbers))
    ):
        return
    try:
        with torch.no_grad(), fusedops.use_backend("torch"):
            expected = func(*args)
    except Exception as error:
        raise WrongResultError(f"{func} returned, but the reference raises: {error}") from error
    # The others are statistics and saved tensors, some of whose elements nobody reads.
    pairs = zip(tensors_in(result)[:1], tensors_in(expected)[:1], strict=True)
    for actual, wanted in pairs:
        if (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
            raise WrongResultError(f"{func} returned {actual.shape}, the reference {wanted.shape}")
        error, size = (actual.double() - wanted.double()).nan_to_num().abs(), wanted.double().abs()
        if error.max() > 0.1 * size.nan_to_num().max() + 1e-2:
            raise WrongResultError(f"{func}: the result differs by {error.max()}")


def _recorded(only: str | None) -> dict[str, list[tuple[Any, tuple[Any, ...]]]]:
    """Return operator -> the calls of it that the specs' samples make."""
    found: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {}
    for spec in all_specs().values():
        for dtype in DTYPES:
            for sample in spec.samples(CPU, dtype):
                if sum(tensor.numel() for tensor in sample.tensors) > MOST_ELEMENTS:
                    continue
                with RecordOps() as recorded:
                    run(spec.op, fresh(sample))
                for func, args in recorded.calls:
                    if sum(tensor.numel() for tensor in tensors_in(args)) > 4 * MOST_ELEMENTS:
                        continue
                    if only is None or only in func._opname:
                        plain = tuple(_plain(arg) for arg in args)
                        found.setdefault(func._opname, []).append((func, plain))
    for name, described in multi_tensor_specs().items():
        if only is None or only in name:
            func = getattr(torch.ops.fusedops, name).default
            samples = [call for dtype in DTYPES for call in described.calls(CPU, dtype)]
            found[name] = [(func, call.args) for call in samples]
    return found


def _own(func: Any, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call; what it writes to is a copy, of the same strides."""
    made = list(args)
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            made[place] = pytree.tree_map_only(torch.Tensor, _copy, made[place])
    return made


def _takes_tensors(func: Any, place: int) -> bool:
    return str(func._schema.arguments[place].type) == "List[Tensor]"


def _plain(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _copy(arg.detach())
    return list(arg) if isinstance(arg, (list, tuple)) else arg


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in memory of the same strides."""
    return tensor.clone(memory_format=torch.preserve_format)
