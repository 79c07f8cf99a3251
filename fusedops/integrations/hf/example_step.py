"""One step of a model with inputs of its user, which leaves no trace in the model, and its time.

The model runs with all that belongs to its forward: hooks, checkpointing, autocast. What a forward
or backward may change is saved before and restored after each run, also if it raises. Torch's
profiler knows for each operator the modules that are being called, and which operator of the
forward one of the backward belongs to. What Python does around operators is not counted.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.report import ModuleReport, StepTime, StockTime
from fusedops.runtime import generators

_OURS = ("fusedops::", "fusedops_")
_MODULE = "nn.Module: "
_NO_MODULE = "code outside of modules"


class ExampleStep:
    """A step of a model: forward, and backward where the model is in training.

    ``example`` is that of ``patch``, ``caller`` the function that got it.

    Raises:
        TypeError: ``example`` is of another type.
        UnsupportedError: an optimizer may step in the backward, or parameters are not initialized.
    """

    def __init__(self, model: nn.Module, example: Any, caller: str) -> None:
        self._inputs = _arguments(example, caller)
        self._caller = caller
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self.model = model
        parameters = list(model.parameters())
        requires_grad = any(parameter.requires_grad for parameter in parameters)
        self.trains = model.training and requires_grad and torch.is_grad_enabled()
        self.on_gpu = any(tensor.is_cuda for tensor in [*parameters, *tensors_in(self._inputs)])
        if any(map(is_lazy, parameters)):
            raise UnsupportedError(
                f"{caller}: example needs initialized parameters: run the model once before"
            )
        for name, parameter in model.named_parameters():
            if self.trains and parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"{caller}: example would run the post-accumulate-grad hook of {name}, which "
                    "may be an optimizer's step: register such hooks after this call"
                )

    def run(
        self, during: contextlib.AbstractContextManager[Any] | None = None
    ) -> set[nn.Parameter]:
        """Run the step; return the parameters that received a gradient.

        ``during`` is entered around the step alone, inside of what restores the state.

        Raises:
            ValueError: the model does not take the inputs, or they cannot be copied.
        """
        with self.unchanged():
            try:
                args, kwargs = copied(self._inputs)
                with during or contextlib.nullcontext():
                    self._step(args, kwargs)
                    if self.on_gpu:
                        torch.cuda.synchronize()
            except (TypeError, ValueError, AttributeError, LookupError) as error:
                raise ValueError(
                    f"{self._caller}: example must be inputs that the model takes, got an error "
                    f"from it: {type(error).__name__}: {error}"
                ) from error
            return {weight for weight in self.model.parameters() if weight.grad is not None}

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.set_grad_enabled(self.trains):
            output = self.model(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        results = [loss] if loss is not None else list(tensors_in(output))
        results = [result for result in results if result.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the model's state and that of random numbers at the end; start without gradients.

        Restored are tensors and their gradients, generators, and the attributes of modules with the
        contents of lists, dictionaries and sets, but not other objects that attributes refer to.
        """
        state = _State(self._copies)
        state.save(self.model)
        devices = {tensor.device.index for tensor in self._copies if tensor.is_cuda}
        states = generators.capture()
        try:
            with torch.random.fork_rng(sorted(devices)):
                yield
        finally:
            generators.restore(states)
            state.restore()


class _State:
    """What a step may change in the modules, containers and tensors that a value refers to."""

    def __init__(self, copies: dict[torch.Tensor, torch.Tensor]) -> None:
        self._copies = copies  # of all runs, since every run restores them
        self._reached: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def save(self, value: Any) -> None:
        """Keep the state of a value and of what it contains, and remove gradients."""
        if id(value) in self._reached:
            return
        self._reached[id(value)] = value
        if isinstance(value, nn.Module):
            self.save(vars(value))
        elif isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not (value.is_meta or value.is_nested):
                self._copies.setdefault(value, _copy(value))
            if value.is_leaf:
                self._undo.append(partial(setattr, value, "grad", value.grad))
                value.grad = None
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, dict | list | set | deque | tuple):
            content = _content(value)
            if not isinstance(value, tuple):
                self._undo.append(partial(_refill, value, content))
            for element in content:
                self.save(element)

    def restore(self) -> None:
        """Give everything the state back that it had; what did not change is not written."""
        for tensor, saved in self._copies.items():
            if not torch.equal(tensor, saved.to(tensor.device)):
                with torch.no_grad():
                    tensor.copy_(saved)
        for undo in self._undo:
            undo()


def _content(container: Any) -> list[Any]:
    """Return the elements of a container; of a dictionary keys and values in turn."""
    if isinstance(container, dict):
        return list(chain.from_iterable(container.items()))
    return list(container)


def _refill(container: Any, content: list[Any]) -> None:
    now = _content(container)
    if len(now) == len(content) and not any(map(is_not, now, content)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; in the memory of the CPU, where a model that fills its GPU fits as well."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.detach().to("cpu", copy=True)
    return tensor.detach().clone()


class _Detaching(TorchFunctionMode):
    """Lets ``deepcopy`` copy tensors that are results of a graph, without the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def copied(value: Any) -> Any:
    """Return a deep copy of inputs; tensors that require a gradient are leaves in it."""
    with _Detaching():
        return copy.deepcopy(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of inputs or outputs in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from tensors_in(element)


def _arguments(example: Any, caller: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, torch.Tensor | tuple | list):
        return (example,) if isinstance(example, torch.Tensor) else tuple(example), {}
    expected = "a tensor, a tuple of arguments or a mapping of keywords"
    checks.fail_type(caller, "example", expected, example)


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
