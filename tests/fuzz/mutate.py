"""Changes to the arguments of an operator's call that make it another call, mostly a wrong one."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch.utils import _pytree as pytree

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64),
    *(torch.int32, torch.bool, torch.float16, torch.uint8),
)
CODES = (*DTYPES, torch.complex64, torch.int8, torch.float8_e4m3fn, torch.quint8)
INTEGERS = (
    *(-1, 0, 1, 2, 3, 7, -2, -7, 64, 2**15, 2**31 - 1),
    *(-(2**31), 2**31, 2**40, 2**62, -(2**63)),
)
NUMBERS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, -1e30, 1e300, float("nan"), float("inf"), -float("inf"))
STRINGS = ("", "none", "mean", "gelu", "tanh", "torch", "softmax", "x" * 300, "\0")


def argument(rng: random.Random, func: Any, place: int, given: Any) -> Any:
    """Return something else in place of an operator's argument."""
    if isinstance(given, torch.Tensor):
        return tensor(rng, given)
    if str(func._schema.arguments[place].type) == "List[Tensor]":
        return tensors(rng, given)
    return other(rng, given)


def tensor(rng: random.Random, given: torch.Tensor) -> Any:
    """Return something else in place of a tensor."""
    return rng.choice(_TENSOR_CHANGES)(rng, given) if is_plain(given) else given


def tensors(rng: random.Random, given: list[Any]) -> list[Any]:
    """Return another list in place of one of tensors: an element changed, dropped or repeated."""
    changed = list(given)
    kind = rng.randrange(10)
    if not changed or kind == 9:
        return [] if changed else [torch.ones(3)]
    place, source = rng.randrange(len(changed)), rng.randrange(len(changed))
    if kind == 8:
        del changed[place]
    elif kind == 7:
        changed.insert(place, changed[source])
    elif kind == 6:
        changed[place], changed[source] = changed[source], changed[place]
    elif kind == 5:
        changed[place] = changed[source]
    elif isinstance(changed[place], torch.Tensor):
        changed[place] = tensor(rng, changed[place])
    return changed


def described(name: str, args: Any, kwargs: Any = None) -> str:
    """Return a call with dtype, shape and strides in place of each tensor."""

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        strides = f" strides {list(value.stride())}" if is_plain(value) else f" {value.layout}"
        return f"<{str(value.dtype)[6:]} {list(value.shape)}{strides}>"

    return f"{name}{pytree.tree_map(of, (list(args), kwargs or {}))}"


def is_plain(given: torch.Tensor) -> bool:
    """Whether a tensor has values in strided memory."""
    special = given.is_nested or given.is_meta or given.is_quantized or given.is_complex()
    return not special and given.layout == torch.strided


def filled(given: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return the values of a tensor, over and over, in memory of its own of another shape."""
    count, flat = math.prod(shape), given.reshape(-1)
    if flat.numel() == 0:
        return given.new_zeros(shape)
    if flat.numel() < count:
        flat = flat.repeat(-(-count // flat.numel()))
    return flat[:count].clone().view(shape)


def _resized(rng: random.Random, given: torch.Tensor) -> Any:
    shape = list(given.shape)
    if not shape:
        return given.expand(rng.choice((1, 2, 5))).clone()
    dim = rng.randrange(len(shape))
    n = shape[dim]
    shape[dim] = rng.choice((0, 1, n - 1, n + 1, n // 2, 2 * n, n + rng.randrange(1, 70)))
    if shape[dim] < 0:
        shape[dim] = 3
    return filled(given, shape) if math.prod(shape) < 200_000 else given


def _other_rank(rng: random.Random, given: torch.Tensor) -> Any:
    kind = rng.randrange(5)
    if kind == 0 and given.dim():
        dim = rng.randrange(given.dim())
        return given.select(dim, 0) if given.shape[dim] else given
    if kind == 1:
        return given.unsqueeze(rng.randrange(given.dim() + 1))
    if kind == 2:
        return given.reshape(-1)
    if kind == 3:
        return given.reshape(-1)[:1].reshape(()) if given.numel() else given.new_zeros(())
    return filled(given, [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(6))])


def _permuted(rng: random.Random, given: torch.Tensor) -> Any:
    order = list(range(given.dim()))
    rng.shuffle(order)
    turned = given.permute(order)
    return turned if rng.random() < 0.5 else turned.contiguous()


def _expanded(rng: random.Random, given: torch.Tensor) -> Any:
    if given.dim() == 0 or given.numel() == 0:
        return given.new_zeros(1).expand(3, 4)
    dim = rng.randrange(given.dim())
    return given.narrow(dim, 0, 1).expand(given.shape)


def strided(rng: random.Random, given: torch.Tensor) -> torch.Tensor:
    """Return the values with others between them in memory."""
    wide = given.new_full((*given.shape, 3), -1)
    wide[..., 1] = given
    return wide[..., 1]


def in_another_order(rng: random.Random, given: torch.Tensor) -> torch.Tensor:
    """Return the values with the dims in another order in memory."""
    order = list(range(given.dim()))
    rng.shuffle(order)
    back = [order.index(dim) for dim in range(given.dim())]
    return given.permute(order).contiguous().permute(back)


def _values(rng: random.Random, given: torch.Tensor) -> Any:
    if given.numel() == 0:
        return given
    changed = given.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    places = [rng.randrange(flat.numel()) for _ in range(rng.choice((1, 1, 2, 5)))]
    if given.dtype.is_floating_point:
        for place in places:
            flat[place] = torch.tensor(rng.choice(NUMBERS), dtype=torch.float64).to(given.dtype)
        return changed
    if given.dtype == torch.bool:
        for place in places:
            flat[place] = rng.random() < 0.5
        return changed
    if rng.random() < 0.2:
        return torch.randint_like(given, 0, rng.choice((1, 3, 100)))
    limits = torch.iinfo(given.dtype)
    largest = int(flat.max())
    near = (largest + 1, largest, largest - 1, -1, 0, given.numel(), given.numel() - 1, -100)
    for place in places:
        number = rng.choice(near) if rng.random() < 0.7 else rng.choice(INTEGERS)
        flat[place] = min(max(number, limits.min), limits.max)
    return changed


_EMPTY = ((0,), (0, 3), (3, 0), (0, 0, 0), ())
_TENSOR_CHANGES = (
    *(_resized,) * 6,
    *(_other_rank,) * 3,
    *(_permuted,) * 2,
    *(lambda rng, given: given.to(rng.choice(DTYPES)),) * 3,
    *(_values,) * 4,
    *(lambda rng, given: None,) * 2,
    _expanded,
    strided,
    lambda rng, given: given.to("meta"),
    lambda rng, given: given.new_zeros(rng.choice(_EMPTY)),
)


def other(rng: random.Random, given: Any) -> Any:
    """Return something else in place of an argument that is no tensor."""
    if given is None:
        return torch.randn([rng.choice((0, 1, 2, 5, 8)) for _ in range(rng.randrange(4))]).to(
            rng.choice(DTYPES)
        )
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        near = (given - 1, given + 1, 2 * given, given // 2)
        return rng.choice(near) if rng.random() < 0.4 else rng.choice(INTEGERS)
    if isinstance(given, (list, tuple)):
        return _listed(rng, list(given))
    others = {float: NUMBERS, str: STRINGS, torch.dtype: CODES}
    return rng.choice(others[type(given)]) if type(given) in others else given


def _listed(rng: random.Random, given: list[Any]) -> list[Any]:
    kind = rng.randrange(4)
    if kind == 0 and given:
        return given[:-1]
    if kind == 1:
        return [*given, given[-1] if given else True]
    if kind == 2 or not given:
        return []
    place = rng.randrange(len(given))
    given[place] = other(rng, given[place])
    return given
