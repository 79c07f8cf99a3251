"""DTensor's own sharding propagation, asked about a step without running it.

It knows torch's operators, and fused operators whose rules are registered with it. A step whose
answer cannot run on local tensors alone counts as one without a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

from fusedops.planner.sharding.cost import Placements
from fusedops.planner.sharding.rules import short_name
from fusedops.planner.sharding.trace import GraphStep, TracedGraph, ValueRef, substituted

# What DTensor's own dispatcher treats specially does not run on local tensors alone.
_SPECIAL = ("aten::as_strided", "aten::argmin", "aten::argmax", "aten::convolution")


class PropagatedStep(NamedTuple):
    """What DTensor would do with a step.

    Attributes:
        inputs: placements that the tensors must have.
        outputs: placements of the results; a mean over ranks has ``Partial("avg")``.
        args: positional arguments with the sizes of a rank, or ``None``: those of the graph.
        op: the operator that runs.
    """

    inputs: list[Placements]
    outputs: list[Placements]
    args: tuple[Any, ...] | None
    op: Any


def propagated(
    step: GraphStep, graph: TracedGraph, mesh: DeviceMesh, current: tuple[Placements, ...]
) -> PropagatedStep | None:
    """Return what DTensor would do with a step.

    Args:
        step: the step.
        graph: its graph.
        mesh: the mesh.
        current: placements of the step's inputs.

    Returns:
        ``None`` if DTensor has no rule, or one that local tensors cannot follow.
    """
    if not step.inputs or step.op._schema.name in _SPECIAL:
        return None
    specs = [
        _spec(graph, mesh, number, placements)
        for number, placements in zip(step.inputs, current, strict=True)
    ]
    replacements = iter(specs)
    args = substituted(step.args, replacements)
    kwargs = substituted(step.kwargs, replacements)
    args = tuple(list(value) if isinstance(value, tuple) else value for value in args)
    schema = OpSchema(step.op, args, kwargs)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(step.op)
    if info is None:
        info = propagator.op_to_schema_info_for_single_dim_strategy.get(step.op)
    ask = propagator.propagate_op_sharding_non_cached
    if info is not None:  # says that lists of tensors are flattened, and what a cache may compare
        schema.schema_info = info
        schema._recompute_comparison_key()
        ask = propagator.propagate_op_sharding
    try:
        result = ask(schema)
    except Exception:  # every kind of error means that there is no rule for these placements
        return None
    output = result.output_spec
    if output is None or result.redistribute_schema is None and result.needs_redistribute:
        return None
    asked = result.redistribute_schema if result.needs_redistribute else schema
    inputs = [tuple(spec.placements) for spec in _specs_in((asked.args_schema,))]
    inputs += [tuple(spec.placements) for spec in _specs_in((asked.kwargs_schema,))]
    if len(inputs) != len(step.inputs):
        inputs = [tuple(s.placements) for s in _specs_in((asked.args_schema, kwargs))]
    outputs = [output] if isinstance(output, DTensorSpec) else list(output)
    if len(inputs) != len(step.inputs) or len(outputs) != len(step.outputs):
        return None
    places = [
        tuple(Replicate() for _ in range(mesh.ndim)) if spec is None else tuple(spec.placements)
        for spec in outputs
    ]
    if not all(_is_plain(placement) for placement in itertools.chain(*inputs, *places)):
        return None
    if _runs_along_sharded(step, graph, inputs):
        return None
    changed = None
    if result.use_val_from_redistribute_schema:
        changed = tuple(_without_specs(argument) for argument in asked.args_schema)
    return PropagatedStep(inputs, places, changed, asked.op)


def _runs_along_sharded(step: GraphStep, graph: TracedGraph, inputs: Sequence[Placements]) -> bool:
    """Whether a step scans, sorts or indexes along a dim that is sharded.

    Torch's rules of some of these operators (``logcumsumexp``) are those of elementwise ones.
    """
    names = [argument.name for argument in step.op._schema.arguments]
    dim = {**dict(zip(names, step.args, strict=False)), **step.kwargs}.get("dim")
    if not isinstance(dim, int) or short_name(step.op) == "slice" or not inputs:
        return False
    values = graph.values
    rank = len(values[step.inputs[0]].shape)
    same = all(len(values[number].shape) == rank for number in step.outputs if number >= 0)
    return same and any(
        isinstance(place, Shard) and place.dim == dim % max(rank, 1) for place in inputs[0]
    )


def _spec(graph: TracedGraph, mesh: DeviceMesh, number: int, placements: Placements) -> DTensorSpec:
    value = graph.values[number]
    meta = TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _is_plain(placement: Any) -> bool:
    if isinstance(placement, _StridedShard):
        return False
    if isinstance(placement, Partial):
        return type(placement) is Partial and placement.reduce_op in ("sum", "avg")
    return isinstance(placement, (Shard, Replicate))


def _specs_in(arguments: Any) -> list[DTensorSpec]:
    if isinstance(arguments, DTensorSpec):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if isinstance(arguments, (tuple, list)):
        return [spec for element in arguments for spec in _specs_in(element)]
    return []


def _without_specs(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return ValueRef(-1)
    if isinstance(argument, (tuple, list)):
        return tuple(_without_specs(element) for element in argument)
    return argument
