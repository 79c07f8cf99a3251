"""Attention scores that are not computed while code only scales, masks and normalises them.

The product of queries and keys gives a ``DeferredScores``. It answers for its shape and dtype, and
follows what attention does to scores (``score_operations.py``); its product with the values is then
one call of the fused op (``attention_plan.py``). It is no tensor: torch's functions and methods
come to ``dispatch`` by ``__torch_function__``, also from modules such as ``nn.Dropout``.

What a plan cannot express computes the scores by exactly the calls that the code made, in the grad
mode and autocast of that time, and from then on the code has torch's tensors with the bits of
stock. A call that needs the numbers of scores computes all that are made of the same product,
because code may write to any of them from then on.

Nothing is deferred outside a ``Scope``, which a patched forward opens. It looks for scores that
outlive the forward: they would keep queries and keys alive.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fusedops._core import dtypes
from fusedops.integrations.hf.rules.attention_plan import AttentionPlan


class Scope:
    """The time in which one forward may defer scores.

    Attributes:
        num_products: how many scores were deferred.
        num_fused: how many calls of the op replaced them.
        obstacle: the first reason why scores were computed after all.
    """

    def __init__(self) -> None:
        self.num_products = 0
        self.num_fused = 0
        self.obstacle: str | None = None
        self._scores: list[weakref.ref[DeferredScores]] = []
        self._numbers: dict[int, tuple[torch.Tensor, float]] = {}

    def __enter__(self) -> Scope:
        self._outer = _ACTIVE.scope
        _ACTIVE.scope = self
        return self

    def __exit__(self, *_: object) -> None:
        _ACTIVE.scope = self._outer
        self._numbers.clear()

    def add(self, scores: DeferredScores) -> None:
        """Register scores of this forward."""
        self._scores.append(weakref.ref(scores))

    def live(self) -> list[DeferredScores]:
        """Return the scores that something refers to, in the order in which they were made."""
        return [scores for ref in self._scores if (scores := ref()) is not None]

    def fill(self, tensor: torch.Tensor, number: float) -> None:
        """Remember that all elements of a tensor are a number, which saves a synchronisation."""
        self._numbers[id(tensor)] = (tensor, number)

    def number(self, value: Any) -> float | None:
        """Return the number that a number or a tensor of one element is, ``None`` if not known."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, torch.Tensor) or value.dim() != 0 or value.requires_grad:
            return None
        filled = self.filled(value)
        if filled is None and value.is_cpu and type(value) is torch.Tensor:
            return float(value.item())
        return filled

    def filled(self, tensor: torch.Tensor) -> float | None:
        """Return the number that all elements of a tensor are, if ``fill`` was called with it."""
        entry = self._numbers.get(id(tensor))
        if entry is None or entry[0] is not tensor or tensor.is_inference() or tensor._version:
            return None
        return entry[1]


class _Active(threading.local):
    scope: Scope | None = None


_ACTIVE = _Active()


def active_scope() -> Scope | None:
    """Return the scope of the forward that runs in this thread, if it may defer scores."""
    return _ACTIVE.scope


class _Context(NamedTuple):
    """What a call of torch depends on, apart from its arguments."""

    has_grad: bool
    autocast: torch.dtype | None

    @contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        """Run the body in this context."""
        with torch.set_grad_enabled(self.has_grad):
            if dtypes.autocast_dtype(device) == self.autocast:
                yield
                return
            enabled = self.autocast is not None
            with torch.autocast(device.type, self.autocast, enabled=enabled):
                yield


def _context(device: torch.device) -> _Context:
    return _Context(torch.is_grad_enabled(), dtypes.autocast_dtype(device))


class Call(NamedTuple):
    """A call by which torch computes scores."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class DeferredScores:
    """Scores or weights ``[*lead, Sq, Sk]`` that are computed when their numbers are needed."""

    __slots__ = ("__weakref__", "_call", "_context", "_plan", "_scope", "_value", "dtype", "source")

    def __init__(
        self,
        call: Call,
        plan: AttentionPlan,
        dtype: torch.dtype,
        scope: Scope,
        source: object | None = None,
    ) -> None:
        self._call: Call | None = call
        self._plan: AttentionPlan | None = plan
        self._value: torch.Tensor | None = None
        self._scope = scope
        self._context = _context(plan.query.tensor.device)
        self.dtype = dtype
        # The same for all that are made of one product
        self.source = object() if source is None else source
        scope.add(self)

    @property
    def shape(self) -> torch.Size:
        """The shape that the scores have."""
        return torch.Size(self._plan.shape) if self._plan is not None else self.value().shape

    @property
    def device(self) -> torch.device:
        """The device of the queries."""
        return self._like().device

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def _like(self) -> torch.Tensor:
        """Return a tensor of the same device and layout."""
        return self._plan.query.tensor if self._plan is not None else self.value()

    def value(self) -> torch.Tensor:
        """Return the scores, computed by the calls that the code made."""
        if self._value is None:
            assert self._call is not None and self._plan is not None
            self._plan.check_unchanged()
            function, args, kwargs = self._call
            with self._context.restored(self.device):
                self._value = function(*_values(args), **_values(kwargs))
            self._call = self._plan = None
        return self._value

    def plan(self) -> AttentionPlan | None:
        """Return the plan, ``None`` if the scores are computed or the context is another now."""
        if self._plan is None or self._context != _context(self.device):
            return None
        return self._plan

    def derived(
        self, call: Call, plan: AttentionPlan, dtype: torch.dtype | None = None
    ) -> DeferredScores:
        """Return the scores that a call makes of these."""
        return DeferredScores(call, plan, dtype or self.dtype, self._scope, self.source)

    def relatives(self) -> list[DeferredScores]:
        """Return the live scores that are made of the same product, these included."""
        return [scores for scores in self._scope.live() if scores.source is self.source]

    def written(self, handler: Callable[[Call], Any], call: Call) -> DeferredScores | None:
        """Follow a call that writes to these scores, ``None`` if that cannot be deferred.

        Args:
            handler: follows the call on other scores.
            call: with these as its first argument.
        """
        uses = (other._call for other in self.relatives())
        plan, own = self.plan(), self._call
        if plan is None or own is None or own.function in _ALIASES:
            return None
        if any(argument is self for use in uses if use is not None for argument in use.args):
            return None
        before = self.derived(own, plan)
        moved = Call(call.function, (before, *call.args[1:]), call.kwargs)
        result = handler(moved)
        if not isinstance(result, DeferredScores) or result.dtype != self.dtype:
            return None
        self._call, self._plan = moved, result._plan
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _OF_DEVICE:
            return getattr(self._like(), name)
        attribute = None if name.startswith("__") else getattr(torch.Tensor, name, None)
        if callable(attribute):
            return functools.partial(_call_method, attribute, self)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(computed_value(self, name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow a call of a function of torch, or compute the scores for it."""
        return dispatch(func, args, kwargs or {})

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return repr(computed_value(self, "repr"))


# What queries and scores have in common.
_OF_DEVICE = {
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_mps",
    "is_xpu",
    "layout",
    "is_sparse",
    "is_nested",
}
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "bool", "float", "int"),
    *("getitem", "setitem", "contains", "iter"),
)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def apply(self: DeferredScores, *args: Any) -> Any:
        return dispatch(method, (self, *args), {})

    return apply


for _name in _OPERATORS:
    for _prefix in ("__", "__r", "__i"):
        if hasattr(torch.Tensor, f"{_prefix}{_name}__"):
            setattr(DeferredScores, f"{_prefix}{_name}__", _operator(f"{_prefix}{_name}__"))
DeferredScores.__hash__ = object.__hash__  # type: ignore[method-assign]


def _call_method(method: Any, scores: DeferredScores, *args: Any, **kwargs: Any) -> Any:
    return dispatch(method, (scores, *args), kwargs)


def dispatch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Follow a call of torch with deferred scores, or compute them for it."""
    handler = HANDLERS.get(function)
    if handler is not None and _ACTIVE.scope is not None:
        result = handler(Call(function, args, kwargs))
        if result is not None:
            return result
    return computed(function, args, kwargs)


def computed(function: Any, args: Any, kwargs: Any, use: str | None = None) -> Any:
    """Call a function with the numbers of the scores among its arguments.

    Args:
        function: is called.
        args: its arguments.
        kwargs: its arguments by name.
        use: what needs the numbers, for the report; the function's name by default.
    """
    name: str = use or getattr(function, "__name__", "") or str(function)
    for scores in _deferred(args, kwargs):
        _settle(scores, name)
    return function(*_values(args), **_values(kwargs))


def computed_value(scores: DeferredScores, use: str) -> torch.Tensor:
    """Return scores that a call needs, computed.

    Args:
        scores: of the call.
        use: what needs them, for the report.
    """
    _settle(scores, use)
    return scores.value()


def _settle(scores: DeferredScores, use: str) -> None:
    """Compute scores and all that are made of the same product: code may write to them now."""
    if scores._scope.obstacle is None and scores._value is None:
        scores._scope.obstacle = f"its code uses the scores in {use}"
    for relative in scores.relatives():
        relative.value()


def _deferred(*values: Any) -> Iterator[DeferredScores]:
    for value in values:
        if isinstance(value, DeferredScores):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _deferred(*value)
        elif isinstance(value, dict):
            yield from _deferred(*value.values())


def replaced_scores(result: Any, replacement: Callable[[DeferredScores], Any]) -> Any:
    """Return a result of a forward with something else in the place of deferred scores."""
    if isinstance(result, DeferredScores):
        return replacement(result)
    if not any(True for _ in _deferred(result)):
        return result
    if isinstance(result, dict):
        changed = {key: replaced_scores(value, replacement) for key, value in result.items()}
        return type(result)(**changed) if type(result) is not dict else changed
    values = [replaced_scores(value, replacement) for value in result]
    return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)


def _values(value: Any) -> Any:
    return replaced_scores(value, DeferredScores.value)


Handler = Callable[[Call], Any]
HANDLERS: dict[Any, Handler] = {}
_ALIASES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}


def follows(*functions: Any) -> Callable[[Handler], Handler]:
    """Register what follows calls of some functions; its ``None`` computes the scores."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register
