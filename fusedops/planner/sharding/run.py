"""Applying a plan: DTensor parameters, and a forward that runs with the plan's placements.

The forward runs the steps of the traced graph on each rank's local tensors; tensors are moved where
the plan says, through DTensor's differentiable redistribution. Gradients therefore arrive in the
placements of the parameters. Every kind of input (shapes, dtypes, train or eval) is traced once,
when it first comes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from fusedops._core.device_tensors import device_tensor
from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.evaluate import Evaluator, WalkState, evaluator_for
from fusedops.planner.sharding.rules import LOCAL_FORMS
from fusedops.planner.sharding.strategies import StepPlacement
from fusedops.planner.sharding.trace import (
    OP,
    FakeModel,
    GraphStep,
    ValueRef,
    arguments_by_name,
    short_name,
    substituted,
)

_LARGEST_SEED = 2**62


class TracedModel(NamedTuple):
    """A model without data, and the costs of its graph for one kind of inputs."""

    fake: FakeModel
    key: Any  # of ``call_key``: what the graph depends on
    evaluator: Evaluator


def apply_placements(
    model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placements], traced: TracedModel
) -> nn.Module:
    """Distribute a model's parameters, replace its forward, and return it."""
    _check(model, {name: meta.shape for name, meta in traced.evaluator.parameters.items()})
    distribute: Any = distribute_tensor  # sends the values of the mesh's first rank
    everywhere = tuple(Replicate() for _ in range(mesh.ndim))
    seed = device_tensor([torch.initial_seed() % _LARGEST_SEED], torch.int64, mesh.device_type)
    agreed_seed = int(distribute(seed, mesh, everywhere).to_local())
    distributed: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        sharded = distribute(parameter.detach(), mesh, placements[name])
        distributed[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = distributed[id(old)]
    for buffer in model.buffers():
        if buffer.device.type != "meta":
            with torch.no_grad():
                first = distribute(buffer.detach().clone(), mesh, everywhere)
                buffer.copy_(first.to_local())
    forward: Any = PlannedForward(model, mesh, placements, traced, agreed_seed)
    model.forward = forward
    return model


def _check(model: nn.Module, planned: Mapping[str, tuple[int, ...]]) -> None:
    parameters = dict(model.named_parameters())
    own = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name in {**own, **planned}:
        if isinstance(parameters.get(name), DTensor):
            raise ValueError(f"{OP}: {name} is a DTensor already: apply a plan to a plain model")
        if own.get(name) != planned.get(name):
            shapes = (shape.get(name, "no such parameter") for shape in (own, planned))
            raise ValueError(
                f"{OP}: the model and the plan differ in {name}: {' and '.join(map(str, shapes))}"
            )


def call_key(model: nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return the flattened inputs of a call, and what its graph depends on."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shown = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    )
    modes = tuple(module.training for module in model.modules())
    cast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
    return leaves, (str(spec), shown, modes, cast)


class _Share(torch.autograd.Function):
    """A rank's summand of a replicated tensor: ``x / n``; its gradient is that of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _PlacedGraph(NamedTuple):
    evaluator: Evaluator
    choices: list[StepPlacement]  # one for each step
    last_use: dict[int, int]  # by value: the step after which it is not needed


class PlannedForward:
    """The forward of a model to which a plan has been applied; new kinds of inputs are traced.

    Random operators draw from generators that are made of the seed, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        placements: Mapping[str, Placements],
        traced: TracedModel,
        seed: int,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._replicated = traced.evaluator.placer.replicated
        self._fake = traced.fake
        self._placements = dict(placements)
        self._device = traced.evaluator.placer.costs.device
        self._seed = seed
        self._calls = itertools.count()
        self._graphs = {traced.key: self._placed(traced.evaluator)}

    def _wrapped(self, tensor: torch.Tensor, placements: Placements, **sizes: Any) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False, **sizes)

    def _full(self, value: DTensor) -> torch.Tensor:
        everywhere = self._replicated
        return value.redistribute(placements=everywhere).to_local(grad_placements=everywhere)

    def _placed(self, evaluator: Evaluator) -> _PlacedGraph:
        graph = evaluator.graph
        stored = {number: self._placements[name] for number, name in graph.parameters.items()}
        choices: list[StepPlacement] = []
        evaluator.walk(((step, 1) for step in graph.steps), WalkState(), stored, choices)
        last_use = {number: i for i, step in enumerate(graph.steps) for number in step.inputs}
        kept = [output.number for output in graph.outputs if isinstance(output, ValueRef)]
        last_use |= dict.fromkeys([*kept, *graph.mutations.values()], len(graph.steps))
        return _PlacedGraph(evaluator, choices, last_use)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on full tensors of the global batch, the same on every rank."""
        leaves, key = call_key(self._model, args, kwargs)
        if key not in self._graphs:
            modules = zip(self._model.modules(), self._fake.module.modules(), strict=True)
            for module, traced in modules:
                traced.training = module.training
            evaluator = evaluator_for(self._fake, self._mesh, self._device, args, kwargs)
            self._graphs[key] = self._placed(evaluator)
        placed = self._graphs[key]
        graph = placed.evaluator.graph
        with torch.autocast(self._mesh.device_type, enabled=False):  # casts are in the graph
            values = self._run(placed, leaves)
            outputs = [
                self._full(values[output.number]) if isinstance(output, ValueRef) else output
                for output in graph.outputs
            ]
            with torch.no_grad():
                for name, number in graph.mutations.items():
                    self._model.get_buffer(name).copy_(self._full(values[number]))
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def _run(self, placed: _PlacedGraph, leaves: list[Any]) -> dict[int, DTensor]:
        """Run the steps; return the values that are needed afterwards."""
        graph, call = placed.evaluator.graph, next(self._calls)
        values = self._loaded(placed.evaluator, leaves)
        moved: dict[int, dict[Placements, DTensor]] = {}
        for index, (step, choice) in enumerate(zip(graph.steps, placed.choices, strict=True)):
            tensors = []
            for number, target, gradient in zip(
                step.inputs, choice.inputs, choice.gradients, strict=True
            ):
                value = values[number]
                if tuple(value.placements) != target:
                    copies = moved.setdefault(number, {})
                    if target not in copies:
                        copies[target] = self._moved(value, target)
                    value = copies[target]
                tensors.append(value.to_local(grad_placements=gradient))
            random = self._random(choice, call, index) if step.random else contextlib.nullcontext()
            with random:
                results = self._local(step, choice, tensors)
            for number, result, place in zip(step.outputs, results, choice.outputs, strict=True):
                if number >= 0:
                    meta = graph.values[number]
                    shape = torch.Size(meta.shape)
                    values[number] = self._wrapped(result, place, shape=shape, stride=meta.stride)
            for number in step.inputs:
                if placed.last_use[number] == index:
                    values.pop(number, None)
                    moved.pop(number, None)
        return values

    def _loaded(self, evaluator: Evaluator, leaves: list[Any]) -> dict[int, DTensor]:
        """Return parameters, buffers, constants and inputs where the steps find them."""
        values, graph = {}, evaluator.graph
        for number, name in graph.parameters.items():
            parameter: Any = self._model.get_parameter(name)
            # Also without a move: its backward sums partial gradients.
            used = evaluator.use_placements(parameter.placements)
            values[number] = parameter.redistribute(placements=used)
        for number, name in graph.buffers.items():
            values[number] = self._wrapped(self._model.get_buffer(name), self._replicated)
        for number, tensor in graph.constants.items():
            local = tensor.to(self._mesh.device_type)
            values[number] = self._wrapped(local, self._replicated)
        for number, position in graph.inputs.items():
            value = self._wrapped(leaves[position], self._replicated)
            values[number] = value.redistribute(placements=evaluator.input_placements(number))
        return values

    def _local(
        self, step: GraphStep, choice: StepPlacement, tensors: list[torch.Tensor]
    ) -> list[Any]:
        replacements = iter(tensors)
        args = substituted(step.args if choice.args is None else choice.args, replacements)
        kwargs = substituted(step.kwargs, replacements)
        local_form = LOCAL_FORMS.get(short_name(step.op))
        if local_form is None:
            result = choice.op(*args, **kwargs)
        else:
            arguments = arguments_by_name(choice.op, args, kwargs)
            result = local_form(choice.op, arguments, choice.inputs[0], self._mesh)
        return list(result) if step.listed else [result]

    def _moved(self, value: DTensor, target: Placements) -> DTensor:
        """Return a value with other placements; shares of a sum where the target is a sum."""
        summands = [
            dim
            for dim, (old, new) in enumerate(zip(value.placements, target, strict=True))
            if isinstance(new, Partial) and not isinstance(old, Partial)
        ]
        first = tuple(Replicate() if dim in summands else place for dim, place in enumerate(target))
        value = value.redistribute(placements=first)
        if not summands:
            return value
        local = value.to_local(grad_placements=first)
        for dim in summands:
            local = _Share.apply(local, self._mesh.size(dim))
        return self._wrapped(local, target, shape=value.shape, stride=value.stride())

    @contextlib.contextmanager
    def _random(self, choice: StepPlacement, call: int, index: int) -> Iterator[None]:
        """Draw the same numbers on ranks with the same part of the result, else different ones."""
        coordinate = self._mesh.get_coordinate() or [0] * self._mesh.ndim
        part = tuple(
            own if isinstance(choice.outputs[0][dim], Shard) else -1
            for dim, own in enumerate(coordinate)
        )
        device = self._mesh.device_type
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(hash((self._seed, call, index, *part)) % _LARGEST_SEED)
            yield
