"""What rules share about the residual stream: dropout, sum and the norm after it in one pass.

Models write ``norm(residual + dropout(branch))`` in many ways; the dropout may even sit at the end
of the branch's own forward (``deferred``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.renamed_arguments import with_names_of
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    PatchRule,
    Plan,
    Refusal,
    bypass_obstacle,
    copyable,
    global_hooks,
    rule_of,
    subclass,
)
from fusedops.integrations.hf.rules.torch_modules import LayerNorm
from fusedops.ops.add_layer_norm import add_layer_norm

_NORMS = (nn.LayerNorm, LayerNorm)
remember(nn.Dropout)

# What a forward calls torch's functions by, and these.
_TORCH = {"torch", "nn", "functional", "F", "linear", *dir(torch)}


def add_norm(
    branch: torch.Tensor, residual: torch.Tensor, norm: Any, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(residual + dropout(branch))`` and the sum, for a norm that may be bypassed."""
    return add_layer_norm(
        branch,
        residual,
        norm.normalized_shape,
        norm.weight,
        norm.bias,
        norm.eps,
        dropout_p=dropout_p,
    )


def norm_obstacle(name: str, norm: Any) -> str | None:
    """Return why ``add_norm`` must not do the work of ``norm``, or ``None``."""
    return bypass_obstacle(name, norm, _NORMS)


def dropout_obstacle(name: str, dropout: Any) -> str | None:
    """Return why the work of ``dropout`` must not be done without calling it, or ``None``."""
    return bypass_obstacle(name, dropout, (nn.Dropout,))


def probability(dropout: Any) -> float:
    """Return the probability with which an ``nn.Dropout`` drops now."""
    return dropout.p if dropout.training else 0.0


@contextmanager
def deferred(branch: Any, name: str, classes: Iterable[type]) -> Iterator[float]:
    """Let ``branch`` run without the dropout at its end; yield the probability left to do.

    Where somebody would see the difference (hooks on either), the dropout stays where it is and
    the probability is 0. The flag belongs to the module: two threads must not run one model in
    training at the same time.

    Args:
        branch: the module whose forward ends with ``self.<name>(...)``.
        name: the dropout's name in it.
        classes: the classes of branches for which that is known, before they are patched.
    """
    if not branch.training or deferral_obstacle(branch, name, classes) is not None:
        yield 0.0
        return
    dropout = getattr(branch, name)
    if not dropout.training or dropout.p == 0.0:
        yield 0.0
        return
    dropout.training = False
    try:
        yield dropout.p
    finally:
        dropout.training = True


def deferral_obstacle(branch: Any, name: str, classes: Iterable[type]) -> str | None:
    """Return why the dropout at the end of ``branch`` must stay there, or ``None``."""
    rule = rule_of(branch)
    known = {cls if rule is None or rule.original is not cls else rule.patched for cls in classes}
    return bypass_obstacle(type(branch).__name__, branch, known) or dropout_obstacle(
        name, getattr(branch, name)
    )


def deferral_note(branches: Iterable[tuple[Any, str]], classes: Iterable[type]) -> str | None:
    """Return which dropouts at the ends of branches are not fused, if they would have work."""
    reasons = [deferral_obstacle(branch, name, classes) for branch, name in branches]
    refused = "; ".join(reason for reason in reasons if reason is not None)
    return f"dropout not fused: {refused}" if refused else None


@copyable
def layer_rule(
    original: type[nn.Module],
    module_name: str,
    forward: type[nn.Module],
    ops: tuple[str, ...],
    *,
    norms: tuple[str, ...],
    dropouts: tuple[str, ...] = (),
    absorbs: tuple[str, ...] = (),
    level: str = "O1",
    obstacle: Callable[[Any], str | None] = lambda layer: None,
    applies: Callable[[Any], bool] = lambda layer: True,
    calls: Callable[[Any], tuple[str, ...]] = lambda layer: (),
    note: Callable[[Any], str | None] = lambda layer: None,
) -> PatchRule:
    """Return the rule for a layer whose forward does the work of some norms and dropouts.

    It refuses where this transformers has another forward, and where one of them must be called.

    Args:
        original: the class.
        module_name: holds the patched class.
        forward: a class with the fused forward.
        ops: as in ``PatchRule``.
        norms: names of the norms, each for ``add_norm``.
        dropouts: names of the dropouts.
        absorbs: names of further children whose work the forward does.
        level: as in ``PatchRule``.
        obstacle: what else is to be asked.
        applies: whether the rule is for an instance.
        calls: those of ``absorbs`` that the forward of an instance calls now.
        note: for the report.
    """
    unknown = unknown_forward(forward, original)

    def layer_obstacle(layer: Any) -> str | None:
        reason = None
        for name in norms:
            # Some layers of a class have no cross-attention, and not its norm.
            if hasattr(layer, name):
                reason = reason or norm_obstacle(name, getattr(layer, name))
        for name in dropouts:
            reason = reason or dropout_obstacle(name, getattr(layer, name))
        return reason or obstacle(layer) or global_hooks() or unknown

    def plan(layer: Any) -> Plan | Refusal:
        if not applies(layer):
            return NOT_APPLICABLE
        reason = layer_obstacle(layer)
        if reason is not None:
            return Refusal(reason)
        children = (*norms, *dropouts, *absorbs)
        called = calls(layer)
        return Plan(ops, tuple(name for name in children if name not in called), note(layer))

    return PatchRule(
        original,
        subclass(original, with_names(forward, original), module_name),
        level,
        plan,
        guarded=True,
    )


def with_names(forward: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return ``forward`` with the names of arguments that a later transformers gave them."""
    method = with_names_of(forward.forward, original.forward)
    same = method is forward.forward
    return forward if same else type(forward.__name__, (forward,), {"forward": method})


def unknown_forward(patched: type[nn.Module], original: type[nn.Module]) -> str | None:
    """Return why ``original.forward`` is not the one that ``patched`` was written for."""
    forward = with_names_of(patched.forward, original.forward)
    known = list(inspect.signature(forward).parameters)
    arguments = list(inspect.signature(original.forward).parameters)
    if arguments == known:
        return None
    return f"this transformers has another {original.__name__}.forward({', '.join(arguments[1:])})"


def unknown(
    patched: type[nn.Module], original: type[nn.Module], also: Iterable[str] = ()
) -> str | None:
    """Return why ``original.forward`` takes or uses what ``patched`` does not know, or ``None``."""
    return unknown_forward(patched, original) or unknown_names(patched, original, also)


def unknown_names(
    patched: type[nn.Module], original: type[nn.Module], also: Iterable[str] = ()
) -> str | None:
    """Return which names ``original.forward`` uses that no method of ``patched`` does, as a reason.

    Where the fused forward uses every child and attribute that the original does, a later
    transformers that does more than this one is known by it. Tensors' methods do not count.
    """
    ours = patched.__mro__[: patched.__mro__.index(nn.Module)]
    methods = [value for cls in ours for value in vars(cls).values() if inspect.isfunction(value)]
    known = {name for method in methods for name in method.__code__.co_names}
    used = set(inspect.unwrap(original.forward).__code__.co_names)
    unknown = used - known - set(also) - set(dir(torch.Tensor)) - _TORCH
    if unknown:
        return f"{original.__name__}.forward of this transformers uses {', '.join(sorted(unknown))}"
    return None
