"""Right and wrong calls of the public functions, and wrong ones of the operators below them.

* ``Functions``: a sample of a spec gets other sizes, dtypes, strides and tensors that require a
  gradient. What the function refuses is no finding; what it takes must be right within the error
  budget, in the dtypes that the reference gives.
* ``Arguments``: anything in place of any argument. The function may take it, or refuses by name.
* ``Operators``: recorded calls of ``torch.ops.fusedops.*``, forward and backward, with one to three
  arguments changed, which nothing has checked before. The process must live. Any exception is a
  right answer. A result is one only if the reference takes the call as well.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

import fusedops
from fusedops.specs import Sample, Spec, all_specs, multi_tensor_specs, tensors_in
from fusedops.specs.comparison import difference_of_mixture, fresh, run, truth
from fusedops.specs.recorder import RecordOps

from . import mutate
from .engine import WrongResultError

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 2, 3, 5, 16, 17, 31, 33, 64, 65, 100)
MOST_ELEMENTS = 30_000
REFUSALS = (ValueError, TypeError, fusedops.UnsupportedError)


def picked(only: str | None) -> list[tuple[Spec, dict[torch.dtype, list[Sample]]]]:
    """Return the specs whose name contains ``only``, with their small samples by dtype."""
    found = []
    for name, spec in all_specs().items():
        # The bytes of moe_unpack mean something else in float64.
        if name == "moe_unpack" or (only or "") not in name:
            continue
        by_dtype = {dtype: spec.samples(CPU, dtype) for dtype in DTYPES}
        small = {
            dtype: [s for s in every if sum(t.numel() for t in s.tensors) < MOST_ELEMENTS]
            for dtype, every in by_dtype.items()
        }
        found.append((spec, small))
    assert found, f"no op's name contains {only!r}"
    return found


class Functions:
    """Right calls of public functions."""

    name = "functions"
    batch = 200

    def __init__(self, only: str | None = None) -> None:
        self.specs = picked(only)

    def _make(self, rng: random.Random) -> tuple[Spec, Sample]:
        spec, by_dtype = rng.choice(self.specs)
        sample = rng.choice(by_dtype[rng.choice(DTYPES)])
        if rng.random() < 0.5:
            sample = _resized(rng, sample)
        mixed, laid_out = rng.random() < 0.3, rng.random() < 0.5

        def change(tensor: torch.Tensor) -> torch.Tensor:
            new = tensor.detach()
            if new.is_floating_point() and mixed and rng.random() < 0.5:
                new = new.to(rng.choice(DTYPES))
            if laid_out:
                new = _laid_out(rng, new)
            return new.requires_grad_(tensor.requires_grad and rng.random() < 0.7)

        return spec, sample.map(change)

    def run(self, rng: random.Random) -> str:
        """Make a call and compare it with float64."""
        spec, sample = self._make(rng)
        try:
            spec.op(*sample.args, **sample.kwargs)
        except REFUSALS:
            return "refused"
        except Exception as error:
            raise WrongResultError(f"{type(error).__name__}: {error}") from error
        try:
            truth(spec, fresh(sample))
        except Exception:
            return "skipped"  # eager torch has no such call
        found = difference_of_mixture(spec, sample, loose=True)
        if found is not None:
            raise WrongResultError(found)
        return "returned"

    def describe(self, rng: random.Random) -> str:
        """Return the op and its arguments."""
        spec, sample = self._make(rng)
        return mutate.described(spec.name, sample.args, dict(sample.kwargs))


class Arguments(Functions):
    """Wrong calls of public functions: anything in place of any argument.

    A function may take it; if it does not, it refuses by name. It never ends the process.
    """

    name = "arguments"
    batch = 2000

    def _make(self, rng: random.Random) -> tuple[Spec, Sample]:
        spec, by_dtype = rng.choice(self.specs)
        sample = rng.choice(by_dtype[rng.choice(DTYPES)])
        args, kwargs = list(sample.args), dict(sample.kwargs)
        for _ in range(rng.choice((1, 1, 1, 2))):
            place = rng.randrange(len(args) + len(kwargs))
            holder: Any = args if place < len(args) else kwargs
            key = place if place < len(args) else sorted(kwargs)[place - len(args)]
            if isinstance(holder[key], torch.Tensor) and rng.random() < 0.5:
                holder[key] = mutate.tensor(rng, holder[key].detach())
            elif isinstance(holder[key], (bool, int, float, str)) and rng.random() < 0.3:
                holder[key] = mutate.other(rng, holder[key])
            else:
                holder[key] = rng.choice(_objects())
        return spec, Sample(sample.name, tuple(args), kwargs, sample.random)

    def run(self, rng: random.Random) -> str:
        """Make a call and look at how it is refused."""
        spec, sample = self._make(rng)
        try:
            spec.op(*sample.args, **sample.kwargs)
        except Exception as error:
            if not isinstance(error, REFUSALS) or spec.name not in str(error):
                raise WrongResultError(f"{type(error).__name__}: {error}") from error
            return "refused"
        return "returned"


@functools.cache
def _objects() -> list[Any]:
    """Return things that are no argument of most functions."""
    return [
        *(None, "", "x", b"x", True, False, object(), len, dict, ...),
        *(0, 1, -1, 7, 2**31, 2**63, 2**70, -(2**63)),
        *(0.0, -1.0, 1.5, 1e300, float("nan"), float("inf"), 1j),
        *([], [1], [None], (), (1,), (-1,), (2**40,), {}, {"a": 1}, {1}, range(3)),
        *(numpy.float32(0.5), numpy.int64(3), numpy.zeros(3), torch.float32, torch.Size([3])),
        *(torch.device("cpu"), torch.strided, torch.tensor(3), torch.tensor(0.5)),
        *(torch.zeros(0), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, 0, 3)),
        *(torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta")),
        *(torch.zeros(4, dtype=torch.float8_e4m3fn), torch.nn.Parameter(torch.ones(3))),
        torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ]


def _resized(rng: random.Random, sample: Sample) -> Sample:
    """Change a size wherever it occurs, unless integers count on it."""
    whole = [each for each in sample.tensors if not each.is_floating_point()]
    fixed = {size for each in whole if each.dtype != torch.bool for size in each.shape}
    fixed |= {int(value) for each in whole for value in each.reshape(-1)[:64].tolist()}
    free = sorted({size for each in sample.tensors for size in each.shape} - fixed)
    if not free:
        return sample
    old, new = rng.choice(free), rng.choice(SIZES)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def resized_shape(tensor: torch.Tensor) -> list[int]:
        return [new if size == old else size for size in tensor.shape]

    if any(math.prod(resized_shape(each)) > 32 * MOST_ELEMENTS for each in sample.tensors):
        return sample

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = resized_shape(value)
            tiled = mutate.filled(value.detach(), shape)
            if value.requires_grad:  # no ties between the copies
                tiled = tiled * (1 + 0.1 * torch.rand(shape, generator=generator)).to(tiled.dtype)
            return tiled.requires_grad_(value.requires_grad)
        if isinstance(value, (tuple, list)):
            return type(value)(new if each == old else each for each in value)
        return value

    resized = sample.map(changed)
    args = tuple(
        changed(arg) if isinstance(arg, (tuple, list)) and type(arg) in (tuple, list) else arg
        for arg in resized.args
    )
    # The truth is the reference in float64: eager torch has no rule for values that tie.
    return Sample(sample.name, args, resized.kwargs, random=True)


def _laid_out(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in another layout."""
    kind = rng.randrange(4)
    if kind == 0 and tensor.dim() >= 2:
        return mutate.in_another_order(rng, tensor)
    if kind == 1:
        return mutate.strided(rng, tensor)
    if kind == 2 and tensor.dim() >= 1:
        longer = torch.cat((tensor, tensor.new_full((3, *tensor.shape[1:]), -1)))
        return longer[: tensor.shape[0]]
    return tensor.clone()


# Larger calls say no more about bounds, and slow the others down.
MOST_OF_OPERATORS = 12_000


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
        for _ in range(rng.choice((1, 1, 2, 3))):
            place = rng.randrange(len(made))
            if rng.random() < 0.15:
                made[place] = _own(func, rng.choice(calls)[1])[place]
            else:
                made[place] = mutate.argument(rng, func, place, made[place])
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
                if sum(tensor.numel() for tensor in sample.tensors) > MOST_OF_OPERATORS:
                    continue
                with RecordOps() as recorded:
                    run(spec.op, fresh(sample))
                for func, args in recorded.calls:
                    if sum(tensor.numel() for tensor in tensors_in(args)) > 4 * MOST_OF_OPERATORS:
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


def _plain(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _copy(arg.detach())
    return list(arg) if isinstance(arg, (list, tuple)) else arg


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in memory of the same strides."""
    return tensor.clone(memory_format=torch.preserve_format)
