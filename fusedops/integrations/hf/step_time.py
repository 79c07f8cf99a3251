"""How much of a step runs fused: one step of a model under torch's profiler, by operator and class.

The profiler knows for each operator the modules that are being called, and which operator of the
forward one of the backward belongs to. Only time in operators is counted, on a GPU that of their
kernels: what Python does around them is not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fusedops._core import checks
from fusedops.integrations.hf.report import ModuleReport, StepTime, StockTime

_OURS = ("fusedops::", "fusedops_")
_MODULE = "nn.Module: "
_NO_MODULE = "code outside of modules"


def step_time(
    model: nn.Module, example: Any, modules: tuple[ModuleReport, ...], caller: str
) -> StepTime:
    """Return the time of one step of a model: forward, and backward where it is in training.

    Gradients, buffers and random states are afterwards what they were.

    Args:
        model: patched or not.
        example: of its inputs: keywords as a mapping, positional arguments as a tuple or list, or
            one tensor.
        modules: the report of the model.
        caller: name of the function whose argument ``example`` is.

    Raises:
        TypeError: ``example`` is none of these.
        ValueError: the model does not take it.
    """
    args, kwargs = _arguments(example, caller)
    tensors = [*model.parameters(), *_tensors((args, kwargs))]
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _kept(model):
        try:
            _step(model, args, kwargs)  # allocates, and compiles kernels
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ValueError(
                f"{caller}: example must be inputs that the model takes, got an error from it: "
                f"{type(error).__name__}: {error}"
            ) from error
        with profile(activities=activities, with_stack=True) as record:
            _step(model, args, kwargs)
            if on_gpu:
                torch.cuda.synchronize()
    return _divided(record.events(), on_gpu, modules)


def _arguments(example: Any, caller: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    expected = "a tensor, a tuple of arguments or a mapping of keywords"
    checks.fail_type(caller, "example", expected, example)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Let a step leave no trace in a model and in the random states."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    trains = model.training and any(weight.requires_grad for weight in model.parameters())
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        output = model(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        results = [loss] if loss is not None else list(_tensors(output))
        results = [result for result in results if result.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        for parameter in model.parameters():
            parameter.grad = None


def _divided(events: Any, on_gpu: bool, modules: tuple[ModuleReport, ...]) -> StepTime:
    """Divide the time in operators between fused ops and classes of modules."""
    classes: dict[int, str] = {}  # operator of the forward -> class of the module that called it
    for event in events:
        if event.scope == 0 and event.sequence_nr >= 0 and _is_operator(event):
            classes.setdefault(event.sequence_nr, _class_of(event))
    fused, stock = 0.0, Counter[str]()
    for event in events:
        if not _is_operator(event):
            continue
        time = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if any(part.name.startswith(_OURS) for part in _lineage(event)):
            fused += time
        else:
            stock[_class_in(event, classes)] += time
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


def _class_of(event: Any) -> str:
    """Return the class of the module in whose forward an event happened."""
    for part in _lineage(event):
        if part.name.startswith(_MODULE):
            return str(part.name.removeprefix(_MODULE).rpartition("_")[0])
    return _NO_MODULE


def _class_in(event: Any, classes: dict[int, str]) -> str:
    """Return the class of the module to which an event of the forward or backward belongs."""
    for part in _lineage(event):
        if part.scope == 1 and part.sequence_nr in classes:
            return classes[part.sequence_nr]
    return _class_of(event)
