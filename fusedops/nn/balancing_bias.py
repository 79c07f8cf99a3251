"""BalancingBias: the bias of loss-free balancing, and the counts that update it."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops.nn._arguments import check_flags, check_place
from fusedops.nn._exact import apply_but_keep_dtype
from fusedops.ops import RoutingPlan, update_balancing_bias
from fusedops.ops._balancing import check_rate
from fusedops.ops._routing_plan import check_plan
from fusedops.ops._routing_reuse import recomputing


class BalancingBias(torch.nn.Module):
    """The bias of a router for loss-free balancing, updated once per optimizer step.

    Pass ``bias`` to ``moe_route``, ``count`` every plan, and call ``step`` after that of the
    optimizer:

        plan = fusedops.moe_route(logits, k, score="sigmoid", bias=balancing.bias)
        balancing.count(plan)
        ...
        optimizer.step()
        balancing.step()

    Counts add up over the micro-batches of a step. A plan that a recomputation in the backward
    creates again is not counted again.

    Args:
        num_experts: ``E``.
        rate: size of an update of the bias.
        centered: as in ``update_balancing_bias``.
        group: a process group over which counts are summed: the data-parallel ranks.
        own_bias: whether the module has a bias; otherwise pass one to ``step``.
        device: device of the buffers.

    Attributes:
        bias: ``[E]`` float32 buffer, in the state dict; ``None`` without ``own_bias``.
        tokens_per_expert: ``[E]`` int64 buffer, choices since the last step; not in the state dict.

    Raises:
        ValueError: ``num_experts`` is not positive, ``rate`` is negative, or a plan has another
            number of experts.

    Note:
        Choices are counted before any are dropped by the capacity. In evaluation mode nothing is
        counted. A compiled function that is recomputed counts twice: call ``count`` outside of it.

    Reference:
        Wang et al.: Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664.

    Example:
        >>> import torch, fusedops
        >>> balancing = fusedops.nn.BalancingBias(2, rate=0.1)
        >>> balancing.count(fusedops.moe_route(torch.tensor([[1.0, 0.0]]), 1))
        >>> balancing.step().bias
        tensor([-0.1000,  0.1000])
    """

    bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        rate: float = 1e-3,
        *,
        centered: bool = False,
        group: Any = None,
        own_bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        op = "BalancingBias"
        checks.integer(op, "num_experts", num_experts, least=1)
        check_rate(op, rate)
        check_flags(op, centered=centered, own_bias=own_bias)
        checks.group(op, "group", group)
        check_place(op, device, None)
        self.rate = rate
        self.centered = centered
        self.group = group
        bias = torch.zeros(num_experts, device=device) if own_bias else None
        self.register_buffer("bias", bias)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    @torch.no_grad()
    def count(self, plan: RoutingPlan) -> None:
        """Add the choices of a plan, unless a recomputation created it."""
        check_plan("BalancingBias.count", plan)
        if not self.training or recomputing():
            return
        counts = plan.tokens_per_expert
        if counts.shape != self.tokens_per_expert.shape:
            raise ValueError(
                f"BalancingBias.count: plan must have {len(self.tokens_per_expert)} experts, "
                f"got {plan.num_experts}"
            )
        if plan.kept is not None:
            ids = plan.expert_ids.reshape(-1).long()
            every = torch.zeros(plan.num_experts + 1, dtype=torch.int64, device=ids.device)
            counts = every.scatter_add_(0, ids, torch.ones_like(ids))[:-1]
        self.tokens_per_expert += counts

    @torch.no_grad()
    def step(self, bias: torch.Tensor | None = None) -> BalancingBias:
        """Update the bias by the counts, and reset the counts.

        Args:
            bias: ``[E]``, another bias to update instead, such as ``e_score_correction_bias`` of
                ``nn.MoE``'s gate.
        """
        moved = self.bias if bias is None else bias
        if moved is None:
            checks.fail("BalancingBias.step", "bias", "given, without own_bias", bias)
        update_balancing_bias(
            moved, self.tokens_per_expert, rate=self.rate, centered=self.centered, group=self.group
        )
        self.tokens_per_expert.zero_()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> BalancingBias:
        """Move the buffers and keep the bias float32: a bfloat16 one of 0.5 has steps of 4e-3."""
        apply_but_keep_dtype(self, "bias", lambda: super(BalancingBias, self)._apply(fn, recurse))
        return self

    def extra_repr(self) -> str:
        """Return the arguments shown by ``repr``."""
        return f"{self.tokens_per_expert.numel()}, rate={self.rate}"
