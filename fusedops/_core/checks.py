"""The wording and the type of every input error.

Each message names the op, the argument, what was expected and what came. Checks run in the public
function, before anything is computed or written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from fusedops._core.spelling import nearest

# What kernels and references compute with. Torch calls float8 floating too, and can only cast it.
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STRIDED = torch.strided
# Called with the op, the name of an argument and its value; raises unless the value is right.
Rule: TypeAlias = Callable[[str, str, Any], None]


class UnsupportedError(RuntimeError):
    """What was asked explicitly cannot be done here; the message says why and what can."""


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the ``ValueError`` that every wrong value gets."""
    raise ValueError(f"{op}: {argument} must be {expected}, got {got}")


def fail_type(op: str, argument: str, expected: str, value: object) -> NoReturn:
    """Raise the ``TypeError`` for a value of another type."""
    raise TypeError(f"{op}: {argument} must be {expected}, got {type_name(value)}")


def tensor(op: str, argument: str, value: Any, *, floating: bool = True) -> None:
    """Raise unless ``value`` is a dense tensor (of a floating dtype that is computed with)."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor, got {type_name(value)}")
    if value.layout is not _STRIDED or value.is_nested:
        _refuse_layout(op, argument, value)
    if floating and value.dtype not in FLOATING:
        raise TypeError(
            f"{op}: {argument} must have a floating dtype ({_names(FLOATING)}), "
            f"got {_short(value.dtype)}; cast it first, for example with {argument}.float()"
        )


def index_tensor(
    op: str, argument: str, value: Any, *, dtypes: Sequence[torch.dtype] = (torch.int32,)
) -> None:
    """Raise unless ``value`` is a dense tensor of one of the dtypes."""
    tensor(op, argument, value, floating=False)
    if value.dtype not in dtypes:
        raise TypeError(f"{op}: {argument} must be {_names(dtypes)}, got {_short(value.dtype)}")


def indices(op: str, argument: str, value: torch.Tensor, size: int, expected: str) -> None:
    """Raise unless all values that can be read are in ``[0, size)``."""
    if readable(value) and value.numel():
        low, high = (int(bound) for bound in value.aminmax())
        if low < 0 or high >= size:
            fail(op, argument, expected, low if low < 0 else high)


def like(
    op: str, argument: str, value: Any, owner: str, reference: torch.Tensor, *, dtype: bool = False
) -> None:
    """Raise unless ``value`` is a floating tensor on the device (and of the dtype) of another."""
    tensor(op, argument, value)
    if value.device != reference.device:
        fail(op, argument, f"on {reference.device}, the device of {owner}", value.device)
    if dtype and value.dtype != reference.dtype:
        raise TypeError(
            f"{op}: {argument} must have the dtype of {owner}, {_short(reference.dtype)}, "
            f"got {_short(value.dtype)}"
        )


def alike(value: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``value`` is a dense tensor of this dtype on this device.

    Most arguments are. Asking this before other checks costs a small call half a microsecond for
    each argument instead of one and a half.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == dtype
        and value.device == device
        and value.layout is _STRIDED
        and not value.is_nested
    )


def parameter(op: str, argument: str, value: Any, owner: str, reference: torch.Tensor) -> None:
    """Raise unless ``value`` can be a weight or bias of an op on ``reference``.

    Its dtype is that of ``reference``; float32 is allowed too if ``reference`` has half precision.
    """
    like(op, argument, value, owner, reference)
    half = reference.dtype in (torch.bfloat16, torch.float16)
    if value.dtype != reference.dtype and not (half and value.dtype == torch.float32):
        also = " or float32" if half else ""
        raise TypeError(
            f"{op}: {argument} must have the dtype of {owner}, {_short(reference.dtype)}{also}, "
            f"got {_short(value.dtype)}"
        )


def readable(value: torch.Tensor) -> bool:
    """Whether the values of a tensor can be looked at here and now.

    Not while a graph is made, nor those on a GPU, for which the host would wait, nor those of a
    tensor that has none (a fake one) or keeps them inside (a wrapper).
    """
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        return False
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def shape(op: str, argument: str, value: torch.Tensor, expected: Sequence[Any], why: str) -> None:
    """Raise unless ``value`` has the shape ``expected``; ``why`` says where that comes from."""
    if value.shape != expected and tuple(value.shape) != tuple(expected):
        fail(op, argument, f"of shape {_shape(expected)} ({why})", _shape(value.shape))


def sizes(op: str, argument: str, value: Any) -> tuple[Any, ...]:
    """Return ``value`` as a tuple; raise unless it is a tuple or list of integers."""
    if not isinstance(value, (tuple, list)):
        expected = f"{argument} must be a tuple of ints, such as (64,)"
        raise TypeError(f"{op}: {expected}, got {shown(value)}")
    for size in value:
        if type(size) is not int:
            _size(op, argument, size)
    return tuple(value)


def _size(op: str, argument: str, value: Any) -> None:
    if isinstance(value, torch.SymInt):
        return
    if not isinstance(value, (bool, torch.Tensor)):
        with contextlib.suppress(TypeError):
            operator.index(value)  # an integer of numpy has one, as torch's own functions take it
            return
    raise TypeError(f"{op}: {argument} must be a tuple of ints, got {shown(value)} in it")


def choice(op: str, argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``; the message suggests the nearest."""
    if isinstance(value, str) and value in choices:
        return
    near = nearest(value, choices) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near else ""
    fail(op, argument, f"one of {', '.join(map(repr, choices))}", f"{shown(value)}{hint}")


def probability(op: str, argument: str, value: Any) -> None:
    if not isinstance(value, float):
        number(op, argument, value)
    if not 0.0 <= value <= 1.0:
        fail(op, argument, "a probability in [0, 1]", value)


def number(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is a real number (also one of a graph whose sizes are symbols)."""
    if isinstance(value, float):
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{op}: {argument} must be a float, got {type_name(value)}")
    if isinstance(value, int) and not -(2**1023) < value < 2**1023:
        fail(op, argument, "in the range of a float", f"an integer of {value.bit_length()} bits")


def finite(op: str, argument: str, value: Any, *, least: float | None = None) -> None:
    """Raise unless ``value`` is a number, neither NaN nor infinite, and at least ``least``."""
    number(op, argument, value)
    if isinstance(value, float) and not -math.inf < value < math.inf:
        fail(op, argument, "finite", value)
    if least is not None and value < least:
        fail(op, argument, f"at least {least}", value)


def positive(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number above 0."""
    number(op, argument, value)
    if not 0 < value < math.inf:
        fail(op, argument, "positive and finite", value)


def integer(op: str, argument: str, value: Any, *, least: int | None = None) -> None:
    """Raise unless ``value`` is an integer (also a symbol of a graph), and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {argument} must be an int, got {type_name(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        got = "a larger one" if value > 0 else "a smaller one"
        fail(op, argument, "an int of 64 bits, from -2**63 to 2**63 - 1", got)
    if least is not None and value < least:
        fail(op, argument, f"at least {least}", value)


def flag(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is ``True`` or ``False``, as torch's own functions do."""
    if value is True or value is False or isinstance(value, torch.SymBool):
        return
    raise TypeError(f"{op}: {argument} must be a bool, got {type_name(value)}")


def fields(op: str, config: Any, rules: Mapping[str, Rule]) -> None:
    """Raise unless the flags of a dataclass are bools and its other fields keep their rules.

    A flag is a field whose default is a bool. ``None`` is always right where it is the default.
    """
    for field in dataclasses.fields(config):
        if isinstance(field.default, bool):
            flag(op, field.name, getattr(config, field.name))
    for name, rule in rules.items():
        value = getattr(config, name)
        if value is not None or getattr(type(config), name, "") is not None:
            rule(op, name, value)


def group(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is ``None`` or a process group that this process belongs to."""
    if value is None:
        return
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{op}: {argument} must be None or a torch.distributed.ProcessGroup that this process "
            f"belongs to, got {shown(value)}"
        )


def module(op: str, value: Any) -> None:
    """Raise unless ``value``, the argument ``model``, is a module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type_name(value)}")


def type_name(value: Any) -> str:
    """Return the name of a value's type, with its module where that is not Python's."""
    kind = type(value)
    plain = kind.__module__ in ("builtins", "torch")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def shown(value: Any) -> str:
    """Return a value as a message shows it: short ones whole, others by their type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        large = isinstance(value, int) and not -(2**63) <= value < 2**63
        text = "a larger int" if large else repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return type_name(value)


def _refuse_layout(op: str, argument: str, value: torch.Tensor) -> NoReturn:
    got = "a nested tensor" if value.is_nested else f"layout {_short(value.layout)}"
    raise TypeError(f"{op}: {argument} must be a dense torch.Tensor (torch.strided), got {got}")


def _shape(sizes: Iterable[Any]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(_short, dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def _short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")
