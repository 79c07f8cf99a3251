"""A model that runs with the placements of a plan.

Parameters are DTensors. The forward runs the steps of the traced graph on each rank's local
tensors; tensors are moved where the plan says, through DTensor's differentiable redistribution.
Gradients therefore arrive in the placements of the parameters. Every kind of input (shapes, dtypes,
train or eval) is traced once, when it first comes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.evaluate import Evaluator, WalkState
from fusedops.planner.sharding.local_steps import LOCAL_FORMS
from fusedops.planner.sharding.rules import short_name
from fusedops.planner.sharding.strategies import StepPlacement
from fusedops.planner.sharding.trace import GraphStep, ValueRef, substituted

_LARGEST_SEED = 2**62


@dataclass
class PlacedGraph:
    """A graph, and where each of its steps runs.

    Attributes:
        evaluator: of the graph.
        choices: one for each step.
        last_use: the step after which a value is not needed, by value.
    """

    evaluator: Evaluator
    choices: list[StepPlacement]
    last_use: dict[int, int] = field(default_factory=dict)


def placed_graph(evaluator: Evaluator, placements: Mapping[str, Placements]) -> PlacedGraph:
    """Return where the steps of a graph run for placements of parameters by name."""
    graph = evaluator.graph
    stored = {number: placements[name] for number, name in graph.parameters.items()}
    state = WalkState(dict(evaluator.fixed.places))
    choices: list[StepPlacement] = []
    evaluator.walk(graph.steps, state, stored, choices)
    last_use = {number: i for i, step in enumerate(graph.steps) for number in step.inputs}
    kept = [*graph.outputs, *(ValueRef(number) for number in graph.mutations.values())]
    for output in kept:
        if isinstance(output, ValueRef):
            last_use[output.number] = len(graph.steps)
    return PlacedGraph(evaluator, choices, last_use)


class _Share(torch.autograd.Function):
    """A rank's summand of a replicated tensor: ``x / n``; its gradient is that of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class GraphRun:
    """Runs placed graphs on the local tensors of this rank.

    Args:
        mesh: the mesh.
        seed: the same on all ranks; random operators draw from generators made of it.
    """

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        self.mesh = mesh
        self.sizes = tuple(mesh.shape)
        self.replicated = tuple(Replicate() for _ in range(mesh.ndim))
        self._seed = seed
        self._calls = itertools.count()

    def __call__(
        self, placed: PlacedGraph, model: nn.Module, leaves: list[Any]
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return the flattened outputs as full tensors, and new values of buffers."""
        graph = placed.evaluator.graph
        call = next(self._calls)
        values: dict[int, DTensor] = {}
        self._load(placed, model, leaves, values)
        moved: dict[int, dict[Placements, DTensor]] = {}
        for index, (step, choice) in enumerate(zip(graph.steps, placed.choices, strict=True)):
            self._step(placed, step, choice, values, moved, (call, index))
            for number in step.inputs:
                if placed.last_use[number] == index:
                    values.pop(number, None)
                    moved.pop(number, None)
        outputs = [
            self._full(values[output.number]) if isinstance(output, ValueRef) else output
            for output in graph.outputs
        ]
        mutations = {
            name: self._full(values[number]).detach() for name, number in graph.mutations.items()
        }
        return outputs, mutations

    def _load(
        self, placed: PlacedGraph, model: nn.Module, leaves: list[Any], values: dict[int, DTensor]
    ) -> None:
        evaluator, graph = placed.evaluator, placed.evaluator.graph
        for number, name in graph.parameters.items():
            parameter: Any = model.get_parameter(name)
            # Also without a move: its backward sums partial gradients.
            values[number] = parameter.redistribute(
                placements=evaluator.use_placements(parameter.placements)
            )
        for number, name in graph.buffers.items():
            values[number] = self._wrapped(model.get_buffer(name), self.replicated)
        for number, tensor in graph.constants.items():
            values[number] = self._wrapped(tensor.to(self.mesh.device_type), self.replicated)
        for number, position in graph.inputs.items():
            value = self._wrapped(leaves[position], self.replicated)
            values[number] = value.redistribute(placements=evaluator.input_placements(number))

    def _wrapped(self, tensor: torch.Tensor, placements: Placements) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, placements, run_check=False)

    def _full(self, value: DTensor) -> torch.Tensor:
        return value.redistribute(placements=self.replicated).to_local(
            grad_placements=self.replicated
        )

    def _step(
        self,
        placed: PlacedGraph,
        step: GraphStep,
        choice: StepPlacement,
        values: dict[int, DTensor],
        moved: dict[int, dict[Placements, DTensor]],
        draw: tuple[int, int],
    ) -> None:
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
        with self._random(choice, draw) if step.random else contextlib.nullcontext():
            results = self._local(step, choice, tensors)
        metas = placed.evaluator.graph.values
        for number, result, place, means in zip(
            step.outputs, results, choice.outputs, choice.averaged, strict=True
        ):
            if number < 0:
                continue
            for dim in means:
                result = result / self.sizes[dim]
            meta = metas[number]
            values[number] = DTensor.from_local(
                result,
                self.mesh,
                place,
                run_check=False,
                shape=torch.Size(meta.shape),
                stride=meta.stride,
            )

    def _local(
        self, step: GraphStep, choice: StepPlacement, tensors: list[torch.Tensor]
    ) -> list[Any]:
        replacements = iter(tensors)
        args = substituted(step.args if choice.args is None else choice.args, replacements)
        kwargs = substituted(step.kwargs, replacements)
        local_form = LOCAL_FORMS.get(short_name(step.op))
        if local_form is not None:
            result = local_form(choice, self.mesh, choice.op, args, kwargs)
        else:
            result = choice.op(*args, **kwargs)
        return list(result) if step.listed else [result]

    def _moved(self, value: DTensor, target: Placements) -> DTensor:
        """Return a value with other placements; shares of a sum where the target is a sum."""
        old = tuple(value.placements)
        summands = [
            dim
            for dim, place in enumerate(target)
            if isinstance(place, Partial) and not isinstance(old[dim], Partial)
        ]
        first = tuple(Replicate() if dim in summands else place for dim, place in enumerate(target))
        value = value.redistribute(placements=first)
        if not summands:
            return value
        local = value.to_local(grad_placements=first)
        for dim in summands:
            local = _Share.apply(local, self.sizes[dim])
        return DTensor.from_local(
            local,
            self.mesh,
            target,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    @contextlib.contextmanager
    def _random(self, choice: StepPlacement, draw: tuple[int, int]) -> Iterator[None]:
        """Draw the same numbers on ranks with the same part of the result, else different ones."""
        coordinate = self.mesh.get_coordinate() or [0] * self.mesh.ndim
        part = tuple(
            index if isinstance(choice.outputs[0][dim], Shard) else -1
            for dim, index in enumerate(coordinate)
        )
        device = self.mesh.device_type
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
            torch.manual_seed(hash((self._seed, *draw, *part)) % _LARGEST_SEED)
            yield


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


class PlannedForward:
    """The forward of a model to which a plan has been applied.

    Args:
        model: the model, whose parameters are DTensors.
        evaluator_of: traces the model for inputs and returns the costs of its graph.
        placements: of the parameters, by name.
        mesh: the mesh.
        seed: of random operators, the same on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluator_of: Callable[[tuple[Any, ...], dict[str, Any]], Evaluator],
        placements: Mapping[str, Placements],
        mesh: DeviceMesh,
        seed: int,
    ) -> None:
        self._model = model
        self._evaluator_of = evaluator_of
        self._placements = dict(placements)
        self._run = GraphRun(mesh, seed)
        self._graphs: dict[Any, PlacedGraph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on full tensors of the global batch, the same on every rank."""
        leaves, key = call_key(self._model, args, kwargs)
        if key not in self._graphs:
            evaluator = self._evaluator_of(args, kwargs)
            self._graphs[key] = placed_graph(evaluator, self._placements)
        placed = self._graphs[key]
        with torch.autocast(self._run.mesh.device_type, enabled=False):  # casts are in the graph
            outputs, mutations = self._run(placed, self._model, leaves)
        with torch.no_grad():
            for name, value in mutations.items():
                self._model.get_buffer(name).copy_(value)
        return pytree.tree_unflatten(outputs, placed.evaluator.graph.out_spec)
