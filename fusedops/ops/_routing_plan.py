"""RoutingPlan: which expert computes which token, and in which row.

A plan is created once per layer and step, by ``moe_route`` or ``RoutingPlan.from_choices``, and is
not modified: permutation, experts, combination and every recomputation use the same plan. Rows are
token-major: sorted by expert, within one expert by token, then by choice; docs/moe.md has a picture
of this and the other layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusedops._core import checks, dtypes
from fusedops.ops.moe_sort import check_choices, check_ids, moe_sort


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The choices of a router and the order of the rows that follow from them.

    ``T`` tokens choose ``k`` experts each of ``E``; choice ``j`` of token ``t`` is slot ``t * k +
    j``. A plan is immutable, and a pytree of its tensors: ``torch.compile``, checkpointing and
    ``tree_map`` accept it (``tree_map(lambda t: t.to(device), plan)``). No method waits for the
    device. The constructor does not check its arguments; ``from_choices`` does.

    Args:
        expert_ids: ``[T, k]`` int32; ``E``: no expert (dropped).
        probs: ``[T, k]`` float32 (float64 for float64), differentiable; 0 where dropped.
        permutation: ``[T * k]`` int32, the slot of each row. Rows are sorted by expert and, within
            one expert, by slot; dropped slots are last, from ``offsets[-1]`` on, in order, so that
            it is always a permutation.
        positions: ``[T, k]`` int32, its inverse: the row of each slot, at least ``offsets[-1]`` for
            dropped slots.
        tokens_per_expert: ``[E]`` int32, kept slots.
        offsets: ``[E]`` int32, the end of each expert's rows, as torch's ``grouped_mm`` takes them;
            the first ``offsets[-1]`` rows are real.
        kept: ``[T, k]`` bool, or ``None`` where nothing can be dropped.
        num_experts: ``E``.
        capacity: rows per expert in the padded layout, or ``None``.

    Raises:
        dataclasses.FrozenInstanceError: an attribute is assigned.

    Example:
        >>> import torch, fusedops
        >>> ids, probs = torch.tensor([[1, 0], [1, 2]]), torch.full((2, 2), 0.5)
        >>> plan = fusedops.RoutingPlan.from_choices(ids, probs, num_experts=3)
        >>> plan.permutation.tolist(), plan.offsets.tolist()
        ([1, 0, 2, 3], [1, 3, 4])
    """

    expert_ids: torch.Tensor
    probs: torch.Tensor
    permutation: torch.Tensor
    positions: torch.Tensor
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    kept: torch.Tensor | None
    num_experts: int
    capacity: int | None = None

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return self.positions.shape[0]

    @property
    def top_k(self) -> int:
        """``k``: slots per token."""
        return self.positions.shape[1]

    @property
    def num_dropped(self) -> torch.Tensor:
        """The number of slots without an expert: one int32, on the plan's device."""
        return self.positions.numel() - self.offsets[-1]

    @staticmethod
    def from_choices(
        expert_ids: torch.Tensor,
        probs: torch.Tensor,
        num_experts: int,
        *,
        kept: torch.Tensor | None = None,
    ) -> RoutingPlan:
        """Create a plan from given choices.

        Args:
            expert_ids: ``[T, k]`` int32 or int64; ``num_experts``: no expert.
            probs: ``[T, k]`` floating, the weight of each choice; may require a gradient.
            num_experts: ``E``.
            kept: ``[T, k]`` bool; other slots are dropped. Default: all are kept.

        Returns:
            The plan. ``kept`` is set, because ids may be ``num_experts``, which only their values
            show.

        Raises:
            ValueError: a shape or device does not fit, or (CPU) an id is not an expert; on CUDA
                such a slot is dropped, because a check would wait for the device.
            TypeError: an argument is no tensor, or its dtype does not fit.
        """
        op = "RoutingPlan.from_choices"
        check_choices(op, expert_ids, num_experts, kept)
        checks.like(op, "probs", probs, "expert_ids", expert_ids)
        checks.shape(op, "probs", probs, expert_ids.shape, "that of expert_ids")
        check_ids(op, expert_ids, num_experts)
        order = moe_sort(expert_ids, num_experts, kept=kept)
        expert_ids = expert_ids.to(torch.int32)
        positions, offsets = order[1], order[3]
        kept = positions < offsets[-1]
        probs = torch.where(kept, probs.to(dtypes.statistics_dtype(probs.dtype)), 0.0)
        return RoutingPlan(expert_ids, probs, *order, kept, num_experts)

    def with_probs(self, probs: torch.Tensor) -> RoutingPlan:
        """Return the plan with other weights.

        Args:
            probs: ``[T, k]`` floating; values of dropped slots are not used.

        Raises:
            ValueError: the shape or device does not fit.
            TypeError: ``probs`` is no floating tensor.
        """
        op = "RoutingPlan.with_probs"
        check_probs(op, "probs", probs, self)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return RoutingPlan(**{**values, "probs": probs})


_TENSORS = ("expert_ids", "probs", "permutation", "positions", "tokens_per_expert", "offsets")
_Context = tuple[bool, int, int | None]


def check_plan(op: str, plan: Any) -> None:
    if not isinstance(plan, RoutingPlan):
        raise TypeError(f"{op}: plan must be a RoutingPlan, got {type(plan).__name__}")


def check_probs(op: str, argument: str, probs: Any, plan: RoutingPlan) -> None:
    checks.like(op, argument, probs, "the plan", plan.positions)
    checks.shape(op, argument, probs, plan.positions.shape, "[tokens, top_k] of the plan")


# A pytree's children are its tensors alone: what maps a function over them meets no None.
def _names(has_kept: bool) -> tuple[str, ...]:
    return (*_TENSORS, "kept") if has_kept else _TENSORS


def _flatten(plan: RoutingPlan) -> tuple[list[Any], _Context]:
    has_kept = plan.kept is not None
    children = [getattr(plan, name) for name in _names(has_kept)]
    return children, (has_kept, plan.num_experts, plan.capacity)


def _flatten_with_keys(plan: RoutingPlan) -> tuple[list[tuple[Any, Any]], _Context]:
    children, context = _flatten(plan)
    keys = [pytree.GetAttrKey(name) for name in _names(context[0])]
    return list(zip(keys, children, strict=True)), context


def _unflatten(children: Iterable[Any], context: _Context) -> RoutingPlan:
    has_kept, num_experts, capacity = context
    tensors: dict[str, Any] = {"kept": None}
    tensors |= zip(_names(has_kept), children, strict=True)
    return RoutingPlan(**tensors, num_experts=num_experts, capacity=capacity)


pytree.register_pytree_node(
    RoutingPlan,
    _flatten,
    _unflatten,
    serialized_type_name="fusedops.RoutingPlan",
    flatten_with_keys_fn=_flatten_with_keys,
)
