"""The arguments of expert parallelism and their checks, whose errors all ranks raise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks
from fusedops.ops import RoutingPlan
from fusedops.parallel.expert.metadata import MAX_CHUNKS, REDUCTIONS, send_error

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"


@dataclass(frozen=True)
class DispatchOptions:
    """The arguments of ``moe_dispatch`` and ``expert_parallel`` besides the tensors."""

    op: str  # the name of the public function, for messages
    groups: Sequence[dist.ProcessGroup]  # one process group, or those across and within nodes
    reduce: str = "source"  # where results are summed
    payload: str | None = None  # ``"float8"`` or ``None``
    chunks: int = 1  # parts of the tokens
    validate: bool = False  # whether all ranks raise if the output of one's experts does not fit

    @property
    def quantized(self) -> bool:
        """Whether rows are sent in float8."""
        return self.payload == "float8"


def groups_of(op: str, group: Any) -> list[dist.ProcessGroup]:
    """Return the group, or the groups across and within nodes; raise if it is neither."""
    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            checks.fail(op, "group", "a mesh of 1 or 2 dims", f"{group.ndim} dims")
        return [group.get_group(axis) for axis in range(group.ndim)]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group must be a ProcessGroup or DeviceMesh that this rank belongs to,"
            f" got {type(group).__name__}"
        )
    return [group]


def check_on_all(options: DispatchOptions, input: Any, plan: Any) -> None:
    """Raise on every rank if options, shapes or types do not fit on this one."""
    try:
        _check_options(options)
        _check_tensors(options, input, plan)
    except (TypeError, ValueError) as error:
        send_error(options.op, options.groups, _device_of(options, input), error)
        raise


def check_traced(options: DispatchOptions, input: Any, plan: Any) -> None:
    """Raise if no graph can be made; the operator checks the rest, on every rank."""
    _check_options(options)
    _check_types(options.op, input, plan)


def _device_of(options: DispatchOptions, input: Any) -> torch.device:
    """Return a device from which an error can be sent; ``input`` may be anything."""
    if isinstance(input, torch.Tensor) and input.device.type in ("cpu", "cuda"):
        return input.device
    if dist.get_backend(options.groups[0]) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_options(options: DispatchOptions) -> None:
    op, chunks = options.op, options.chunks
    if options.payload is not None:
        checks.choice(op, "payload", options.payload, ["float8"])
    checks.choice(op, "reduce", options.reduce, REDUCTIONS)
    if options.reduce == "node" and len(options.groups) == 1:
        checks.fail(op, "reduce", "'source' where the group is no mesh of 2 dims", "'node'")
    checks.flag(op, "validate", options.validate)
    checks.integer(op, "chunks", chunks)
    if not 1 <= chunks <= MAX_CHUNKS:
        checks.fail(op, "chunks", f"from 1 to {MAX_CHUNKS}", chunks)


def _check_types(op: str, input: Any, plan: Any) -> None:
    checks.tensor(op, "input", input)
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")
    if input.dim() != 2 or input.shape[1] < 1:
        checks.fail(op, "input", "of 2 dims, [tokens, hidden_size]", list(input.shape))


def _check_tensors(options: DispatchOptions, input: Any, plan: Any) -> None:
    op = options.op
    _check_types(op, input, plan)
    for name in ("expert_ids", "probs", "permutation", "positions", "offsets"):
        dtypes = (torch.float32, torch.float64) if name == "probs" else (torch.int32,)
        checks.index_tensor(op, f"plan.{name}", getattr(plan, name), dtypes=dtypes)
        device = getattr(plan, name).device
        if device != input.device:
            checks.fail(op, f"plan.{name}", f"on {input.device}, the device of input", device)
    if plan.positions.dim() != 2:
        checks.fail(op, "plan.positions", "of 2 dims", list(plan.positions.shape))
    if plan.num_tokens != input.shape[0]:
        checks.fail(
            op, "plan", f"of the {input.shape[0]} tokens of input", f"one of {plan.num_tokens}"
        )
    slots = (plan.num_tokens, plan.top_k)
    checks.shape(op, "plan.expert_ids", plan.expert_ids, slots, "that of positions")
    checks.shape(op, "plan.probs", plan.probs, slots, "that of positions")
    checks.shape(op, "plan.permutation", plan.permutation, (slots[0] * slots[1],), "a row a slot")
    checks.shape(op, "plan.offsets", plan.offsets, (plan.num_experts,), "one per expert")
    size = math.prod(group.size() for group in options.groups)
    if plan.num_experts % size != 0:
        checks.fail(
            op, "group", f"of a size that divides the plan's {plan.num_experts} experts", size
        )
