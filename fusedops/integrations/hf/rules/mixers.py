"""Recurrent mixers: convolution, gated delta rule and state-space layers of hybrid models.

Their forward calls functions of its file, such as ``causal_conv1d_fn`` and ``mamba2_chunk_scan``,
of which transformers has slow ones in plain torch. The patched class has the same code, for which
these global names stand for fused functions (``mixer_functions.py``). The file's function runs
where its code has been changed, where transformers calls the kernel of another package in its
place, and for arguments that the op does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf import known_code
from fusedops.integrations.hf.original_code import (
    global_names,
    name_of,
    replaced,
    watched_function,
    with_others,
)
from fusedops.integrations.hf.rules import mixer_functions, state_space_functions
from fusedops.integrations.hf.rules.activations import watched_activation
from fusedops.integrations.hf.rules.mixer_functions import ACTIVATIONS, WIDTHS, MixerFunction
from fusedops.integrations.hf.rules.rule import FusionPlan, PatchRule, Refusal, subclass

FUNCTIONS = mixer_functions.FUNCTIONS | state_space_functions.FUNCTIONS
_CONVOLUTION = "causal_conv1d"
# Arguments that say where packed sequences end: transformers ignores or (5.24) refuses them.
_ENDS = ("cu_seqlens", "seq_idx")


def mixer_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class whose forward calls functions of mixers, or ``None``.

    Raises:
        UnsupportedError: other code wraps the forward.
    """
    function: Any = inspect.unwrap(original.forward)
    code = getattr(function, "__code__", None)
    if code is None or set(FUNCTIONS).isdisjoint(code.co_names):
        return None
    names = set(FUNCTIONS) & global_names(code)
    calls = [_Call(function.__globals__, name) for name in sorted(names)]
    others = {call.name: call.fused for call in calls if call.unknown is None}
    forward = with_others(original.forward, others, __name__)
    if forward is None:
        raise UnsupportedError(f"{original.__name__}.forward cannot run with other functions")

    def plan(module: Any) -> FusionPlan | Refusal:
        obstacles = {call: call.obstacle() or _unserved(call.op, module) for call in calls}
        reasons = dict.fromkeys(filter(None, obstacles.values()))
        ops = dict.fromkeys(call.op for call, obstacle in obstacles.items() if obstacle is None)
        note = "; ".join(reasons) or "functions that its code calls"
        return FusionPlan(tuple(ops), note=note) if ops else Refusal(note)

    patched = subclass(original, forward=forward)
    return PatchRule(original, patched, "O2", plan, copies_code=True)


class _Call:
    """A function that a forward calls by a global name, and what stands for it."""

    def __init__(self, namespace: dict[str, Any], name: str) -> None:
        self.name, self.op = name, FUNCTIONS[name].op
        self.unknown = _unknown(namespace.get(name), name)
        if self.unknown is None:
            self._watched = watched_function(namespace["__name__"], name)
            self._activation = watched_activation(namespace, "silu")
            self.fused = _fused(namespace, name, FUNCTIONS[name], self.obstacle)

    def obstacle(self) -> str | None:
        """Return why the file's function must run now, or ``None``."""
        return self.unknown or replaced(self._watched) or replaced(self._activation)


def _unknown(function: Any, name: str) -> str | None:
    """Return why a function is not the one that ours was written for, or ``None``."""
    if not inspect.isfunction(function):
        return f"{name} is a {type(function).__name__}"
    if known_code.known_as(function, "mixers") is None:
        digest = known_code.digest(function)
        return f"this file has another {name}: the digest of its code, {digest}, is not known"
    # Transformers' decorator calls the kernel of a package that is installed in its place.
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    implementation = dict(cells).get("implementation")
    called = None if implementation is None else implementation.cell_contents
    if called not in (None, inspect.unwrap(function)):
        return f"{name} calls {name_of(called)}"
    return None


def _fused(
    namespace: dict[str, Any],
    name: str,
    function: MixerFunction,
    obstacle: Callable[[], str | None],
) -> Callable[..., Any]:
    """Return a function with the fused op for arguments that it takes, else the file's own."""

    @wraps(namespace[name])
    def call(*args: Any, **options: Any) -> Any:
        is_packed = any(options.get(ends) is not None for ends in _ENDS)
        result = None if is_packed or obstacle() else function.compute(*args, **options)
        return namespace[name](*args, **options) if result is None else result

    return call


def _unserved(op: str, module: Any) -> str | None:
    """Return why each call of a module keeps the file's function, or ``None``."""
    if op != _CONVOLUTION:
        return None
    activation, width = (getattr(module, name, None) for name in ("activation", "conv_kernel_size"))
    if activation not in ACTIVATIONS:
        return f"its activation is {activation!r}"
    if width is not None and width not in WIDTHS:
        return f"its convolution has the width {width}"
    return None
