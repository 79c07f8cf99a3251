"""What a replacement rule is, and when a fused module falls back.

A rule gives an instance another class: a subclass of its own class with a fused ``forward``, under
the same name, because transformers and accelerate compare class names (``_no_split_modules``). What
the original's code reads is watched (``original_code.py``). A fused forward also does the work of
children without calling them. A hook, an adapter, a quantised class or a parametrization of such a
child would be lost: ``bypass_obstacle`` is asked each time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fusedops._core import backends
from fusedops.integrations.hf import patched as patched_modules
from fusedops.integrations.hf.original_code import (
    KNOWN,
    WatchList,
    changed,
    context_obstacle,
    is_plain,
    remember,
    watch_list,
)
from fusedops.integrations.hf.partitioned_weights import only_gather
from fusedops.runtime.architecture import is_by_intel

LEVELS = ("O0", "O1", "O2", "O3")
# Where classes come from that may do something for each class that is derived from them.
_BASES = ("abc", "builtins", "fusedops", "huggingface_hub", "torch", "transformers", "typing")


class FusionPlan(NamedTuple):
    """What the fused forward of an instance does in its current state."""

    ops: tuple[str, ...]  # that it calls; none if torch's are as fast
    absorbs: tuple[str, ...] = ()  # paths of the children whose work it does without calling them
    note: str | None = None  # for the report


class Refusal(NamedTuple):
    """Why the original forward of an instance must run."""

    reason: str  # for the report
    concerns: bool = True  # whether the rule is for such instances, so that ``strict`` raises


NOT_APPLICABLE = Refusal("not applicable", concerns=False)


@dataclass(eq=False)
class PatchRule:
    """How instances of one class are replaced."""

    original: type[nn.Module]  # the class; subclasses of it are not touched
    patched: type[nn.Module]  # a subclass of ``original`` whose ``methods`` call fused ops
    level: str  # the lowest level at which the rule applies
    # What the fused forward of an instance does now, or why it must not run
    plan: Callable[[Any], FusionPlan | Refusal]
    methods: tuple[str, ...] = ("forward",)  # those of ``patched`` that call fused ops
    # Whether each call asks for kernels that serve its first argument; otherwise ``methods`` do
    guarded: bool = False
    # Whether these have the code of ``original`` with a few other globals
    copies_code: bool = False
    # What these methods of ``original`` read when the rule was made
    watched: WatchList = field(init=False, default=WatchList())
    # Name of another class with the same code that the rule was written for
    copy_of: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Watch the original, and give the methods of the patched class their fallback."""
        patched, original = self.patched, self.original
        watched = watch_list(original, *self.methods, copied=self.copies_code)
        remember(original, watched)
        remember(patched, watched)
        setattr(patched, "fused_rule", self)  # noqa: B010 (nn.Module has no such attribute)
        own = [
            name for name in self.methods if getattr(patched, name) is not getattr(original, name)
        ]
        if not own:
            return
        self.watched = watched
        for name in own:
            setattr(patched, name, _with_fallback(self, name))
        # What a base does with the forward of each new class it does with this one too: the layers
        # of transformers put checkpointing around it (from 5.23 on).
        super(patched, patched).__init_subclass__()

    def current_plan(self, module: nn.Module) -> FusionPlan | Refusal:
        """Return what an instance would do if it is patched, or why its original must run."""
        reason = changed(self.watched, module)
        if "forward" in module.__dict__ and not self.runs_inside(module.forward):
            reason = "its forward is overridden on the instance"
        return self.plan(module) if reason is None else Refusal(reason)

    def bypass_reason(self, module: nn.Module) -> str | None:
        """Return why a patched instance runs its original forward now, or ``None``."""
        plan = self.current_plan(module)
        return plan.reason if isinstance(plan, Refusal) else context_obstacle()

    def runs_inside(self, forward: Any) -> bool:
        """Return whether ``forward``, of an instance, is a wrapper of the patched class's."""
        layer = getattr(forward, "__func__", forward)
        while layer is not None and layer is not self.patched.forward:
            layer = getattr(layer, "__wrapped__", None)
        return layer is not None


def _with_fallback(rule: PatchRule, name: str) -> Callable[..., Any]:
    """Return a method of a patched class that runs the original's where the fused one must not.

    It also does so on an instance that is not patched any more: accelerate and others keep the
    forward that they read from the instance. Dynamo evaluates the conditions when it compiles, and
    makes guards of them.
    """
    original, patched, watched, guarded = rule.original, rule.patched, rule.watched, rule.guarded
    fused = getattr(patched, name)
    most, keywords = _known_arguments(fused, getattr(original, name))
    first = list(inspect.signature(fused).parameters)[1]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        input: Any = args[0] if args else kwargs.get(first)
        if (
            not isinstance(self, patched)
            or len(args) > most
            or (keywords is not None and any(keyword not in keywords for keyword in kwargs))
            or changed(watched, self)
            or context_obstacle()
            or (guarded and not runs_here(input))
        ):
            return getattr(original, name)(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    # Code of its own: Dynamo counts how often code was compiled, and stops at a limit.
    method.__code__ = method.__code__.replace(co_name=f"{patched.__name__}.{name}")
    return functools.wraps(fused)(method)


def _known_arguments(fused: Any, original: Any) -> tuple[int, frozenset[str] | None]:
    """Return how many arguments after ``self`` a fused method takes by place, and its keywords.

    Behind the first one, an argument must have the name that it has in the original. A method that
    takes ``*args`` goes by the places of the original; ``None``: it hands any keyword on.
    """
    ours, theirs = (inspect.signature(function).parameters for function in (fused, original))
    places = _by_place(theirs)
    kinds = {parameter.kind for parameter in ours.values()}
    takes_places = inspect.Parameter.VAR_POSITIONAL in kinds
    if takes_places or list(ours) == list(theirs):
        any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        return len(places) - 1, None if any_keyword else frozenset(ours)
    shared = 0
    for name, other in zip(_by_place(ours), places, strict=False):
        if name != other and shared > 1:
            break
        shared += 1
    return shared - 1, frozenset(ours)


def _by_place(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in parameters.items() if parameter.kind is kind]


def always(*ops: str) -> Callable[[Any], FusionPlan]:
    """Return what plans a rule whose forward runs these ops in any state of an instance."""
    plan = FusionPlan(ops)
    return lambda module: plan


def rule_of(module: nn.Module) -> PatchRule | None:
    """Return the rule by which a module is patched, also under a class on top of the patched."""
    return getattr(type(module), "fused_rule", None)


def registering_bases(cls: type) -> list[type]:
    """Return the bases of users that do something for each class that is derived from them."""
    bases = [base for base in cls.__mro__ if "__init_subclass__" in vars(base)]
    return [base for base in bases if base.__module__.partition(".")[0] not in _BASES]


class _Unregistered(nn.Module):
    """A first base whose derived classes no ``__init_subclass__`` of other bases sees."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def subclass(
    original: type[nn.Module], forward: type[nn.Module] | None = None, /, **attributes: Any
) -> type[nn.Module]:
    """Return a class of the name of ``original``, which pickling finds by the rule (``patched``).

    ``forward`` is a class with the fused forward, whose ``super().forward`` will be the original's;
    or this is among the attributes of the new class.
    """
    body = attributes | {
        "__module__": patched_modules.module_of(original),
        "__doc__": f"``{original.__module__}.{original.__name__}`` with fused ops.",
    }
    # Registries of users keep the stock classes, of which new models are made.
    first = (_Unregistered,) if registering_bases(original) else ()
    second = () if forward is None else (forward,)
    return type(original.__name__, (*first, *second, original), body)


def bypass_obstacle(name: str, child: Any, classes: Container[type]) -> str | None:
    """Return why the work of ``child`` must not be done without calling it, or ``None``.

    ``classes`` are those that the fused forward knows; a subclass may compute anything.
    """
    if type(child) not in classes:
        return f"{name} is a {type(child).__name__}"
    return hooks_obstacle(name, child) or changed(KNOWN[type(child)], child, name)


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


def global_hooks() -> str | None:
    """Return why nothing may be bypassed now: hooks on every module, as profilers register."""
    if torch_module._has_any_global_hook():
        return "hooks are registered for all modules"
    return None


def runs_here(input: torch.Tensor) -> bool:
    """Return whether the ops have kernels for ``input``: its device, its kind of dtype, its layout.

    Nested, sparse, MKLDNN, quantised, complex and integer tensors are torch's, and those of classes
    that are not known; so are small ones where torch is faster.
    """
    return is_plain(input) and (
        (input.is_cpu or input.is_cuda or input.is_meta)
        and input.is_floating_point()
        and not input.is_nested
        and input.layout is torch.strided
        and not (TORCH_MULTIPLIES_FLOAT32 and _is_small(input))
    )


# On processors by Intel torch calls MKL for products in float32, which is faster than ours.
TORCH_MULTIPLIES_FLOAT32 = is_by_intel() and torch.backends.mkl.is_available()
# With few elements the host's time decides. Where the products are torch's, what is left of a
# patched model decodes at 0.91 to 0.93 of stock (docs/dev/performance_notes.md, "Tiles of AMX").
_FEW_ELEMENTS = 1 << 14


def _is_small(input: torch.Tensor) -> bool:
    few = input.is_cpu and input.numel() <= _FEW_ELEMENTS
    return few and product_dtype(input) == torch.float32


def product_dtype(input: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies an input of the CPU."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return input.dtype


def empty_like_parameters(module: nn.Module) -> torch.Tensor:
    """Return an empty tensor of the dtype and on the device of a module's parameters.

    A plain one, whatever they are: a quantised weight cannot make others like itself. A layer
    whose weights are packed in integers has none; what it computes is float32.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return torch.empty(0)


def resolution(op: str, module: nn.Module) -> str:
    """Return which backend would run an op for this module, and why."""
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return "known when the parameters are on a device"
    # Dtype and device decide, and sizes that are small here.
    arguments = getattr(torch.ops.fusedops, op).default._schema.arguments
    tensor = empty_like_parameters(module).new_zeros(1, 1, 1, 8)
    try:
        return str(backends.resolve(op, *[tensor] * len(arguments)))
    except Exception as error:  # the module's forward would say so: a report never does
        return f"not known: {error}"
