"""``report`` and ``StepMemory``: the memory of a training step at its peak, by tensor."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fusedops.memory.measurement.step import Loss, ModelStep, check_arguments, preserve_gradients
from fusedops.memory.measurement.trace import (
    BACKWARD,
    CAST,
    FORWARD,
    AllocationTrace,
    layer_markers,
)
from fusedops.optim import AdamW
from fusedops.runtime.peak import peak_bytes
from fusedops.terminal import memory_plot

_MIB = 2**20
_POINTS = 400  # of a recorded timeline, about: each is the largest of several changes
# Kinds of tensors: the title of the column, and a line of the summary.
_KINDS = {
    "activation": ("activations", "activations, kept for the backward"),
    "gradient": ("gradients", "gradients of weights (all of them: {gradients})"),
    CAST: ("casts", "weights in autocast's dtype"),
    "temporary": ("temporary", "tensors that live for a moment"),
}


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
        turn = (FORWARD, BACKWARD)
        return max((one[0] for one, two in pairs if (one[2], two[2]) == turn), default=0)

    @property
    def layers(self) -> dict[str, dict[str, int]]:
        """The bytes at the peak by layer and kind."""
        layers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for tensor in self.tensors:
            layers[tensor.layer][tensor.kind] += tensor.nbytes
        return {layer: dict(kinds) for layer, kinds in layers.items()}

    def svg(self) -> str:
        """Return the step as a picture: bytes over time, with the layers."""
        return memory_plot.timeline(f"{self.model}: memory of one step", {"": self.timeline})

    def record(self) -> dict[str, Any]:
        """Return the report for a JSON file."""
        names = ("model", "weights", "gradients", "states", "dynamic", "named", "phase", "layer")
        width = max(1, -(-len(self.timeline) // _POINTS))
        parts = (self.timeline[i : i + width] for i in range(0, len(self.timeline), width))
        order = list(dict.fromkeys(layer for _, layer, _ in self.timeline))
        return {name: getattr(self, name) for name in names} | {
            "layers": {layer: self.layers[layer] for layer in order if layer in self.layers},
            "timeline": [max(part) for part in parts],
        }

    def __str__(self) -> str:
        kinds = Counter[str]()
        for tensor in self.tensors:
            kinds[tensor.kind] += tensor.nbytes
        shown = [kind for kind in _KINDS if kind != CAST or kinds[CAST]]
        lines = [
            f"{self.model}: {format_bytes(self.peak)} at the peak, in the {self.phase}"
            + (f" of {self.layer}" if self.layer else ""),
            f"  {format_bytes(self.weights):>11}  weights and buffers",
            f"  {format_bytes(self.states):>11}  states of the optimizer",
            f"  {format_bytes(self.dynamic):>11}  allocated by the step, of which",
        ]
        for kind in shown:
            text = _KINDS[kind][1].format(gradients=format_bytes(self.gradients))
            lines.append(f"  {format_bytes(kinds[kind]):>13}  {text}")
        inside_kernels = max(0, self.dynamic - self.named)
        lines.append(f"  {format_bytes(inside_kernels):>13}  inside kernels")
        titles = "".join(f" {_KINDS[kind][0]:>12}" for kind in shown)
        lines += ["", f"  {'layer':<28}{titles}"]
        for layer, sizes in self.layers.items():
            cells = "".join(f" {format_bytes(sizes.get(kind, 0)):>12}" for kind in shown)
            lines.append(f"  {layer or '(outside)':<28}{cells}")
        lines += ["", f"  {'largest tensors':<44} {'layer':<24} {'number':>6} {'bytes':>12}"]
        for tensor in self.tensors[:12]:
            name = f"{tensor.op}.{tensor.output}" if tensor.output else tensor.op
            lines.append(
                f"  {name:<44} {tensor.layer or '(outside)':<24} {tensor.count:>6} "
                f"{format_bytes(tensor.nbytes):>12}"
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
    check_arguments("report", model, loss, optimizer)
    step = ModelStep("report", model, batch, loss)
    watched = StepMemory(model, optimizer)
    with preserve_gradients(model):
        with watched.prepare():
            step.run()
        model.zero_grad()
        dynamic = peak_bytes(step.run, step.device)
        model.zero_grad()
        with watched.record():
            step.run()
    assert watched.report is not None
    return replace(watched.report, dynamic=max(dynamic, watched.report.named))


class StepMemory:
    """Records what one step of a training loop allocates, by layer and kind.

    ``report`` runs a step of its own; this class looks at one that a loop makes, with its
    micro-batches, pipeline and mesh. It needs two steps: in the first one it finds which layers
    run, and it records the second one. The step's values do not change; the recorded step takes
    longer.

    Args:
        model: that is trained, in the mode and with the policy that it has.
        optimizer: whose states are counted.

    Attributes:
        report: of the recorded step; ``None`` before. Bytes inside kernels are not in it.

    Raises:
        TypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> from fusedops.memory import StepMemory
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> memory = StepMemory(model)
        >>> with memory.prepare():
        ...     model(torch.ones(8, 64)).sum().backward()
        >>> with memory.record():
        ...     model(torch.ones(8, 64)).sum().backward()
        >>> sorted(memory.report.layers)
        ['', '0', '1']
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        check_arguments("StepMemory", model, None, optimizer)
        self._model, self._optimizer = model, optimizer
        self._idle: frozenset[str] = frozenset()
        self.report: MemoryReport | None = None

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Find out which layers run in the forward and backward of the block."""
        with layer_markers(self._model, AllocationTrace(self._model)) as markers:
            yield
        self._idle = frozenset(name for name, marker in markers.items() if not marker.ran)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward and backward of the block; ``report`` is set at its end."""
        trace = AllocationTrace(self._model)
        with layer_markers(self._model, trace, self._idle):
            with trace:
                yield
            parameters = self._model.parameters()
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            trace.close(grads)
        self.report = self._report(trace, sum(_local_bytes(grad) for grad in grads))

    def _report(self, trace: AllocationTrace, gradients: int) -> MemoryReport:
        timeline = trace.timeline or [(0, "", FORWARD)]
        peak = max(range(len(timeline)), key=lambda point: timeline[point][0])
        named, layer, phase = timeline[peak]
        sizes: dict[tuple[str, str, str | None, str], list[int]] = defaultdict(list)
        for block in trace.live_blocks(peak):
            sizes[block.layer, block.op, block.output, block.kind].append(block.nbytes)
        tensors = [Tensors(*key, len(nbytes), sum(nbytes)) for key, nbytes in sizes.items()]
        return MemoryReport(
            model=type(self._model).__name__,
            weights=static_bytes(self._model),
            gradients=gradients,
            states=state_bytes(self._optimizer),
            dynamic=named,
            named=named,
            phase=phase,
            layer=layer,
            tensors=tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes)),
            timeline=tuple(trace.timeline),
        )


def static_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers on this rank, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(map(_local_bytes, tensors.values()))


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's states, without parameters, or what they will be."""
    if optimizer is None:
        return 0
    if not optimizer.state and "betas" in optimizer.defaults:
        parameters = (param for group in optimizer.param_groups for param in group["params"])
        return sum(_future_state_bytes(optimizer, param) for param in parameters)
    return sum(
        _local_bytes(value)
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device == param.device
    )


def _future_state_bytes(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> int:
    """Return the bytes of the states of a parameter that was not stepped yet."""
    if not isinstance(optimizer, AdamW):
        return 2 * _local_bytes(param)
    storage = optimizer.policy.storage(param)
    element = 2 * storage.moments.itemsize + (storage.master.itemsize if storage.master else 0)
    return _local_bytes(param) // param.element_size() * element


def _local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, of a DTensor those of the shard on this rank."""
    return int(getattr(tensor, "_local_tensor", tensor).nbytes)


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes in MiB or, if it is small, in KiB."""
    return f"{nbytes / _MIB:.2f} MiB" if nbytes >= _MIB / 10 else f"{nbytes / 1024:.1f} KiB"
