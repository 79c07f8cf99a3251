"""What a replacement rule is, and when a fused module steps aside.

A rule gives an instance another class: a subclass of its own class with a fused ``forward``. The
module object, its parameters, buffers, hooks and children stay, other instances of the class are
untouched, and taking the class back restores the old behaviour to the bit. The subclass lives at
module level under the name of its base, so that pickling, ``isinstance`` and the places where
transformers and accelerate compare class *names* (``_no_split_modules``) keep working.

A fused forward does the work of children without calling them. Whatever somebody hung on such a
child (a hook, an adapter, a quantised class, a parametrization, an overridden ``forward``) would
be lost: the fused forward asks ``bypass_obstacle`` each time and runs the original forward then.

What a rule replaces may itself be replaced by others, and a call may have an argument that the
fused forward does not know: ``PatchRule`` puts these questions in front of it
(``original_code.py``, ``signatures.py``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops._core import backends
from fusedops.integrations.hf.original_code import (
    KNOWN,
    Places,
    context_obstacle,
    places_of,
    remember,
    replaced,
)
from fusedops.integrations.hf.partitioned_weights import only_gather
from fusedops.integrations.hf.renamed_arguments import renames, with_names_of
from fusedops.integrations.hf.rules.deferred_scores import DeferredScores, computed
from fusedops.integrations.hf.rules.probes import call_op
from fusedops.integrations.hf.signatures import foreign_keyword, known_arguments

LEVELS = ("O0", "O1", "O2", "O3")


@dataclass(frozen=True)
class PatchRule:
    """How instances of one class are replaced."""

    original: type[nn.Module]  # the class; subclasses of it are not touched
    patched: type[nn.Module]  # a subclass of ``original`` whose ``forward`` calls fused ops
    ops: tuple[str, ...]  # names of the ops that the new forward calls itself
    level: str  # the lowest level at which the rule applies
    # Calls ``ops[0]`` on a small input where the module's parameters are, to learn the backend;
    # ``None``: ``call_op`` does, since the module's own sizes do not matter
    probe: Callable[[Any], object] | None = None
    # Why an instance cannot be replaced, ``None`` if it can
    obstacle: Callable[[Any], str | None] = lambda module: None
    # Whether the rule concerns an instance at all
    applies: Callable[[Any], bool] = lambda module: True
    absorbs: tuple[str, ...] = ()  # names of the children whose work the new forward does
    # What a reader of the report should know about this replacement
    note: Callable[[Any], str | None] = lambda module: None
    # Those of ``absorbs`` that it still calls for an instance in its current state
    calls: Callable[[Any], tuple[str, ...]] = lambda module: ()
    # Further children whose work it does for an instance in its current state
    inside: Callable[[Any], tuple[str, ...]] = lambda module: ()
    # Those of ``ops`` that an instance runs in its current state, if that is not all of them
    ops_in: Callable[[Any], tuple[str, ...]] | None = None
    methods: tuple[str, ...] = ("forward",)  # those of ``patched`` that call fused ops
    # Whether the original runs where an instance has an obstacle, or where the ops have no kernels
    # for the first argument; otherwise ``methods`` find that out themselves
    guarded: bool = False
    # Whether these have the code of ``original`` with a few other globals
    copies_code: bool = False
    # What these methods of ``original`` are made of, read when the rule is made
    places: Places = field(init=False)
    # Makes the rule for a class with the same methods, of class and module name; see ``copyable``
    for_copy: Callable[[type[nn.Module], str], PatchRule] | None = field(init=False, default=None)
    copy_of: str | None = None  # name of the class with the same methods that the rule was made for

    def __post_init__(self) -> None:
        """Let the patched class know its rule, and ask first whether the original is as it was."""
        patched, original = self.patched, self.original
        places = places_of(original, *self.methods, copied=self.copies_code)
        remember(original, places)
        remember(patched, places)
        setattr(patched, "fused_rule", self)  # noqa: B010 (nn.Module has no such attribute)
        own = [
            name for name in self.methods if getattr(patched, name) is not getattr(original, name)
        ]
        object.__setattr__(self, "places", places if own else ())
        for name in own:
            setattr(patched, name, _asking(self, name))
        # What a base does with the forward of each new class it does with this one too: the layers
        # of transformers put checkpointing around it (from 5.23 on).
        if own:
            super(patched, patched).__init_subclass__()

    def ops_of(self, module: Any) -> tuple[str, ...]:
        """Return the names of the ops that an instance runs in its current state."""
        return (() if self.ops_in is None else self.ops_in(module)) or self.ops

    def bypass_reason(self, module: nn.Module) -> str | None:
        """Return why a patched instance runs its original forward now, or ``None``."""
        if "forward" in module.__dict__ and not self.runs_inside(module.forward):
            return "its forward is overridden on the instance"
        return replaced(self.places) or context_obstacle() or self.obstacle(module)

    def runs_inside(self, forward: Any) -> bool:
        """Return whether ``forward``, of an instance, is a wrapper of the patched class's."""
        layer = getattr(forward, "__func__", forward)
        while layer is not None and layer is not self.patched.forward:
            layer = getattr(layer, "__wrapped__", None)
        return layer is not None


def _asking(rule: PatchRule, name: str) -> Callable[..., Any]:
    """Return a method of a patched class that asks whether the fused one may serve the call.

    It runs the original's also on an instance that is not patched any more: accelerate and others
    keep the forward that they found on the instance. On a Zen 4 core the questions take 0.22 us for
    a norm, 0.31 for a linear layer, 0.36 for an attention, and with those for the three children
    that it bypasses 0.96 for a gated feed-forward layer, before transforms and arguments were asked
    for, which adds about a tenth (on a busy machine). Dynamo answers
    them when it compiles, and guards what it found.
    """
    original, patched, places = rule.original, rule.patched, rule.places
    guarded, obstacle = rule.guarded, rule.obstacle
    fused = getattr(patched, name)
    known = known_arguments(fused, getattr(original, name))
    most = known.positional - 1  # self is no element of args
    any_keyword = known.names is None and not known.foreign
    first = list(inspect.signature(fused).parameters)[1]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        input = args[0] if args else kwargs.get(first)
        if type(input) is DeferredScores:  # of a parent that writes its attention out
            return computed(partial(method, self), args, kwargs, use=f"a {patched.__name__}")
        if (
            not isinstance(self, patched)
            or len(args) > most
            or (kwargs and not any_keyword and foreign_keyword(known, kwargs) is not None)
            or replaced(places)
            or context_obstacle()
            or (guarded and (input is None or not runs_here(input) or obstacle(self) is not None))
        ):
            return getattr(original, name)(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    # Code of its own: Dynamo counts how often code was compiled, and stops at a limit.
    method.__code__ = method.__code__.replace(co_name=f"{patched.__name__}.{name}")
    return functools.wraps(fused)(method)


def copyable(make: Callable[..., PatchRule]) -> Callable[..., PatchRule]:
    """Let a function that makes a class's rule make that of a copy of the class as well.

    Args:
        make: takes the original class, the name of the module that holds the patched class, and
            whatever else it needs, which is the same for a copy.
    """

    @functools.wraps(make)
    def made(original: type[nn.Module], module_name: str, *args: Any, **options: Any) -> PatchRule:
        rule = make(original, module_name, *args, **options)

        def for_copy(copy: type[nn.Module], copy_module_name: str) -> PatchRule:
            return made(copy, copy_module_name, *args, **options)

        object.__setattr__(rule, "for_copy", for_copy)
        return rule

    return made


def rule_of(module: nn.Module) -> PatchRule | None:
    """Return the rule by which a module is patched, also under a class on top of the patched."""
    return getattr(type(module), "fused_rule", None)


def absorbed(module: nn.Module) -> set[str]:
    """Return the names of the children whose work the fused forward of ``module`` does now."""
    rule = rule_of(module)
    if rule is None or rule.bypass_reason(module) is not None:
        return set()
    return (set(rule.absorbs) - set(rule.calls(module))).union(rule.inside(module))


# Where classes come from that may do something for each class that is derived from them.
_BASES = ("abc", "builtins", "fusedops", "huggingface_hub", "torch", "transformers", "typing")


def registering_bases(cls: type) -> list[type]:
    """Return the bases of users that do something for each class that is derived from them."""
    bases = [base for base in cls.__mro__ if "__init_subclass__" in vars(base)]
    return [base for base in bases if base.__module__.partition(".")[0] not in _BASES]


class _Unregistered(nn.Module):
    """A first base whose derived classes no ``__init_subclass__`` of other bases sees."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def subclass(
    original: type[nn.Module], forward: type[nn.Module], module_name: str, /, **attributes: Any
) -> type[nn.Module]:
    """Return a class of the name of ``original`` with the forward of another in front.

    Args:
        original: the class.
        forward: a class with the fused forward, whose ``super().forward`` will be the original's.
        module_name: name of the module in which pickling finds the new class.
        **attributes: of the class.
    """
    method = forward.forward
    if method is not nn.Module.forward and renames(method, original.forward):
        attributes = {"forward": with_names_of(method, original.forward)} | attributes
    body = attributes | {
        "__module__": module_name,
        "__doc__": f"``{original.__module__}.{original.__name__}`` with fused ops.",
    }
    # Registries of users keep the stock classes, of which new models are made.
    first = (_Unregistered,) if registering_bases(original) else ()
    patched = type(original.__name__, (*first, forward, original), body)
    module = sys.modules[module_name]
    if "__getattr__" not in vars(module):  # else it finds the class by the rule of the original
        setattr(module, original.__name__, patched)
    return patched


def bypass_obstacle(name: str, child: Any, classes: Container[type]) -> str | None:
    """Return why the work of ``child`` must not be done without calling it, or ``None``.

    Args:
        name: the child's name, for the message.
        child: the current child.
        classes: the classes that the fused forward knows; a subclass may compute anything.
    """
    if type(child) not in classes:
        return f"{name} is a {type(child).__name__}"
    return hooks_obstacle(name, child) or replaced(KNOWN[type(child)])


def hooks_obstacle(name: str, child: Any) -> str | None:
    """Return why ``child`` must be called for the sake of what hangs on the instance."""
    if (
        child._forward_hooks
        or child._forward_pre_hooks
        or child._backward_hooks
        or child._backward_pre_hooks
    ) and not only_gather(child):
        return f"{name} has hooks"
    if "forward" in child.__dict__:
        return f"{name}.forward is overridden on the instance"
    return None


def configuration_obstacle(module: Any, condition: Callable[[Any], bool] | None) -> str | None:
    """Return why an instance does not compute now what its rule is for, or ``None``.

    Args:
        module: the instance.
        condition: what must be true of it; ``None``: nothing.
    """
    if condition is None or condition(module):
        return None
    return "it is configured to compute something else"


def global_hooks() -> str | None:
    """Return why nothing may be bypassed now: hooks on every module, as profilers register."""
    if torch_module._has_any_global_hook():
        return "hooks are registered for all modules"
    return None


def on_known_device(tensor: torch.Tensor) -> bool:
    """Return whether the ops have kernels for the device of ``tensor``."""
    return tensor.is_cpu or tensor.is_cuda or tensor.is_meta


def runs_here(input: torch.Tensor) -> bool:
    """Return whether the ops have kernels for ``input``: its device, its kind of dtype, its layout.

    Nested, sparse, MKLDNN, quantised, complex and integer tensors are torch's, and those of classes
    that override torch's functions.
    """
    return (plain_weight(input) or _has_torchs_functions(type(input))) and (
        (input.is_cpu or input.is_cuda or input.is_meta)
        and input.is_floating_point()
        and not input.is_nested
        and input.layout is torch.strided
    )


def _has_torchs_functions(kind: Any) -> bool:
    """Return whether a subclass of tensors takes torch's functions as torch does."""
    own = getattr(kind.__torch_function__, "__func__", None)
    return own is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def plain_weight(weight: torch.Tensor) -> bool:
    """Return whether a tensor is stored as it seems: quantised ones override torch functions."""
    kind = type(weight)
    if kind is nn.Parameter or kind is torch.Tensor:
        return True
    return kind.__torch_function__ is torch._C._disabled_torch_function_impl


def weight_obstacle(module: Any) -> str | None:
    """Return why the weight of ``module`` cannot be read directly, or ``None``."""
    if module.weight is None or plain_weight(module.weight):
        return None
    return f"its weight is a {type(module.weight).__name__}"


def like(module: nn.Module) -> torch.Tensor:
    """Return an empty tensor of the dtype and on the device of a module's parameters, for probes.

    A plain one, whatever they are: a quantised weight cannot make others like itself. A layer
    whose weights are packed in integers has none; what it computes is float32.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return torch.empty(0)


def resolution(
    op: str, module: nn.Module, probe: Callable[[Any], object] | None = None
) -> str | None:
    """Return which backend would run an op for this module, and why.

    ``None`` means that the patched forward would leave this module's parameters to torch.

    Args:
        op: the op's name.
        module: on whose parameters' device it would run.
        probe: as in ``PatchRule``.
    """
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "known when the parameters are on a device"
    try:
        with torch.no_grad(), _Watch(op):
            call_op(op, like(module)) if probe is None else probe(module)
    except _FoundError as found:
        return str(found.resolution)
    except Exception as error:  # the module's forward would say so: a report never does
        return f"not known: {error}"
    return None


class _FoundError(Exception):
    """Carries the answer out of the call that was watched."""

    def __init__(self, resolution: backends.Resolution) -> None:
        super().__init__()
        self.resolution = resolution


class _Watch(TorchDispatchMode):
    """Asks for the backend of the first call of one op, which is then not executed."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == f"fusedops::{self.op}":
            raise _FoundError(backends.resolve(self.op, *args))
        return func(*args, **(kwargs or {}))
