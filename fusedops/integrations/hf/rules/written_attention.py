"""Attention that a module's own code writes out: matmul, scale, mask, softmax, dropout, matmul.

The methods that contain such products keep their code, for which ``torch`` is a module whose
products of matrices may be deferred (``deferred_scores.py``). All else is torch's: it
finds the deferred scores by ``__torch_function__``, wherever the code hands them. The copies defer
nothing by themselves. The patched class's ``forward`` opens a scope for one call, so that its
methods are torch's whenever anything else calls them: torch.compile, export, tracing, and calls
that are asked for attention weights run the original.

The names that the code reads say which classes are asked. Whether the scores serve them is known
from the calls: a class of which no call has run the op by its third one keeps its own forward from
then on, and the report gives the first operation that needed the numbers of the scores. A class of
transformers that returns its weights unasked returns ``None`` in their place; another class gets
its weights, computed from the same scores and dropout mask, and its own forward from then on.

Operators (``query @ key``) and methods (``alibi.baddbmm``) of tensors cannot be seen this way:
classes that use only these have no rule.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.class_table import weakly_cached
from fusedops.integrations.hf.renamed_arguments import only_renames
from fusedops.integrations.hf.rules import matrix_products
from fusedops.integrations.hf.rules.deferred_scores import (
    DeferredScores,
    Scope,
    active_scope,
    replaced_scores,
)
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    global_hooks,
    hooks_obstacle,
    subclass,
)
from fusedops.integrations.hf.rules.score_operations import multiply

_EAGER = "eager_attention_forward"
_PRODUCTS = {function.__name__: function for function in matrix_products.FUNCTIONS}
_SOFTMAX = {"softmax", "Softmax"}
_ASKS_FOR_WEIGHTS = ("output_attentions", "need_weights")
_NO_OP_BEFORE = 3  # calls after which a class that never ran the op keeps its forward
_in_backward: Any = torch._C._current_graph_task_id


@dataclass
class Outcome:
    """What the calls of a patched class have shown.

    Attributes:
        num_fused: calls that ran the op.
        num_unfused: calls that deferred scores and computed all of them after all.
        reason: the operation of the last of these that needed their numbers.
        obstacle: why the class keeps its own forward from now on, or ``None``.
        fused: instances whose last forward deferred scores. Checkpointing runs a forward once more
            in the backward: it must then do the same, whatever other calls have shown since.
    """

    num_fused: int = 0
    num_unfused: int = 0
    reason: str | None = None
    obstacle: str | None = None
    fused: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def add(self, scope: Scope) -> None:
        """Take the result of a call into account."""
        if scope.num_fused:
            self.num_fused += 1
        elif scope.num_products:
            self.num_unfused += 1
            self.reason = scope.obstacle or "its code uses the scores in no product with values"
            if not self.num_fused and self.num_unfused >= _NO_OP_BEFORE:
                self.obstacle = self.reason


def written_attention_rule(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for a class whose methods write attention out, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
    """
    forward = original.forward
    methods = original_code.own_methods(original)
    if not isinstance(forward, FunctionType) or not _takes(forward):
        return None
    if not _writes_attention(methods, forward):
        return None
    names = [name for name, method in methods.items() if _has_products(method) and _takes(method)]
    deferring = {name: _with_deferral(methods[name]) for name in names}
    run = deferring.get("forward", forward)
    if run is forward and _reads(forward, _EAGER):
        run = _with_deferral(forward)
    outcome = Outcome()
    patched_methods = {**deferring, "forward": _forward(original, run, outcome)}
    return PatchRule(
        original,
        subclass(original, _Writer, module_name, outcome=outcome, **patched_methods),
        ("attention",),
        "O3",
        obstacle=partial(_obstacle, outcome=outcome, asks_registry=_reads(forward, _EAGER)),
        note=partial(_note, outcome=outcome),
        methods=("forward", *(name for name in names if name != "forward")),
        copies_code=True,
    )


class _Writer(nn.Module):
    """What all patched classes of this kind are derived from."""

    outcome: Outcome


def outcome_of(module: nn.Module) -> Outcome | None:
    """Return what the calls of a patched module's class have shown, ``None`` for other classes."""
    return module.outcome if isinstance(module, _Writer) else None


def _forward(
    original: type[nn.Module], deferring: Callable[..., Any], outcome: Outcome
) -> Callable[..., Any]:
    """Return the forward of a patched class.

    Args:
        original: the class.
        deferring: its forward, whose products may be deferred.
        outcome: of the patched class.
    """
    stock: Any = original.forward
    flags = _flags(stock)
    drops = original.__module__.partition(".")[0] == "transformers" and (
        bool(flags) or _is_recorded(original)
    )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _may_defer(self, outcome, flags, args, kwargs):
            return stock(self, *args, **kwargs)
        with Scope() as scope:
            result = deferring(self, *args, **kwargs)

            def weights(scores: DeferredScores) -> torch.Tensor | None:
                if drops:
                    return None
                outcome.obstacle = "it returns its attention weights"
                return scores.value()

            result = replaced_scores(result, weights)
        for scores in scope.live():
            scores.value()
            outcome.obstacle = "its code keeps its scores"
        outcome.add(scope)
        return result

    forward.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return forward


def _may_defer(
    module: nn.Module, outcome: Outcome, flags: dict[str, int], args: Any, kwargs: Any
) -> bool:
    """Return whether a call may defer scores."""
    is_repeated = module in outcome.fused and _in_backward() != -1
    may = (
        (outcome.obstacle is None or is_repeated)
        and not any(
            kwargs.get(name) or (place < len(args) and args[place]) for name, place in flags.items()
        )
        and not torch.jit.is_tracing()
        and _watched(module) is None
        and _opaque_child(module) is None
    )
    if may:
        outcome.fused.add(module)
    elif _in_backward() == -1:
        outcome.fused.discard(module)
    return may


def _flags(forward: FunctionType) -> dict[str, int]:
    """Return the arguments that ask for weights, each with its place behind ``self``."""
    names = list(inspect.signature(forward).parameters)[1:]
    return {name: names.index(name) for name in _ASKS_FOR_WEIGHTS if name in names}


def _is_recorded(cls: type[nn.Module]) -> bool:
    """Return whether models record the weights of a class by hooks, so that its caller does not."""
    for value in vars(sys.modules[cls.__module__]).values():
        recorded = getattr(value, "_can_record_outputs", None) if isinstance(value, type) else None
        for targets in (recorded or {}).values():
            for target in targets if isinstance(targets, (list, tuple)) else [targets]:
                if getattr(target, "target_class", target) is cls:
                    return True
    return False


def _watched(module: nn.Module) -> str | None:
    """Return which hooks would get deferred scores, or a result without weights."""
    watched = global_hooks() or hooks_obstacle("the module", module)
    if watched is not None:
        return f"it gives its attention weights away: {watched}"
    for name, child in module._modules.items():
        if child is not None and not child._parameters:
            watched = hooks_obstacle(name, child)
            if watched is not None:
                return watched
    return None


def _opaque_child(module: nn.Module) -> str | None:
    """Return which child may hand scores to a function that torch cannot defer."""
    for name, child in module._modules.items():
        cls: Any = type(child)
        if child is not None and _calls_function(cls):
            return f"{name} calls a function that takes tensors only"
    return None


@weakly_cached
def _calls_function(cls: Any) -> bool:
    """Return whether a class's own forward applies an ``autograd.Function``."""
    forwards = (vars(base).get("forward") for base in cls.__mro__)
    return any("apply" in _names(method) for method in forwards)


def _names(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return set() if code is None else set(original_code.names_in(code))


def _writes_attention(methods: dict[str, FunctionType], forward: FunctionType) -> bool:
    """Return whether a method, or the eager function of a file, writes attention out."""
    functions: list[Any] = list(methods.values())
    if _reads(forward, _EAGER):
        functions.append(inspect.unwrap(forward).__globals__.get(_EAGER))
    return any(
        isinstance(function, FunctionType)
        and bool(_SOFTMAX & _names(function))
        and _num_products(function) >= 2
        for function in functions
    )


def _takes(function: FunctionType) -> bool:
    return len(inspect.signature(function).parameters) > 1


def _reads(function: FunctionType, name: str) -> bool:
    return only_renames(function) and name in inspect.unwrap(function).__code__.co_names


def _has_products(function: FunctionType) -> bool:
    return _num_products(function) > 0


@weakly_cached
def _num_products(function: FunctionType) -> int:
    """Return how many products of matrices are in code that calls torch's functions for some.

    Code under somebody's wrapper counts as none.
    """
    if not only_renames(function):
        return 0
    code: Any = inspect.unwrap(function)
    steps = list(dis.get_instructions(code))
    names = Counter(step.argval for step in steps)
    operators = sum(
        step.opname == "BINARY_MATRIX_MULTIPLY"  # until Python 3.10
        or (step.opname == "BINARY_OP" and step.argrepr == "@")
        for step in steps
    )
    values = [code.__globals__.get(name) for name in code.__code__.co_names]
    if not any(value is known for value in values for known in (torch, *_PRODUCTS.values())):
        return 0
    return operators + sum(names[name] for name in _PRODUCTS)


def _with_deferral(function: FunctionType) -> FunctionType:
    """Return a function of the same code whose products may be deferred."""
    code: Any = inspect.unwrap(function)
    theirs, others = code.__globals__, {}
    for name in original_code.global_names(code.__code__) & theirs.keys():
        value = others[name] = theirs[name]
        if value is torch:
            others[name] = _copy_of_torch()
        elif name == _EAGER and isinstance(value, FunctionType) and _has_products(value):
            others[name] = _with_deferral(value)
        elif isinstance(value, _CALLABLE):
            others[name] = _deferred_function(value)
    others = {name: other for name, other in others.items() if other is not theirs[name]}
    return original_code.with_others(function, others, __name__) or function


def _deferred_function(value: Any) -> Any:
    """Return what stands for a global of the code: functions that take tensors only get these."""
    if isinstance(value, type):
        return _Applied(value) if issubclass(value, torch.autograd.Function) else value
    if value in _DEFERRED:
        return _DEFERRED[value]
    is_opaque = isinstance(value, torch.jit.ScriptFunction) or "apply" in _names(value)
    return _taking_tensors(value) if is_opaque else value


def _taking_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the deferred scores among its arguments first."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = replaced_scores(args, DeferredScores.value)
        return function(*args, **replaced_scores(kwargs, DeferredScores.value))

    return call


class _Applied:
    """Stands for a class of ``autograd.Function`` in code that defers scores."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.apply = _taking_tensors(function.apply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _deferring(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product of torch's that is deferred in a scope."""

    @functools.wraps(function)
    def product(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or active_scope() is None:
            return function(*args, **kwargs)
        return multiply(function, args, kwargs)

    return product


def _filling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's that makes a tensor of one number, which is remembered."""

    @functools.wraps(function)
    def fill(*args: Any, **kwargs: Any) -> Any:
        tensor = function(*args, **kwargs)
        scope = None if torch.compiler.is_compiling() else active_scope()
        if scope is not None:
            number = 0.0 if function is torch.zeros else (args[0] if args else None)
            if isinstance(number, (int, float)):
                scope.fill(tensor, float(number))
        return tensor

    return fill


_CALLABLE = (FunctionType, BuiltinFunctionType, torch.jit.ScriptFunction, type)
_DEFERRED: dict[Any, Any] = {function: _deferring(function) for function in _PRODUCTS.values()}
_DEFERRED |= {
    function: _filling(function) for function in (torch.tensor, torch.scalar_tensor, torch.zeros)
}


@functools.cache
def _copy_of_torch() -> ModuleType:
    """Return a copy of ``torch`` whose products may be deferred."""
    others = {function.__name__: deferred for function, deferred in _DEFERRED.items()}
    return original_code.copy_of_module(torch, __name__, others)


def _obstacle(module: Any, outcome: Outcome, *, asks_registry: bool) -> str | None:
    """Return why the own code of a module runs, or ``None``."""
    if asks_registry and module.config._attn_implementation != "eager":
        return f"its attention is configured as {module.config._attn_implementation!r}"
    return outcome.obstacle or _watched(module) or _opaque_child(module)


def _note(module: Any, outcome: Outcome) -> str:
    if outcome.num_fused:
        return "written out in its own code"
    if outcome.reason is not None:
        return f"written out in its own code, not fused so far: {outcome.reason}"
    return "written out in its own code; its first call shows whether the op serves it"
