"""How much of a step runs fused: one step of a model under torch's profiler, by operator and class.

The profiler knows for each operator the modules that are being called, and which operator of the
forward one of the backward belongs to. What Python does around operators is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from fusedops.integrations.hf.example_step import ExampleStep
from fusedops.integrations.hf.report import ModuleReport, StepTime, StockTime

_OURS = ("fusedops::", "fusedops_")
_MODULE = "nn.Module: "
_NO_MODULE = "code outside of modules"


def step_time(step: ExampleStep, modules: tuple[ModuleReport, ...]) -> StepTime:
    """Return the time of one step of a model in its current state, which has run before."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.on_gpu else [])]
    record = profile(activities=activities, with_stack=True)
    step.run(record)
    return _divided(record.events(), step.on_gpu, modules)


def _divided(events: Any, on_gpu: bool, modules: tuple[ModuleReport, ...]) -> StepTime:
    classes: dict[int, str] = {}  # operator of the forward -> class of the module that called it
    for event in events:
        if event.scope == 0 and event.sequence_nr >= 0 and _is_operator(event):
            classes.setdefault(event.sequence_nr, _class_of(event, {}))
    fused, stock = 0.0, Counter[str]()
    for event in events:
        if not _is_operator(event):
            continue
        time = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if any(part.name.startswith(_OURS) for part in _lineage(event)):
            fused += time
        else:
            stock[_class_of(event, classes)] += time
    reasons = {entry.cls: entry.reason for entry in modules if not entry.replaced}
    listed = [StockTime(name, time, reasons.get(name)) for name, time in stock.most_common()]
    return StepTime(fused + stock.total(), fused, tuple(listed))


def _is_operator(event: Any) -> bool:
    return "::" in event.name and not event.name.startswith(("autograd::", "cuda"))


def _lineage(event: Any) -> Iterator[Any]:
    """Yield an event and those inside of which it happened, the nearest first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _class_of(event: Any, classes: dict[int, str]) -> str:
    """Return the class of the module to which an event of the forward or backward belongs."""
    for part in _lineage(event):
        if part.scope == 1 and part.sequence_nr in classes:
            return classes[part.sequence_nr]
    for part in _lineage(event):
        if part.name.startswith(_MODULE):
            return str(part.name.removeprefix(_MODULE).rpartition("_")[0])
    return _NO_MODULE
