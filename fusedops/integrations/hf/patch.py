"""``patch`` and ``unpatch``: fused ops into a model that exists, and out of it again.

A model of a family can only exist when the family's file is loaded: nothing else is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf import calibration, tables
from fusedops.integrations.hf.example_step import ExampleStep, step_time
from fusedops.integrations.hf.original_code import context_obstacle
from fusedops.integrations.hf.parents import only_read
from fusedops.integrations.hf.report import ModuleReport, PatchReport
from fusedops.integrations.hf.rules.rule import (
    LEVELS,
    FusionPlan,
    PatchRule,
    Refusal,
    resolution,
    rule_of,
)
from fusedops.ops.mlp_tiled import check_tile_tokens


def patch(
    model: nn.Module,
    *,
    level: str = "O2",
    strict: bool = False,
    calibrate: bool | str | os.PathLike[str] = False,
    example: Any = None,
    tile_tokens: int | None = None,
) -> PatchReport:
    """Replace a model's modules by fused ones, and return a report.

    Parameters, buffers, names, hooks and ``state_dict`` do not change, and neither do other models
    in the process. A second call with another level changes the level.

    Args:
        model: any module. What is replaced is known by its class (torch's modules, layers of
            transformers' families), by its code (norms, feed-forward layers) or by transformers'
            registries (attention, experts, losses).
        level: ``"O0"`` nothing; ``"O1"`` norms and element-wise ops; ``"O2"`` also attention by
            transformers' registry, matrix products with what follows them, experts and losses;
            ``"O3"`` also attention that a module's own code computes by
            ``F.scaled_dot_product_attention``.
        strict: raise if a module has a rule but cannot be replaced, or if nothing was replaced.
        calibrate: measure each class and shape of module, patched and stock, on the inputs that it
            receives in a step with ``example``, and keep the stock one if it is faster. This takes
            at most about two seconds, or the time of two steps if that is longer, and modules
            without time stay patched. The path of a file stores the results, and its entries are
            not measured again.
        example: inputs of the model: keywords as a mapping, positional arguments as a tuple, or a
            tensor. Steps are run with it, backward included where the model is in training, and
            the report says which share of the time fused ops take (``report.step``) and which
            parameters receive gradients. The model's state stays.
        tile_tokens: number of tokens that go through a feed-forward layer at a time, for long
            sequences, as in ``fusedops.mlp``: each layer whose products are one op then
            (``mlp_tiled`` in the report; others have a note).

    Returns:
        A report with an entry per module, and one per loss of a transformers model; ``print`` shows
        it as a table.

    Raises:
        TypeError: ``model`` is not a module, ``strict`` not a bool, ``calibrate`` not a bool or
            path, or ``example`` not one of these.
        ValueError: ``level`` is unknown, ``tile_tokens`` is less than 1, the model does not take
            ``example``, ``calibrate`` comes without it, or the file of ``calibrate`` has other
            contents or does not end in ``.json``.
        OSError: that file cannot be read or written, or its folder does not exist.
        UnsupportedError: ``strict`` and something could not be replaced, no feed-forward layer can
            go in tiles, or a backward with ``example`` would run an optimizer's step; the model is
            untouched.

    Note:
        Patch after loading adapters and before ``fully_shard``. If the children of a fused module
        get hooks or adapters later, or something is changed that its original's code reads
        (``report.watched(module)``), the original forward runs meanwhile; ``describe`` shows it.
        Call ``unpatch`` before libraries that compare exact classes (``torch.ao.quantization``).
        Calibration chooses by the clock of this machine: two processes may run different kernels
        for a module and round differently unless they read one file.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Tanh())
        >>> fusedops.patch(model, level="O1")
        PatchReport(Sequential, level='O1', 1 of 2 modules replaced)
        >>> fusedops.unpatch(model)
    """
    checks.module("patch", model)
    checks.choice("patch", "level", level, LEVELS)
    checks.flag("patch", "strict", strict)
    check_tile_tokens("patch", tile_tokens)
    if not isinstance(calibrate, (bool, str, os.PathLike)):
        checks.fail_type("patch", "calibrate", "a bool or a path", calibrate)
    if not isinstance(calibrate, bool) and not os.fspath(calibrate).endswith(".json"):
        expected = "True, False or the path of a .json file"
        checks.fail("patch", "calibrate", expected, repr(calibrate))
    if calibrate is not False and example is None:
        raise ValueError("patch: calibrate measures modules in a step of the model: pass example=")
    step = None if example is None else ExampleStep(model, example, "patch")
    give_back = _what_is_patched(model)
    try:
        report = _patched(model, level, tile_tokens)
        if tile_tokens is not None and not any("mlp_tiled" in row.op for row in report.replaced):
            raise UnsupportedError(
                "patch: tile_tokens was given, but no feed-forward layer is one op from its first "
                "to its last product: the report of patch without tile_tokens says why"
            )
        if strict and (report.failed or not report.replaced):
            raise UnsupportedError(f"patch: strict was asked for, but {_failures(report)}")
        if step is not None:
            report = _examined(report, step, calibrate)
    except BaseException:
        _restore(model)
        calibration.forget(model)
        give_back()
        raise
    return report


def _examined(
    report: PatchReport, step: ExampleStep, calibrate: bool | str | os.PathLike[str]
) -> PatchReport:
    model, stock_gradients = step.model, set[nn.Parameter]()
    known = {} if isinstance(calibrate, bool) else calibration.read(calibrate)
    if step.trains or calibrate is not False:
        patched = [module for module in model.modules() if rule_of(module) and not _covered(module)]
        recorder = calibration.Recorder(patched if calibrate is not False else ())
        begun = time.perf_counter()
        with _stock(model):
            stock_gradients = step.run(recorder.recording())
        recorder.seconds = time.perf_counter() - begun
        if calibrate is not False:
            with step.unchanged():
                findings = calibration.calibrate(model, recorder, known)
            if not isinstance(calibrate, bool) and len(findings) > len(known):
                calibration.write(calibrate, findings)
            report = _report(model, report.level)
    gradients = step.run()
    missing = stock_gradients - gradients
    names = tuple(name for name, weight in model.named_parameters() if weight in missing)
    modules = dict(model.named_modules()) if step.trains else {}
    entries = tuple(
        replace(entry, gradients=_gradients(modules.get(entry.name), gradients))
        for entry in report.modules
    )
    measured = replace(step_time(step, entries), without_gradient=names)
    return replace(report, modules=entries, step=measured)


def _gradients(module: nn.Module | None, gradients: set[nn.Parameter]) -> str:
    """Return which parameters of a module require a gradient, and which of them received none."""
    own = [] if module is None else module.named_parameters(recurse=False)
    required = [(name, weight) for name, weight in own if weight.requires_grad]
    return ", ".join(name if weight in gradients else f"not {name}" for name, weight in required)


@contextlib.contextmanager
def _stock(model: nn.Module) -> Iterator[None]:
    """Let a model run its original code inside of the block."""
    give_back = _what_is_patched(model)
    _restore(model)
    try:
        yield
    finally:
        give_back()


def _what_is_patched(model: nn.Module) -> Callable[[], None]:
    """Return what gives a model the classes and fused losses that it has now."""
    classes = {module: type(module) for module in model.modules()}
    tiles = {m: vars(m)["tile_tokens"] for m in model.modules() if "tile_tokens" in vars(m)}
    owners = [owner for _, owner in _loss_owners(model) if _losses().is_replaced(owner)]

    def give_back() -> None:
        for module, cls in classes.items():
            module.__class__ = cls
        for module, tile_tokens in tiles.items():
            vars(module)["tile_tokens"] = tile_tokens
        for owner in owners:
            _losses().take(owner)

    return give_back


def _patched(model: nn.Module, level: str, tile_tokens: int | None) -> PatchReport:
    _restore(model)
    calibration.forget(model)
    rules, uncalled = _rules_of(model), only_read(model)
    for module in list(model.modules()):
        rule = rules[type(module)]
        if rule is None or module in uncalled or level < rule.level:
            continue
        if isinstance(_plan(rule, module), FusionPlan):
            module.__class__ = rule.patched
            if tile_tokens is not None and "tile_tokens" in vars(rule.patched):
                vars(module)["tile_tokens"] = tile_tokens
    for _, owner in _loss_owners(model):
        if level >= _losses().LEVEL:
            _losses().take(owner)
    return _report(model, level)


def unpatch(model: nn.Module) -> None:
    """Restore a model: it computes the same bits as before ``patch``.

    A model that is not patched does not change.

    Args:
        model: the model, or a part of one.

    Raises:
        TypeError: ``model`` is not a module.
        UnsupportedError: something else (a parametrization, ``fully_shard``) has derived its own
            class from a patched one; the model is then unchanged.
    """
    checks.module("unpatch", model)
    covered = [
        f"{name or 'the model'} is a {type(module).__name__}"
        for name, module in model.named_modules()
        if _covered(module)
    ]
    if covered:
        raise UnsupportedError(
            f"unpatch: another class lies on top of the patched one: {'; '.join(covered)}; "
            f"remove a parametrization first; after fully_shard, build the model again"
        )
    _restore(model)
    calibration.forget(model)


def describe(model: nn.Module, *, example: Any = None) -> PatchReport:
    """Return the report of a model in its current state: hooks and adapters may have been added.

    Args:
        model: patched or not.
        example: as in ``patch``.

    Returns:
        As ``patch``; ``level`` is ``"-"``.

    Raises:
        TypeError: ``model`` is not a module, or ``example`` no example.
        ValueError: the model does not take ``example``.
        UnsupportedError: a backward with ``example`` would run an optimizer's step.
    """
    checks.module("describe", model)
    report = _report(model, "-")
    if example is None:
        return report
    return _examined(report, ExampleStep(model, example, "describe"), calibrate=False)


def register_attention() -> None:
    """Register ``attn_implementation="fusedops"`` in transformers, for unpatched models.

    ``from_pretrained(..., attn_implementation="fusedops")`` and
    ``model.set_attn_implementation("fusedops")`` then run the attention of any family that uses
    transformers' registry on the fused ops: masks, caches and grouped heads as with ``sdpa``, and
    the soft-cap (Gemma 2) and sinks (GPT-OSS) that ``sdpa`` lacks. Attention weights are not
    recorded. ``patch`` does not need this call.

    Raises:
        ImportError: transformers is not installed.
    """
    importlib.import_module("fusedops.integrations.hf.rules.attention")


def register_experts() -> None:
    """Register ``experts_implementation="fusedops"`` in transformers, for unpatched models.

    ``from_pretrained(..., experts_implementation="fusedops")`` and
    ``model.set_experts_implementation("fusedops")`` then run the experts of any family that uses
    transformers' registry on the fused ops, under its expert parallelism as well. ``patch`` does
    not need this call.

    Raises:
        ImportError: transformers is not installed.
    """
    importlib.import_module("fusedops.integrations.hf.rules.experts")


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        rule = rule_of(module)
        if rule is not None and not _covered(module):
            module.__dict__.pop("tile_tokens", None)
            module.__class__ = rule.original
    for _, owner in _loss_owners(model):
        _losses().restore(owner)


def _losses() -> Any:
    return importlib.import_module("fusedops.integrations.hf.rules.losses")


def _loss_owners(model: nn.Module) -> list[tuple[str, Any]]:
    """Return name and model of all in ``model`` that have a loss of transformers."""
    loaded = "transformers.modeling_utils" in sys.modules
    return list(_losses().owners(model)) if loaded else []


def _rules_of(model: nn.Module) -> dict[type, PatchRule | None]:
    """Return the rule of each class in a model; a plan for one asks what others are known as."""
    return {cls: tables.rule_of_class(cls) for cls in map(type, model.modules())}


def _covered(module: nn.Module) -> bool:
    """Return whether another class lies on top of a patched one: ``fully_shard`` makes such."""
    rule = rule_of(module)
    return rule is not None and type(module) is not rule.patched


def _plan(rule: PatchRule, module: nn.Module) -> FusionPlan | Refusal:
    """Return the plan of a rule for an instance, which may be of a derived class."""
    file = rule.original.__module__
    kept = vars(sys.modules[file]).values() if file in sys.modules and file != "__main__" else ()
    has_parts = module._parameters or module._modules
    if not has_parts and any(value is module for value in kept):  # transformers.activations.gelu
        return Refusal(f"it is a global of {file}, which other models may use")
    try:
        return rule.current_plan(module)
    except Exception as error:  # an instance may lack what others of its class have
        return Refusal(f"its state could not be read: {type(error).__name__}: {error}")


def _report(model: nn.Module, level: str) -> PatchReport:
    _rules_of(model)
    uncalled = only_read(model)
    names = {module: name for name, module in model.named_modules()}
    owners = _owners(names)
    entries: list[ModuleReport | None] = []
    for module, name in names.items():
        rule, entry = rule_of(module), partial(ModuleReport, name, type(module).__name__)
        if name in owners:
            owner, ops = owners[name]
            inside = f"inside {owner}" if owner else "inside the model's own forward"
            entries.append(entry(True, ops, reason=inside))
        elif rule is not None:
            entries.append(_entry_of_patched(name, module, rule))
        elif module in uncalled:
            reason = f"{uncalled[module]} reads its parameters and does not call it"
            entries.append(entry(False, reason=reason))
        elif isinstance(refusal := tables.rule_or_refusal(type(module)), str):
            entries.append(entry(False, reason=refusal))
        elif (original := _rule_for(module)) is not None:
            entries.append(_entry_of_refused(name, module, original, level))
        elif not any(True for _ in module.children()) and not isinstance(module, nn.Identity):
            entries.append(entry(False, reason="there is no rule for this class"))
    entries += [_losses().entry(name, owner, level) for name, owner in _loss_owners(model)]
    listed = tuple(entry for entry in entries if entry is not None)
    return PatchReport(type(model).__name__, level, listed)


def _rule_for(module: nn.Module) -> PatchRule | None:
    """Return the rule for the class of ``module``, or for one that it was derived from."""
    layers = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(filter(None, map(tables.rule_of_class, layers)), None)


def _owners(names: dict[nn.Module, str]) -> dict[str, tuple[str, str]]:
    """Return, for each module whose work a fused parent does, that parent's name and ops."""
    owners = {}
    for module, name in names.items():
        rule = rule_of(module)
        plan = None if rule is None else _plan(rule, module)
        if isinstance(plan, FusionPlan) and context_obstacle() is None:
            for child in plan.absorbs:
                owners[f"{name}.{child}" if name else child] = (name, ", ".join(plan.ops))
    return owners


def _entry_of_patched(name: str, module: nn.Module, rule: PatchRule) -> ModuleReport:
    plan, cls = _plan(rule, module), type(module).__name__
    context = context_obstacle()
    if context is not None:
        plan = Refusal(context)
    if isinstance(plan, Refusal):
        return ModuleReport(name, cls, False, reason=f"falls back now: {plan.reason}")
    if not plan.ops:
        return ModuleReport(name, cls, False, reason=plan.note or "")
    notes = [
        "wrapped after patch" if _covered(module) else None,
        None if rule.copy_of is None else f"as {rule.copy_of}",
        plan.note,
        calibration.finding_of(module),
    ]
    note = "; ".join(str(note) for note in notes if note is not None)
    backend = resolution(plan.ops[0], module)
    return ModuleReport(name, cls, True, ", ".join(plan.ops), backend, note)


def _entry_of_refused(
    name: str, module: nn.Module, rule: PatchRule, level: str
) -> ModuleReport | None:
    """Return the entry of an unpatched module, ``None`` where the rule does not concern it."""
    plan, reason = _plan(rule, module), "not patched"
    finding, failed = calibration.finding_of(module), False
    if isinstance(plan, Refusal) and not plan.concerns:
        return None
    if finding is not None:
        reason = str(finding)
    elif type(module).__module__.startswith("fusedops."):
        reason = "it calls fused ops itself"
    elif level != "-":
        failed = level >= rule.level
        if type(module) is not rule.original:
            reason = _derived(rule, module)
        elif not failed:
            reason = f"from level {rule.level} on"
        elif isinstance(plan, Refusal):
            reason = plan.reason
    return ModuleReport(name, type(module).__name__, False, reason=reason, failed=failed)


def _derived(rule: PatchRule, module: nn.Module) -> str:
    cls, base = type(module), rule.original.__name__
    # The classes that fully_shard and parametrizations make for an instance have no place in code.
    local = "<locals>" in cls.__qualname__
    if not local and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
        return f"another class lies on top of {base}: patch before it comes"
    if cls.forward is rule.original.forward:
        return f"it is derived from {base}, and the rule is for {base} itself"
    return f"it is derived from {base} and has a forward of its own"


def _failures(report: PatchReport) -> str:
    if not report.failed:
        return f"no module of {report.model} could be replaced at level {report.level}"
    listed = "; ".join(f"{entry.name or report.model}: {entry.reason}" for entry in report.failed)
    return f"{len(report.failed)} modules could not be replaced: {listed}"
