"""The wording and the type of every input error.

Each message names the op, the argument, what was wanted and what came. Checks run in the public
function, before anything is computed or written.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch


class UnsupportedError(RuntimeError):
    """What was asked explicitly cannot be done here; the message says why and what can."""


def fail(op: str, argument: str, wanted: str, got: object) -> NoReturn:
    """Raise the ``ValueError`` that every wrong value gets."""
    raise ValueError(f"{op}: {argument} must be {wanted}, got {got}")


def tensor(op: str, argument: str, value: Any, *, floating: bool = True) -> None:
    """Raise unless ``value`` is a tensor (of a floating dtype)."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
    if floating and not value.dtype.is_floating_point:
        raise TypeError(
            f"{op}: {argument} must have a floating dtype, got {_short(value.dtype)}; "
            f"cast it first, for example with {argument}.float()"
        )


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


def alike(value: Any, reference: torch.Tensor) -> bool:
    """Whether a tensor has the dtype and the device of ``reference``.

    Most arguments do. Asking this before other checks costs a small call half a microsecond for
    each argument instead of one and a half.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == reference.dtype
        and value.device == reference.device
    )


def parameter(op: str, argument: str, value: Any, owner: str, reference: torch.Tensor) -> None:
    """Raise unless ``value`` may stand as a weight or bias beside ``reference``.

    Its dtype is that of ``reference``, or float32 beside a half-precision ``reference``.
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


def shape(op: str, argument: str, value: torch.Tensor, wanted: Sequence[Any], why: str) -> None:
    """Raise unless ``value`` has exactly the shape ``wanted``; ``why`` says where it comes from."""
    if value.shape != wanted and tuple(value.shape) != tuple(wanted):
        fail(op, argument, f"of shape {_shape(wanted)} ({why})", _shape(value.shape))


def choice(op: str, argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``; the message suggests the nearest."""
    if isinstance(value, str) and value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    fail(op, argument, f"one of {', '.join(map(repr, choices))}", f"{value!r}{hint}")


def probability(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, 1]."""
    number(op, argument, value)
    if not 0.0 <= value <= 1.0:
        fail(op, argument, "a probability in [0, 1]", value)


def number(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is a real number."""
    if isinstance(value, float):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {argument} must be a float, got {type(value).__name__}")


def integer(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is an integer (also one of a graph whose sizes are symbols)."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {argument} must be an int, got {type(value).__name__}")


def boolean(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {argument} must be a bool, got {type(value).__name__}")


def sum_dtype(
    op: str, argument: str, value: torch.Tensor, owner: str, dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of a tensor's sum with ``owner``; raise where torch does not add the two."""
    if value.dtype == dtype:
        return dtype
    try:
        return torch.promote_types(value.dtype, dtype)
    except RuntimeError:  # of two that differ, one has eight bits
        raise TypeError(
            f"{op}: {argument} must have a dtype that torch adds to that of {owner}, "
            f"{_short(dtype)}, got {_short(value.dtype)}; cast it first"
        ) from None


def _shape(sizes: Iterable[Any]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
