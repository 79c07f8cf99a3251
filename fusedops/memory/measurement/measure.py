"""``report``: what a step of training holds at its peak, and which tensors make it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops._core.peak import peak_bytes
from fusedops.memory import wrap
from fusedops.memory.layers import names_of, outer_names, runs
from fusedops.memory.measurement import plot
from fusedops.memory.measurement.trace import (
    BACKWARD,
    CAST,
    FORWARD,
    AllocationTrace,
    AllocationTracker,
    PlannedBlock,
)
from fusedops.optim import AdamW

Loss = Callable[[Any], torch.Tensor]
_MIB = 2**20
_TURN = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind at the peak."""

    layer: str  # in whose forward, or backward, they were made; ``""`` outside of all modules
    op: str  # the operator that made them, ``"fusedops::mlp"``
    output: str | None  # the result's name in its schema, or ``None``
    # ``"activation"``, ``"gradient"``, ``"cast"`` (weights in autocast's dtype) or ``"temporary"``
    kind: str
    count: int  # how many
    nbytes: int  # of all of them


@dataclass(frozen=True)
class MemoryReport:
    """What a step holds. ``print`` it for a table; ``svg`` draws it.

    Attributes:
        model: the model's class.
        weights: bytes of its parameters and buffers.
        gradients: bytes of the parameters' gradients.
        states: bytes of the optimizer's states.
        dynamic: bytes above what was allocated before the step, at the peak, temporaries of kernels
            included; the gradients that exist by then are among them.
        named: those of them that are tensors with a name.
        phase: of the peak: ``"forward"`` or ``"backward"``.
        layer: that ran at the peak.
        tensors: what was alive at the peak, largest first.
        timeline: ``(bytes, layer, phase)`` after each change.
    """

    model: str
    weights: int
    gradients: int
    states: int
    dynamic: int
    named: int
    phase: str
    layer: str
    tensors: tuple[Tensors, ...]
    timeline: tuple[tuple[int, str, str], ...]

    @property
    def peak(self) -> int:
        """The bytes of the whole step: static and dynamic."""
        return self.weights + self.states + self.dynamic

    @property
    def activations(self) -> int:
        """The bytes that are live when a backward begins: with several micro-batches the most."""
        pairs = zip(self.timeline, self.timeline[1:], strict=False)
        turns = [before[0] for before, after in pairs if (before[2], after[2]) == _TURN]
        return max(turns, default=0)

    @property
    def layers(self) -> dict[str, dict[str, int]]:
        """The bytes at the peak by layer and kind."""
        layers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for tensor in self.tensors:
            layers[tensor.layer][tensor.kind] += tensor.nbytes
        return {layer: dict(kinds) for layer, kinds in layers.items()}

    def svg(self, title: str = "") -> str:
        """Return the step as a picture: bytes over time, with the layers."""
        return plot.timeline(title or f"{self.model}: memory of one step", {"": self.timeline})

    def record(self, points: int = 400) -> dict[str, Any]:
        """Return the report for a JSON file.

        Args:
            points: of the timeline, about. Changes by less than so small a part of its largest
                value are left out.
        """
        names = ("model", "weights", "gradients", "states", "dynamic", "named", "phase", "layer")
        least = max((nbytes for nbytes, _, _ in self.timeline), default=0) / points
        timeline: list[tuple[int, str, str]] = []
        for point in self.timeline:
            if not timeline or abs(point[0] - timeline[-1][0]) >= least:
                timeline.append(point)
        width = max(1, -(-len(timeline) // points))
        parts = (timeline[i : i + width] for i in range(0, len(timeline), width))
        order = list(dict.fromkeys(layer for _, layer, _ in self.timeline))
        return {name: getattr(self, name) for name in names} | {
            "layers": {layer: self.layers[layer] for layer in order if layer in self.layers},
            "timeline": [max(part) for part in parts],
        }

    def __str__(self) -> str:
        unknown = self.dynamic - self.named
        where = f"in the {self.phase} of {self.layer}" if self.layer else f"in the {self.phase}"
        lines = [
            f"{self.model}: {_size(self.peak)} at the peak, {where}",
            f"  {_size(self.weights):>11}  weights and buffers",
            f"  {_size(self.states):>11}  states of the optimizer",
            f"  {_size(self.dynamic):>11}  allocated by the step, of which",
        ]
        kinds: dict[str, int] = defaultdict(int)
        for tensor in self.tensors:
            kinds[tensor.kind] += tensor.nbytes
        words = {
            "activation": ("activations", "activations, kept for the backward"),
            "gradient": (
                "gradients",
                f"gradients of weights (all of them: {_size(self.gradients)})",
            ),
            CAST: ("casts", "weights in autocast's dtype"),
            "temporary": ("temporary", "tensors that live for a moment"),
        }
        if not kinds[CAST]:
            del words[CAST]
        lines += [f"  {_size(kinds[kind]):>13}  {word}" for kind, (_, word) in words.items()]
        lines.append(f"  {_size(max(0, unknown)):>13}  inside kernels")
        titles = " ".join(f"{title:>12}" for title, _ in words.values())
        lines += ["", f"  {'layer':<28} {titles}"]
        for layer, of in self.layers.items():
            cells = [_size(of.get(kind, 0)) for kind in words]
            lines.append(
                f"  {layer or '(outside)':<28} " + " ".join(f"{cell:>12}" for cell in cells)
            )
        lines += ["", f"  {'largest tensors':<44} {'layer':<24} {'number':>6} {'bytes':>12}"]
        for tensor in self.tensors[:12]:
            made = f"{tensor.op}.{tensor.output}" if tensor.output else tensor.op
            lines.append(
                f"  {made:<44} {tensor.layer or '(outside)':<24} {tensor.count:>6} "
                f"{_size(tensor.nbytes):>12}"
            )
        return "\n".join(lines)


def report(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Run one forward and backward and return the memory in use at its peak.

    Args:
        model: in the mode in which it trains, with the policy that it has. Of one that FSDP2 or
            tensor parallelism has cut, all ranks call this together, and each learns its own bytes.
        batch: what the model is called with: a mapping of arguments, a tuple, or one tensor.
        loss: makes the loss of the model's output; by default the output's ``loss``, the output
            itself where it is a number, or else the mean of its first tensor.
        optimizer: whose states to count, as far as they are where the model is. One that has not
            stepped yet, and has ``betas``, is counted with two states of each parameter, and
            ``fusedops.optim.AdamW`` with those that its options ask for.

    Returns:
        A report; ``print`` it, or write ``report.svg()`` to a file.

    Raises:
        TypeError: an argument has the wrong type, or no loss can be found.

    Note:
        The model runs three times: to let allocators and caches settle, for the number of bytes,
        and for their names. Gradients and the generators' state are as before afterwards; buffers
        that a forward updates are not. Called under autocast, the forward runs under it and the
        backward after it, as in training.

    Example:
        >>> import torch, fusedops
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> found = fusedops.memory.report(model, torch.ones(8, 64))
        >>> found.weights == (64 * 64 + 64) * 4
        True
    """
    checks_of("report", model, loss, optimizer)
    step = ModelStep("report", model, batch, loss)
    trace = trace_of(model)
    with preserve_parameters(model) as parameters:
        with placed(model, AllocationTrace()) as places:
            step.run()
        idle = {name for name, place in places.items() if not place.ran}
        clear(parameters)
        dynamic = step.peak_bytes()
        clear(parameters)
        with placed(model, trace, idle):
            with AllocationTracker(trace):
                step.run()
            gradients = close_trace(trace, parameters)
    return summary(model, trace, dynamic, gradients, state_bytes(optimizer))


def trace_of(model: nn.Module) -> AllocationTrace:
    """Return an empty trace that knows the memory of a model's parameters."""
    return AllocationTrace(frozenset(_memory(parameter) for parameter in model.parameters()))


def close_trace(trace: AllocationTrace, parameters: Iterable[nn.Parameter]) -> int:
    """End a trace after the backward; return the bytes of the parameters' gradients."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    trace.close({_memory(grad) for grad in grads if grad.layout is torch.strided})
    return sum(_local(grad).nbytes for grad in grads)


def summary(
    model: nn.Module, trace: AllocationTrace, dynamic: int, gradients: int, states: int
) -> MemoryReport:
    """Return the report of a trace; ``dynamic``: bytes at the peak, those inside kernels too."""
    live = trace.live_bytes()
    top = max(range(len(live)), key=live.__getitem__) if live else 0
    event = trace.events[top] if live else None
    grouped: dict[tuple[str, str, str | None, str], list[int]] = defaultdict(list)
    for block in trace.alive(top):
        grouped[block.layer, block.op, block.output, block.kind].append(block.nbytes)
    tensors = [Tensors(*key, count=len(sizes), nbytes=sum(sizes)) for key, sizes in grouped.items()]
    named = live[top] if live else 0
    return MemoryReport(
        model=type(model).__name__,
        weights=static_bytes(model),
        gradients=gradients,
        states=states,
        dynamic=max(dynamic, named),
        named=named,
        phase=event.phase if event is not None else "forward",
        layer=event.layer if event is not None else "",
        tensors=tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes)),
        timeline=tuple((n, e.layer, e.phase) for n, e in zip(live, trace.events, strict=True)),
    )


def checks_of(op: str, model: Any, loss: Any, optimizer: Any) -> None:
    """Raise where an argument has the wrong type."""
    checks.module(op, model)
    if loss is not None and not callable(loss):
        checks.fail_type(op, "loss", "a function", loss)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        checks.fail_type(op, "optimizer", "a torch.optim.Optimizer", optimizer)


def static_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers that are here, shared ones once."""
    tensors = {id(parameter): parameter for parameter in (*model.parameters(), *model.buffers())}
    return sum(_local(tensor).nbytes for tensor in tensors.values())


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's states, without parameters, or what they will be."""
    if optimizer is None:
        return 0
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    if not optimizer.state and "betas" in optimizer.defaults:
        return sum(
            _local(parameter).numel() * _bytes_of_states(optimizer, parameter)
            for parameter in parameters
        )
    return sum(
        _local(value).nbytes
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device == param.device
    )


def _bytes_of_states(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> int:
    """Return the bytes of states of each element of a parameter that was not stepped yet."""
    if not isinstance(optimizer, AdamW):
        return 2 * param.element_size()
    storage = optimizer.policy.storage(param)
    return 2 * storage.moments.itemsize + (storage.master.itemsize if storage.master else 0)


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is here: all of it, unless it is a DTensor."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def _memory(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


@contextlib.contextmanager
def preserve_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters, without gradients; everything is as before afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    devices = {parameter.device for parameter in parameters if parameter.device.type == "cuda"}
    with torch.random.fork_rng(list(devices), device_type="cuda"):
        clear(parameters)
        try:
            yield parameters
        finally:
            for parameter, grad in zip(parameters, gradients, strict=True):
                parameter.grad = grad


def clear(parameters: list[nn.Parameter]) -> None:
    """Take the gradients away."""
    for parameter in parameters:
        parameter.grad = None


@contextlib.contextmanager
def _autocast_left(kind: str) -> Iterator[None]:
    """Be outside of the caller's autocast for a moment, and let go of its copies of weights."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


@dataclass(frozen=True)
class ModelStep:
    """A forward and a backward of a model, as ``report`` and ``fit`` run it."""

    op: str  # which of them
    model: nn.Module
    batch: Any
    loss: Loss | None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameters = self.model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def forward(self) -> torch.Tensor:
        """Run the model forward and return its loss."""
        torch.clear_autocast_cache()  # each training step casts its weights
        if isinstance(self.batch, Mapping):
            output = self.model(**self.batch)
        elif isinstance(self.batch, (tuple, list)):
            output = self.model(*self.batch)
        else:
            output = self.model(self.batch)
        value = self.loss(output) if self.loss is not None else _default_loss(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise TypeError(
                f"{self.op}: no loss was found in the model's output "
                f"({checks.type_name(output)}): give loss, a function of the output that returns "
                "a number with a gradient"
            )
        return value

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward, outside of the caller's autocast."""
        with _autocast_left(self.device.type):
            loss.backward()

    def run(self) -> None:
        """Run the model forward and backward."""
        self.backward(self.forward())

    def peak_bytes(self) -> int:
        """Return the bytes that a step holds above what was there before it, at its peak."""
        return peak_bytes(self.run, self.device)


def _default_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else output.float().mean()
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else output
    with contextlib.suppress(TypeError):
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
        return None if first is None else first.float().mean()
    return None


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f} MiB" if nbytes >= _MIB / 10 else f"{nbytes / 1024:.1f} KiB"


@contextlib.contextmanager
def placed(
    model: nn.Module, trace: AllocationTrace, idle: Collection[str] = ()
) -> Iterator[dict[str, PlannedBlock]]:
    """Let the layers say where the step is, but those whose work a fused parent does.

    The forward of ``idle`` layers does not run: their parts, called from outside, speak for them.
    """
    places: dict[str, PlannedBlock] = {}
    named = dict(model.named_modules())
    before = {module for module in named.values() if wrap.unsupported_reason(module) is not None}
    try:
        for name, layer in names_of(model).items():
            speaks = name and (name == layer or layer in idle) and runs(named.get(name))
            if not speaks:
                continue
            places[name] = PlannedBlock(trace, layer)
            wrap.wrap(named[name], places[name])
            above = [named[parent_name] for parent_name in ("", *outer_names(name), name)]
            if any(
                wrap.unsupported_reason(parent) is not None and parent not in before
                for parent in above
            ):
                wrap.unwrap(named[name])
                del places[name]
        yield places
    finally:
        for name in places:
            wrap.unwrap(named[name])
