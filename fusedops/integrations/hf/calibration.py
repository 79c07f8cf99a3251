"""Which is faster here, the patched module or the stock one: ``patch(..., calibrate=True)``.

The first module of each class, shape and setting is timed on the inputs that it received in the
user's example step, patched and stock in alternation. A file keeps the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops._core import backends
from fusedops._core.dtypes import autocast_dtype
from fusedops.integrations.hf.example_step import copied, tensors_in
from fusedops.integrations.hf.original_code import context_obstacle
from fusedops.integrations.hf.rules.rule import (
    Refusal,
    empty_like_parameters,
    global_hooks,
    hooks_obstacle,
    rule_of,
)
from fusedops.runtime.architecture import architecture
from fusedops.runtime.timer import BriefClock, TimingPlan, Variant, clock_for, measure
from fusedops.terminal import files

# Seconds for one model, or the time of so many of its steps if that is longer.
BUDGET = 2.0
STEPS = 2
# The stock module must be faster by this share, in three rounds of four and in two measurements:
# otherwise the next run could find the opposite.
MARGIN = 0.05
ROUNDS = 5
_STOCK, _PATCHED = "stock", "patched"
_NO_SETTINGS = ("layer_idx", "layer_id", "training")
_KIND, SCHEMA = "calibration", 2


@dataclass(frozen=True)
class CalibrationFinding:
    """What was measured of a class and shape, or why it was not measured."""

    # Time of the stock module divided by the patched one's, median of the rounds
    speed_up: float | None = None
    stock_wins: bool = False  # whether the stock module is to stay
    where: str = ""  # dtype and shape of the first input, ``"bfloat16, 8x512x768"``
    problem: str = ""  # why it was not measured

    def __str__(self) -> str:
        if self.speed_up is None:
            return f"not measured: {self.problem}"
        kept = "stock kept: " if self.stock_wins else ""
        return f"{kept}{self.speed_up:.2f}x measured on this machine, {self.where}"


# The finding of each module, for its report.
_FINDINGS: weakref.WeakKeyDictionary[nn.Module, CalibrationFinding] = weakref.WeakKeyDictionary()


def finding_of(module: nn.Module) -> CalibrationFinding | None:
    """Return what calibration found of a module, ``None`` where it was not measured."""
    return _FINDINGS.get(module)


def forget(model: nn.Module) -> None:
    """Remove the findings of a model's modules."""
    for module in model.modules():
        _FINDINGS.pop(module, None)


class _ModuleCall(NamedTuple):
    """The inputs of a module in the example step, and the state in which it was called."""

    inputs: Any  # arguments and keywords
    trains: bool
    autocast: torch.dtype | None
    where: str


class Recorder:
    """Records the first call of each of some modules in the example step."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.keys: dict[nn.Module, str] = {}
        self.calls: dict[str, _ModuleCall] = {}  # by key
        self.seconds = 0.0  # of the step

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls inside of the block."""
        register = nn.Module.register_forward_pre_hook
        handles = [register(module, self._record, with_kwargs=True) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in self.keys:
            return
        inputs = list(tensors_in((args, kwargs)))
        shapes = ["x".join(map(str, tensor.shape)) for tensor in inputs]
        tensors = [*inputs, *module.parameters()]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        autocast = autocast_dtype(empty_like_parameters(module).device)
        key = self.keys[module] = _key(module, shapes, autocast, trains)
        if key not in self.calls:
            where = f"{_dtype(module, autocast)}, {(shapes or ['no tensors'])[0]}"
            with contextlib.suppress(Exception):  # any object may be an input
                self.calls[key] = _ModuleCall(copied((args, kwargs)), trains, autocast, where)


def calibrate(
    model: nn.Module, recorder: Recorder, known: Mapping[str, CalibrationFinding]
) -> dict[str, CalibrationFinding]:
    """Take the patched class from the modules of ``model`` whose stock forward is faster here.

    ``known`` findings, by key, are not measured; they are returned with the others.
    """
    deadline = time.perf_counter() + max(BUDGET, STEPS * recorder.seconds)
    findings = dict(known)
    decided: set[nn.Module] = set()
    while modules := _to_decide(model, decided):
        decided.update(modules)
        for module in sorted(modules, key=lambda part: sum(map(torch.numel, part.parameters()))):
            key = recorder.keys.get(module, "")
            finding = _refusal(module, recorder) or findings.get(key)
            if finding is None:
                finding = findings[key] = _measured(module, recorder.calls[key], deadline)
            _FINDINGS[module] = finding
            if finding.stock_wins:
                module.__class__ = _stock_class(module)
    return findings


def _to_decide(model: nn.Module, decided: set[nn.Module]) -> list[nn.Module]:
    """Return the patched modules that do work of their own now and are not decided yet."""
    inside = decided.union(*map(_does_work_of, model.modules()))
    rules = {module: rule_of(module) for module in model.modules() if module not in inside}
    return [module for module, rule in rules.items() if rule and type(module) is rule.patched]


def _does_work_of(module: nn.Module) -> list[nn.Module]:
    """Return all modules below ``module`` that its fused forward does not call now."""
    rule = rule_of(module)
    plan = None if rule is None or context_obstacle() is not None else rule.current_plan(module)
    if plan is None or isinstance(plan, Refusal):
        return []
    # Some families of a rule lack a child that others have.
    below = [child for name, child in module.named_modules() if name in plan.absorbs]
    return [part for child in below for part in child.modules()]


def _key(module: nn.Module, inputs: list[str], autocast: torch.dtype | None, trains: bool) -> str:
    """Return in one line what a finding holds for: class, shapes, settings, dtype and device."""
    cls = _stock_class(module)
    device = empty_like_parameters(module).device
    shapes = [f"{name}{list(weight.shape)}" for name, weight in module.named_parameters()]
    settings = [
        f"{name}={value}"
        for name, value in sorted(vars(module).items())
        if isinstance(value, (int, float, str)) and name[0] != "_" and name not in _NO_SETTINGS
    ]
    parts = (
        f"{cls.__module__}.{cls.__qualname__}",
        " ".join(shapes),
        " ".join(settings),
        f"inputs {' '.join(inputs)}",
        _dtype(module, autocast),
        "training" if module.training else "evaluation",
        "forward and backward" if trains else "forward",
        f"{architecture(device)}, {torch.get_num_threads()} threads",
        f"backend {backends.requested() or 'automatic'}",
        f"torch {'.'.join(torch.__version__.split('.')[:2])}",
    )
    return "; ".join(parts)


def _dtype(module: nn.Module, autocast: torch.dtype | None) -> str:
    own, lower = (
        str(dtype).removeprefix("torch.")
        for dtype in (empty_like_parameters(module).dtype, autocast)
    )
    return own if autocast is None else f"{own} under autocast to {lower}"


def _refusal(module: nn.Module, recorder: Recorder) -> CalibrationFinding | None:
    """Return why this module, whatever others of its class may, is not measured, or ``None``."""
    rule: Any = rule_of(module)
    plan = rule.current_plan(module)
    reasons = (hooks_obstacle(name or "it", child) for name, child in module.named_modules())
    problem = next(filter(None, reasons), global_hooks())
    if isinstance(plan, Refusal):
        problem = "it falls back"
    elif module not in recorder.keys:
        problem = "the example step does not call it"
    elif recorder.keys[module] not in recorder.calls:
        problem = "its inputs cannot be copied"
    elif not plan.ops:
        problem = "torch's own kernel runs either way"
    return None if problem is None else CalibrationFinding(problem=problem)


def _stock_class(module: nn.Module) -> type[nn.Module]:
    rule = rule_of(module)
    return type(module) if rule is None else rule.original


def _run(module: nn.Module, inputs: Any, *, trains: bool) -> None:
    args, kwargs = inputs
    with torch.set_grad_enabled(trains):
        outputs = [part for part in tensors_in(module(*args, **kwargs)) if part.requires_grad]
    if outputs:
        leaves = [*tensors_in(inputs), *module.parameters()]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        gradient = torch.ones_like(outputs[0])
        torch.autograd.grad(outputs[0], leaves, gradient, allow_unused=True)


@contextlib.contextmanager
def _classes(
    classes: dict[nn.Module, type], device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """Give modules their classes inside of the block, under autocast as in the example step."""
    before = {module: type(module) for module in classes}
    for module, cls in classes.items():
        module.__class__ = cls
    try:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        for module, cls in before.items():
            module.__class__ = cls


def _measured(module: nn.Module, call: _ModuleCall, deadline: float) -> CalibrationFinding:
    """Time a module patched and stock; an exception becomes a finding as well."""
    device, speed_up = empty_like_parameters(module).device, 0.0
    stock = {part: _stock_class(part) for part in [module, *_does_work_of(module)]}
    variants = [
        Variant(
            name,
            partial(_run, module, trains=call.trains),
            lambda: copied(call.inputs),
            partial(_classes, classes, device, call.autocast),
        )
        for name, classes in ((_STOCK, stock), (_PATCHED, {}))
    ]
    clock = clock_for(device)
    try:
        if time.perf_counter() > deadline:
            return CalibrationFinding(problem="the time for calibration was over")
        for variant in variants:
            clock.sample(variant, 1)  # allocates, and compiles kernels
        seconds = sum(clock.sample(variant, 1)[0] for variant in variants)
        if time.perf_counter() + 2 * (ROUNDS + 1) * seconds > deadline:
            problem = f"both take {1e3 * seconds:.1f} ms, more than there was time for"
            return CalibrationFinding(problem=problem)
        for _ in range(2):  # the second time only if the stock module seems to win
            timing = measure(variants, BriefClock(clock), TimingPlan(ROUNDS, ROUNDS, 0.0))
            ratio = timing.ratio(_STOCK, _PATCHED)
            speed_up = max(speed_up, ratio.median)
            if ratio.q3 >= 1:
                return CalibrationFinding(speed_up, False, call.where)
    except Exception as error:  # a module may want what only its model provides
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        return CalibrationFinding(problem=problem)
    return CalibrationFinding(speed_up, speed_up * (1 + MARGIN) < 1, call.where)


def read(path: str | os.PathLike[str]) -> dict[str, CalibrationFinding]:
    """Return the findings of a file by key; none where it does not exist yet."""
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(
            f"patch: calibrate must name a file in a folder that exists, got {os.fspath(path)}"
        )
    if not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if (data["kind"], data["schema"]) != (_KIND, SCHEMA):
            raise KeyError(f"schema {SCHEMA} of {_KIND}")
        return {str(entry["key"]): _finding(entry) for entry in data["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"patch: calibrate must name a file that calibration has written or may write, "
            f"got {os.fspath(path)} ({type(error).__name__}: {error})"
        ) from None


def _finding(entry: Mapping[str, Any]) -> CalibrationFinding:
    where, wins = str(entry["where"]), entry["stock_wins"] is True
    return CalibrationFinding(float(entry["speed_up"]), wins, where)


def write(path: str | os.PathLike[str], findings: Mapping[str, CalibrationFinding]) -> None:
    """Write what was measured, all or nothing."""
    entries = [
        {"key": key} | {name: value for name, value in asdict(entry).items() if name != "problem"}
        for key, entry in sorted(findings.items())
        if entry.speed_up is not None
    ]
    try:
        files.write_json(path, {"kind": _KIND, "schema": SCHEMA, "entries": entries})
    except files.UserError as error:
        raise OSError(f"patch: {error}") from None
