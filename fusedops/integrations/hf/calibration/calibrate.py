"""Which wins on this machine, the patched module or the stock one: ``patch(..., calibrate=True)``.

Each class and shape of module is measured once per process, alone, on random rows of the size that
its weights declare: forward, and backward where the model trains, the two interleaved. Where the
stock module is faster the patch is undone. What the fused forward of a module does
for its children counts for the module; they are measured only when it has lost. Children that it
calls are measured on their own, and only replayed meanwhile (``calibration_replay.py``).

A module whose inputs are not known, or that raises, stays patched and is listed as not measured.
Weights, their gradients and the state of the random numbers stay as they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import backends
from fusedops._core.architecture import architecture
from fusedops._core.dtypes import autocast_dtype
from fusedops._core.timer import BriefClock, Clock, TimingPlan, Variant, clock_for, measure
from fusedops.integrations.hf.calibration.inputs import UnknownError, inputs, width
from fusedops.integrations.hf.calibration.replay import Recording, called
from fusedops.integrations.hf.calibration.timing import TimeShares
from fusedops.integrations.hf.rules.probes import empty_like_parameters
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    Plan,
    absorbed,
    global_hooks,
    hooks_obstacle,
    is_plain,
    rule_of,
)

# Seconds for one model.
BUDGET = 2.0
# The stock module has to win by this much, in three rounds of four and in two measurements: else
# the next run could tell the contrary.
MARGIN = 0.05
ROUNDS = 5
_RUNS = 2 * (ROUNDS + 1)
# Fewer rows than the fewest say how weights are read, not how fast the products of a batch are.
_PROBED_ROWS, _FEWEST_ROWS, _MOST_ROWS = 16, 64, 1024
_STOCK, _PATCHED = "stock", "patched"

# What distinguishes two modules of one class, in addition to the shapes of their parameters.
_SETTINGS = (int, float, str, bool)
_PLACE = ("layer_idx", "layer_id", "training")


@dataclass(frozen=True)
class CalibrationFinding:
    """What was found of one class and shape."""

    # Time of the stock module divided by the patched one's, median of the rounds; ``None`` where it
    # was not measured
    speed_up: float | None = None
    sure: bool = False  # whether the stock module won in three rounds of four, measured twice
    where: str = ""  # dtype and rows, ``"bfloat16, 1024x512"``
    problem: str = ""  # why it was not measured
    for_want_of_time: bool = False  # whether another calibration may measure it

    @property
    def stock_wins(self) -> bool:
        """Whether the stock module is to stay."""
        return self.speed_up is not None and self.sure and self.speed_up * (1 + MARGIN) < 1

    def __str__(self) -> str:
        if self.speed_up is None:
            return f"not measured: {self.problem}"
        kept = "stock kept: " if self.stock_wins else ""
        return f"{kept}{self.speed_up:.2f}x measured on this machine, {self.where}"


# Findings measured once per process, and the finding of each module, for its report.
_FOUND: dict[str, CalibrationFinding] = {}
_FINDINGS: weakref.WeakKeyDictionary[nn.Module, CalibrationFinding] = weakref.WeakKeyDictionary()


def finding_of(module: nn.Module) -> CalibrationFinding | None:
    """Return what calibration found of a module, ``None`` where it was not asked."""
    return _FINDINGS.get(module)


def forget(model: nn.Module) -> None:
    """Let the modules of a model be as before calibration; what was measured stays known."""
    for module in model.modules():
        _FINDINGS.pop(module, None)


def clear() -> None:
    """Forget all that was measured in this process."""
    _FOUND.clear()


def calibrate(
    model: nn.Module, known: Mapping[str, CalibrationFinding]
) -> dict[str, CalibrationFinding]:
    """Take the patched class from each module of ``model`` whose stock forward is faster here.

    What is ``known`` is not measured. Return the findings of all modules by key.
    """
    time = TimeShares(BUDGET, _RUNS)
    findings: dict[str, CalibrationFinding] = {}
    seen: set[nn.Module] = set()
    while todo := _to_decide(model, seen):
        _decide(model, todo, findings, {**_FOUND, **known}, time)
        seen.update(todo)
    unknown = CalibrationFinding()
    late = [module for module in seen if (finding_of(module) or unknown).for_want_of_time]
    if late and time.left() > 0:  # what the others have left over
        _decide(model, late, findings, {}, time)
    return findings


def _to_decide(model: nn.Module, seen: set[nn.Module]) -> list[nn.Module]:
    """Return the patched modules that do work of their own now, and were not asked yet."""
    done = seen.union(*(_does_work_of(module) for module in model.modules()))
    return [
        module for module in model.modules() if rule_of(module) is not None and module not in done
    ]


def _decide(
    model: nn.Module,
    modules: list[nn.Module],
    findings: dict[str, CalibrationFinding],
    known: Mapping[str, CalibrationFinding],
    time: TimeShares,
) -> None:
    """Measure what is not known of some modules, tell each, and let stock ones stay that win."""
    keys = {module: _key(module) for module in sorted(modules, key=_size)}
    sizes = {key: _size(module) for module, key in keys.items()}
    findings |= {key: known[key] for key in sizes.keys() & known.keys() - findings.keys()}
    done = {key for key, finding in findings.items() if not finding.for_want_of_time}
    time.plan({key: size for key, size in sizes.items() if key not in done})
    for module, key in keys.items():
        rule: Any = rule_of(module)
        problem = _problem(module, rule)
        if problem is not None:
            _FINDINGS[module] = CalibrationFinding(problem=problem)
            continue
        if key not in done:
            done.add(key)
            findings[key] = _measured(module, model, time.take(key), time)
            if not findings[key].for_want_of_time:
                _FOUND[key] = findings[key]
        finding = _FINDINGS[module] = findings[key]
        if finding.stock_wins:
            module.__class__ = rule.original


def _size(module: nn.Module) -> int:
    """Return the number of weights that ``module`` reads itself, without the children it calls."""
    children = called(module, set(_does_work_of(module)))
    apart = {weight for child in children for weight in child.parameters()}
    return sum(weight.numel() for weight in module.parameters() if weight not in apart)


def _does_work_of(module: nn.Module) -> list[nn.Module]:
    """Return all modules below ``module`` that its fused forward does not call now."""
    names = absorbed(module)  # some families of a rule lack a child that others have
    below = [child for name, child in module.named_modules() if name in names]
    return [part for child in below for part in child.modules()]


def _key(module: nn.Module) -> str:
    """Return in one line what a finding holds for: class, shapes, settings, dtype and device."""
    cls = _stock_class(module)
    example = empty_like_parameters(module)
    shapes = [f"{name}{list(weight.shape)}" for name, weight in module.named_parameters()]
    settings = [
        f"{name}={value}"
        for name, value in sorted(vars(module).items())
        if isinstance(value, _SETTINGS) and not name.startswith("_") and name not in _PLACE
    ]
    device = architecture(example.device)
    if example.device.type == "cpu":
        device += f", {torch.get_num_threads()} threads"
    if (asked := backends.requested()) is not None:
        device += f", {asked} asked for"
    return "; ".join(
        (
            f"{cls.__module__}.{cls.__qualname__}",
            " ".join(shapes),
            " ".join(settings),
            _dtype(example),
            "training" if _trains(module) else "evaluation",
            device,
        )
    )


def _dtype(example: torch.Tensor) -> str:
    """Return the dtype of the weights, and that of autocast where it is on."""
    own = str(example.dtype).removeprefix("torch.")
    lower = autocast_dtype(example.device)
    return own if lower is None else f"{own} under autocast to {str(lower).removeprefix('torch.')}"


def _trains(module: nn.Module) -> bool:
    return (
        module.training
        and torch.is_grad_enabled()
        and any(weight.requires_grad for weight in module.parameters())
    )


def _measured(
    module: nn.Module, model: nn.Module, share: float, time: TimeShares
) -> CalibrationFinding:
    """Measure a module for about ``share`` seconds; an exception becomes a finding as well."""
    if share <= 0:
        return CalibrationFinding(
            problem="the time for calibration was over", for_want_of_time=True
        )
    rule: Any = rule_of(module)
    plan = rule.current_plan(module)
    if isinstance(plan, Plan) and not plan.ops:
        return CalibrationFinding(problem="torch's own kernel runs either way")
    devices = (
        [empty_like_parameters(module).device] if empty_like_parameters(module).is_cuda else []
    )
    try:
        with torch.random.fork_rng(devices):
            return _Pair(module, rule, model).compare(share, time)
    except UnknownError as error:
        return CalibrationFinding(problem=str(error))
    except Exception as error:  # whatever a module wants that was not thought of
        first = (str(error).strip().splitlines() or [""])[0]
        return CalibrationFinding(problem=f"{type(error).__name__}: {first}")


def _problem(module: nn.Module, rule: PatchRule) -> str | None:
    """Return why this module, whatever others of its class may, must not be run, or ``None``."""
    if type(module) is not rule.patched:
        return "another class lies on top of the patched one"
    if rule.bypass_reason(module) is not None:
        return "it steps aside"
    parameters = list(module.parameters())
    if any(weight.is_meta for weight in parameters):
        return "its parameters are on no device"
    if not all(map(is_plain, parameters)) or any(hasattr(p, "ds_shape") for p in parameters):
        return "its parameters are not plain tensors"
    if any(_drops(module, name) for name in absorbed(module) if "." in name):
        # At the end of a child, which would be replayed with it.
        return "it does the dropout of its children"
    for name, child in module.named_modules():
        reason = hooks_obstacle(name or "it", child)
        if reason is not None:
            return reason
    return global_hooks()


def _drops(module: nn.Module, name: str) -> bool:
    child = module.get_submodule(name)
    return isinstance(child, nn.Dropout) and child.training and child.p > 0


def _too_long(rows: int, seconds: float, take: str) -> CalibrationFinding:
    took = f"{rows} rows {take} {1e3 * seconds:.1f} ms"
    return CalibrationFinding(
        problem=f"{took}, more than there was time for", for_want_of_time=True
    )


def _stock_class(module: nn.Module) -> type[nn.Module]:
    rule = rule_of(module)
    return type(module) if rule is None else rule.original


class _Pair:
    """A module with its patched classes and with its original ones."""

    def __init__(self, module: nn.Module, rule: PatchRule, model: nn.Module) -> None:
        self.module, self.rule, self.model = module, rule, model
        self.trains = _trains(module)
        inside = _does_work_of(module)
        parts = [module, *inside]
        self.patched = {part: type(part) for part in parts}
        self.stock = {part: _stock_class(part) for part in parts}
        self.children = Recording(called(module, set(inside)))
        self.leaves: list[torch.Tensor] = []
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.grad: torch.Tensor | None = None

    def compare(self, share: float, time: TimeShares) -> CalibrationFinding:
        """Time both alternately, on as many rows as fit into ``share`` seconds."""
        clock = clock_for(empty_like_parameters(self.module).device)
        affordable, size = share / time.runs, _size(self.module)
        if time.expected(size) > affordable:
            return _too_long(_FEWEST_ROWS, time.expected(size), "would take about")
        for rows in (_PROBED_ROWS, _FEWEST_ROWS):
            self._give(rows)
            seconds = max(self._once(clock, name) for name in (_STOCK, _PATCHED))
            time.learn(size, seconds)
            if seconds > affordable:
                return _too_long(rows, seconds, "take")
        while 2 * rows <= _MOST_ROWS and 2 * seconds <= affordable:
            rows, seconds = 2 * rows, 2 * seconds
        self._give(rows)
        speed_up, lost = self._measure(clock)
        if lost:  # it is heard twice
            again, lost = self._measure(clock)
            speed_up = max(speed_up, again)
        where = (
            f"{_dtype(empty_like_parameters(self.module))}, {rows}x{width(self.module, self.model)}"
        )
        return CalibrationFinding(speed_up, lost, where)

    def _measure(self, clock: Clock) -> tuple[float, bool]:
        """Return time of stock divided by patched, and whether stock won in most rounds."""
        variants = [self._variant(name) for name in (_STOCK, _PATCHED)]
        timing = measure(variants, BriefClock(clock), TimingPlan(ROUNDS, ROUNDS, 0.0))
        ratio = timing.ratio(_STOCK, _PATCHED)
        return ratio.median, ratio.q3 < 1

    def _give(self, rows: int) -> None:
        """Make the arguments for so many rows, and the gradient of what comes out."""
        self.leaves, self.args, self.kwargs = inputs(self.module, self.rule, self.model, rows)
        for leaf in self.leaves:
            leaf.requires_grad_(self.trains)
        with self._classes(_STOCK), self.children.recording(), torch.no_grad():
            self.grad = torch.randn_like(self._forward())

    def _forward(self) -> torch.Tensor:
        output = self.module(*self.args, **self.kwargs)
        while not isinstance(output, torch.Tensor):
            output = output[0]
        return output

    def _run(self) -> None:
        with torch.set_grad_enabled(self.trains):
            output = self._forward()
        if self.trains:
            leaves = [*self.leaves, *self.module.parameters()]
            leaves = [leaf for leaf in leaves if leaf.requires_grad]
            torch.autograd.grad(output, leaves, self.grad, allow_unused=True)

    def _variant(self, name: str) -> Variant:
        return Variant(name, lambda _: self._run(), context=lambda: self._as(name))

    @contextlib.contextmanager
    def _as(self, name: str) -> Iterator[None]:
        with self._classes(name), self.children.replaying():
            yield

    def _once(self, clock: Clock, name: str) -> float:
        """Return the seconds of a second run: the first finds caches and libraries cold."""
        variant = self._variant(name)
        clock.sample(variant, 1)
        return clock.sample(variant, 1)[0]

    @contextlib.contextmanager
    def _classes(self, name: str) -> Iterator[None]:
        classes = self.stock if name == _STOCK else self.patched
        for module, cls in classes.items():
            module.__class__ = cls
        try:
            yield
        finally:
            for module, cls in self.patched.items():
                module.__class__ = cls
