"""The losses of a router, load balance and z-loss, in one pass over the logits.

    loss = sum_t m_t (sum_e w[s(t), e] p[t, e] + z lse_t^2)

with p the scores of a token (they sum to 1), lse the log-sum-exp of its logits, m the mask. All
forms of the balance loss differ only in the weights ``w``, which are computed from the counts of
the choices and are constants.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.kernels._arguments import RouterLossArguments
from fusedops.ops._route_math import normalized_sigmoid
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops._routing_reuse import summed_once

_FORMS = ("switch", "squared")
_SCORES = ("softmax", "sigmoid")


def moe_router_loss(
    logits: torch.Tensor,
    choices: RoutingPlan | torch.Tensor | None = None,
    *,
    balance: float = 1.0,
    z: float = 0.0,
    form: str = "switch",
    score: str = "softmax",
    num_sequences: int = 1,
    mask: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Return ``balance * (load balance loss) + z * (z-loss)`` of a router.

    ``balance loss = E sum_e f_e P_e`` and ``z-loss = mean_t logsumexp(logits_t)^2``

    where ``f_e`` is the fraction of the choices that select expert ``e``, before any are dropped,
    and ``P_e`` is the mean of its score over the tokens. Uniform routing gives a balance loss of 1.

    Args:
        logits: ``[T, E]``, any floating dtype, any strides.
        choices: the plan that ``moe_route`` made of them, or its ``expert_ids`` ``[T, k]``, int32
            or int64 (``E``: no expert); not needed if ``balance`` is 0.
        balance: coefficient of the balance loss.
        z: coefficient of the z-loss.
        form: ``"switch"``: ``f`` is a fraction of the ``k T`` choices. ``"squared"``: a fraction of
            the ``T`` tokens, so that the loss is ``k`` times as large: ``E^2 mean_e(mean_t onehot
            mean_t p)`` as PanGu's router has it (uniform top-1 gives 1.0), and transformers'
            ``load_balancing_loss_func``.
        score: ``"softmax"``, or ``"sigmoid"``, divided by its sum (DeepSeek-V3), also where all
            sigmoids of a token underflow: nothing is added to the sum.
        num_sequences: number of sequences of equal length among the tokens, each with its own
            balance loss; the result is their mean. It must divide ``T``.
        mask: ``[T]`` bool; tokens with ``False`` (padding) have no effect, whatever their logits
            are.
        group: a process group: ``f`` is computed over the tokens of all its ranks, by one
            all-reduce of ``E + 1`` integers, which a recomputation under ``keep_routing`` does not
            repeat. The mean of the result over the ranks is then the loss
            of the whole batch, and the mean of the gradients over ranks, as in DDP, is its
            gradient.

    Returns:
        A scalar, float32 (float64 for float64).

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        The gradient is computed in closed form, for the logits only: counts are constants. Saves
        the logits and the weights ``[num_sequences, E]``. Float32 arithmetic; sums in a fixed
        order. The host does not wait for the device. NaN stays NaN. Autocast does not change the
        call.

    Reference:
        Fedus et al.: Switch Transformers, arXiv:2101.03961; Zoph et al.: ST-MoE, arXiv:2202.08906;
        Qiu et al.: Demons in the Detail (global balance), arXiv:2501.11873.

    Example:
        >>> import torch, fusedops
        >>> logits = torch.zeros(8, 4)
        >>> ids = torch.arange(8).remainder(4)[:, None]
        >>> fusedops.moe_router_loss(logits, ids)
        tensor(1.)
        >>> fusedops.moe_router_loss(logits, balance=0.0, z=1.0)  # log(4)^2
        tensor(1.9218)
    """
    options = (balance, z, form, score, num_sequences, mask, group)
    ids = _check(logits, choices, *options)
    tokens, experts = logits.shape
    wide = dtypes.statistics_dtype(logits.dtype)
    if mask is None:
        length = tokens // num_sequences
        totals = torch.full((num_sequences,), length, dtype=torch.int64, device=logits.device)
    else:
        totals = mask.view(num_sequences, -1).sum(1)
    weights = None
    ranks = 1
    if balance != 0.0:
        assert ids is not None
        counts = _counts(ids, experts, num_sequences, mask)
        if group is not None:
            counts, totals, ranks = _sum_over_ranks(counts, totals, group)
        # A sequence without tokens has no choices either.
        lengths = totals.clamp_min(1).to(wide)[:, None]
        shares = counts.to(wide) / (lengths * (ids.shape[1] if form == "switch" else 1))
        weights = shares * (balance * experts * ranks / num_sequences) / lengths
    elif group is not None:
        _, totals, ranks = _sum_over_ranks(totals[:0], totals, group)
    z_weight = float(z) * ranks / totals.sum().clamp_min(1).to(wide) if z != 0.0 else None
    return _OP(logits, weights, z_weight, mask, score)


def _counts(
    ids: torch.Tensor, experts: int, sequences: int, mask: torch.Tensor | None
) -> torch.Tensor:
    rows = ids.to(torch.int64)
    if mask is not None:
        rows = torch.where(mask[:, None], rows, experts)
    # On a GPU scatter_add asserts it.
    expected = f"of experts in [0, {experts}), or {experts} for none"
    checks.indices("moe_router_loss", "choices", rows, experts + 1, expected)
    rows = rows.reshape(sequences, -1)
    counts = torch.zeros(sequences, experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(1, rows, torch.ones_like(rows))[:, :experts]


def _sum_over_ranks(
    counts: torch.Tensor, totals: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor, int]:
    import torch.distributed as dist

    from fusedops._core import collectives

    both = torch.cat([counts.reshape(-1), totals])
    summed = summed_once(partial(collectives.all_reduce, both, group, label="router loss"))
    size = counts.numel()
    return summed[:size].view(counts.shape), summed[size:], dist.get_world_size(group)


def _check(logits: Any, choices: Any, *options: Any) -> torch.Tensor | None:
    balance, z, form, score, num_sequences, mask, group = options
    op = "moe_router_loss"
    checks.tensor(op, "logits", logits)
    if logits.dim() != 2:
        checks.fail(op, "logits", "of 2 dims, [tokens, experts]", list(logits.shape))
    if logits.shape[1] < 1:
        checks.fail(op, "logits", "of at least one expert", list(logits.shape))
    checks.finite(op, "balance", balance)
    checks.finite(op, "z", z)
    checks.choice(op, "form", form, _FORMS)
    checks.choice(op, "score", score, _SCORES)
    checks.integer(op, "num_sequences", num_sequences)
    if num_sequences < 1 or logits.shape[0] % num_sequences != 0:
        expected = f"a divisor of {logits.shape[0]}, the tokens"
        checks.fail(op, "num_sequences", expected, num_sequences)
    if group is not None and num_sequences != 1:
        checks.fail(op, "group", "left out with num_sequences", "it")
    checks.group(op, "group", group)
    if mask is not None:
        checks.index_tensor(op, "mask", mask, dtypes=(torch.bool,))
        checks.shape(op, "mask", mask, logits.shape[:1], "one per token")
        if mask.device != logits.device:
            checks.fail(op, "mask", f"on {logits.device}, the device of logits", mask.device)
    if balance == 0.0:
        return None
    ids = choices.expert_ids if isinstance(choices, RoutingPlan) else choices
    if not isinstance(ids, torch.Tensor):
        kind = type(choices).__name__
        raise TypeError(f"{op}: choices must be a RoutingPlan or a torch.Tensor, got {kind}")
    checks.index_tensor(op, "choices", ids, dtypes=(torch.int32, torch.int64))
    if ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
        checks.fail(op, "choices", f"of shape [{logits.shape[0]}, top_k]", list(ids.shape))
    if ids.device != logits.device:
        checks.fail(op, "choices", f"on {logits.device}, the device of logits", ids.device)
    return ids


def _scores(x: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return torch.softmax(x, -1)
    return normalized_sigmoid(x)


def _per_token(weights: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the weights of each token; [T, E], or [1, E] for all."""
    sequences = weights.shape[0]
    return weights if sequences == 1 else weights.repeat_interleave(tokens // sequences, 0)


def _reference(*args: Any) -> torch.Tensor:
    logits, weights, z_weight, mask, score = RouterLossArguments(*args)
    x = logits.to(dtypes.statistics_dtype(logits.dtype))
    rows = x.new_zeros(x.shape[0])
    if weights is not None:
        rows = rows + (_scores(x, score) * _per_token(weights, len(x))).sum(-1)
    if z_weight is not None:
        rows = rows + z_weight * x.logsumexp(-1).square()
    if mask is not None:
        rows = rows.masked_fill(~mask, 0.0)
    return rows.sum()


def _backward(grad_loss: torch.Tensor, *args: Any) -> torch.Tensor | None:
    """Softmax: dx = p (w - sum w p); sigmoid s: dx = p (1 - s) (w - sum w p)."""
    *inputs, output_mask = args
    if not output_mask[0]:
        return None
    logits, weights, z_weight, mask, score = RouterLossArguments(*inputs)
    x = logits.to(dtypes.statistics_dtype(logits.dtype))
    grad = torch.zeros_like(x)
    if weights is not None:
        p, w = _scores(x, score), _per_token(weights, len(x))
        slope = p if score == "softmax" else p * torch.sigmoid(-x)
        grad = grad + slope * (w - (w * p).sum(-1, keepdim=True))
    if z_weight is not None:
        lse = x.logsumexp(-1, keepdim=True)
        grad = grad + 2.0 * z_weight * lse * torch.softmax(x, -1)
    grad = grad * grad_loss
    if mask is not None:
        grad = grad.masked_fill(~mask[:, None], 0.0)
    return grad.to(logits.dtype).contiguous()


def _shard(weights: Any) -> list[Sharding]:
    """Tokens may be sharded, unless sequences have weights of their own."""
    rules: list[Sharding] = [([REPLICATE], [REPLICATE] * 4)]
    if weights is None or weights.shape[0] == 1:
        rules.append(([PARTIAL], [0, REPLICATE, REPLICATE, 0]))
    return rules


_OP = define_op(
    "moe_router_loss",
    "(Tensor logits, Tensor? weights, Tensor? z_weight, Tensor? mask, str score) -> (Tensor loss)",
    contract={
        "logits": "T [tokens, experts]",
        "experts": "experts >= 1",
        "weights": "stat(T) [sequences, experts]",
        "sequences": "sequences >= 1 and tokens % sequences == 0",
        "z_weight": "stat(T) []",
        "mask": "bool [tokens]",
        "loss": "stat(T) []",
        "score": _SCORES,
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("logits",),
        outputs=("loss",),
        saves=("logits", "weights", "z_weight", "mask"),
        reference=_backward,
    ),
    triton="fusedops.kernels.moe_router_loss",
    shard=_shard,
)
