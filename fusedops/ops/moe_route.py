"""moe_route: chooses the experts and weights of each token, as a RoutingPlan.

The specification is in ``_route_math.py``. By ``_routing_reuse.py`` a recomputation has the experts
of the first pass.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, philox
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops._core.tracing import plain_size
from fusedops.kernels._arguments import RouteOptions
from fusedops.kernels._moe_drop import drop
from fusedops.ops import _route_math as formulas
from fusedops.ops import _routing_reuse
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.moe_sort import moe_sort

_SCORES = ("softmax", "sigmoid")
_GROUP_SCORES = ("max", "top2_sum")
_DROP_POLICIES = ("position", "probability", "rounds")
_MOST_FACTOR = 1e9  # a capacity then fits 64 bits, and drops nothing long before


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = False,
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_score: str = "max",
    scaling: float = 1.0,
    capacity_factor: float | None = None,
    drop_policy: str = "position",
    jitter: float = 0.0,
    softmax_after: bool = False,
    expert_choice: bool = False,
) -> RoutingPlan:
    """Choose ``top_k`` of ``E`` experts for each of ``T`` tokens.

    ``s = score(logits)``; ``ids`` are the best experts by ``s + bias``, best first; ``probs = s``
    of those, with ``normalize`` divided by their sum, times ``scaling``.

    Args:
        logits: ``[T, E]``, any floating dtype, any strides.
        top_k: number of experts of a token (1: Switch); with ``expert_choice`` the average number.
        score: ``"softmax"`` (over all experts) or ``"sigmoid"``.
        normalize: divide the weights of the chosen experts by their sum. For a softmax this is the
            softmax over the chosen experts. They sum to 1 also where all sigmoids of a token
            underflow: nothing is added to the sum (models often add 1e-20).
        bias: ``[E]`` floating, added to the scores for the choice only: it does not change weights
            and has no gradient (loss-free balancing, see ``update_balancing_bias``).
        num_groups: divide the experts into this number of groups of adjacent experts (it must
            divide ``E``), and choose only from the best ``topk_groups`` groups.
        topk_groups: number of groups; required with ``num_groups``.
        group_score: the score of a group: its ``"max"``, or ``"top2_sum"``, the sum of its two
            largest scores.
        scaling: factor of the weights.
        capacity_factor: at most ``C = ceil(top_k * T * capacity_factor / E)`` slots of an expert
            are kept (``moe_capacity``); ``None`` drops nothing.
        drop_policy: which slots are kept: ``"position"``: the first tokens, all first choices
            before second ones; ``"probability"``: those with the largest weight; ``"rounds"``: as
            ``"position"``, but a token whose choice was dropped chooses the same expert again
            without effect: only *kept* choices are masked between rounds, as in PanGu's router.
        jitter: multiply each logit by a random factor of ``[1 - jitter, 1 + jitter)``.
        softmax_after: softmax over the chosen logits (GPT-OSS); the same as ``normalize``.
        expert_choice: each expert chooses the ``C`` tokens with the highest scores instead (``k``
            is ``E``: slot ``e`` of a token belongs to expert ``e``, ``kept`` says whether it was
            chosen). ``capacity_factor`` is 1 by default.

    Returns:
        The plan, with ``probs`` in float32 (float64 for float64), 0 where dropped; ``kept`` is
        ``None`` if nothing can be dropped, and ``capacity`` is ``C``.

    Raises:
        ValueError: a shape, device or option does not fit; ``top_k`` is above the experts.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Ties go to the lower expert index (between tokens: to the earlier one) on every backend and
        instruction set. Softmax and sigmoid rise with the logit: without a bias (or a sum of two
        scores) the logits themselves are compared. NaN logits count as -inf: such an expert is
        last, with weight and gradient 0, and a row of NaN is routed to experts ``0 .. top_k - 1``
        with weights 0. +inf counts as the largest finite number. Arithmetic is float32 (float64 for
        float64). The host does not wait for the device, and shapes depend only on shapes. Saves the
        logits and the ids. Jitter is drawn by a counter: the same on every backend and in the
        backward. Under ``keep_routing`` a recomputation uses the ids of the first pass. Autocast
        does not change the call.

    Reference:
        Fedus et al.: Switch Transformers, arXiv:2101.03961; Lepikhin et al.: GShard,
        arXiv:2006.16668; Zhou et al.: Expert Choice Routing, arXiv:2202.09368; DeepSeek-V3,
        arXiv:2412.19437; Wang et al.: Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664.

    Example:
        >>> import torch, fusedops
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])
        >>> plan = fusedops.moe_route(logits, 2, normalize=True)
        >>> plan.expert_ids.tolist(), plan.tokens_per_expert.tolist()
        ([[1, 2], [0, 1]], [1, 2, 1])
        >>> plan.probs
        tensor([[0.7311, 0.2689],
                [0.5000, 0.5000]])
    """
    scores = (score, normalize, bias, num_groups, topk_groups, group_score, scaling)
    limits = (capacity_factor, drop_policy, jitter, softmax_after, expert_choice)
    rule, seeded = _check("moe_route", logits, top_k, *scores, *limits)
    seed = philox.new_seed(logits.device) if seeded else None
    first = _routing_reuse.recall(logits)
    ids = kept = None
    if first is not None:
        ids, kept, seed = first
    probs, ids, kept = _OP(logits, bias, seed, ids, kept, *rule)
    mask = kept if rule.capacity >= 0 else None
    _routing_reuse.record(ids, mask, seed)
    experts = plain_size(logits.shape[1])
    order = moe_sort(ids, experts, kept=mask)
    capacity = rule.capacity if mask is not None else None
    return RoutingPlan(ids, probs, *order, mask, experts, capacity)


def moe_capacity(top_k: int, num_tokens: int, capacity_factor: float, num_experts: int) -> int:
    """Return the number of slots that an expert keeps.

    ``C = ceil(top_k * num_tokens * capacity_factor / num_experts)``

    Args:
        top_k: experts of a token.
        num_tokens: tokens that are routed together.
        capacity_factor: 1.0 is sufficient for balanced routing. It is rounded to nine decimals: ``1
            * 100 * 1.1 / 10`` is 11, not the 12 that its binary rounding gives.
        num_experts: experts.

    Returns:
        ``C``.

    Raises:
        ValueError: a number is not positive (``num_tokens`` may be 0).

    Example:
        >>> import fusedops
        >>> fusedops.moe_capacity(2, 1024, 1.25, 8)
        320
    """
    op = "moe_capacity"
    _check_factor(op, capacity_factor)
    checks.integer(op, "top_k", top_k, least=1)
    checks.integer(op, "num_tokens", num_tokens, least=0)
    checks.integer(op, "num_experts", num_experts, least=1)
    billionths = int(capacity_factor * 1e9 + 0.5)
    return -(-top_k * num_tokens * billionths // (10**9 * num_experts))


def _check_factor(op: str, capacity_factor: Any) -> None:
    checks.positive(op, "capacity_factor", capacity_factor)
    if capacity_factor > _MOST_FACTOR:
        checks.fail(op, "capacity_factor", f"at most {_MOST_FACTOR:.0e}", capacity_factor)


def check_options(op: str, num_experts: int, top_k: Any, **options: Any) -> None:
    """Raise unless these options of ``moe_route`` fit ``num_experts``; those left out do."""
    defaults = moe_route.__kwdefaults__ or {}
    _check(op, torch.empty(0, num_experts), top_k, *(defaults | options).values())


def _check(op: str, logits: Any, top_k: Any, *options: Any) -> tuple[RouteOptions, bool]:
    """Raise unless the arguments fit; return the rule, and whether it draws random numbers."""
    score, normalize, bias, num_groups, topk_groups, group_score, scaling = options[:7]
    capacity_factor, drop_policy, jitter, softmax_after, expert_choice = options[7:]
    checks.tensor(op, "logits", logits)
    if logits.dim() != 2:
        checks.fail(op, "logits", "of 2 dims, [tokens, experts]", list(logits.shape))
    tokens, experts = logits.shape
    checks.choice(op, "score", score, _SCORES)
    checks.choice(op, "group_score", group_score, _GROUP_SCORES)
    checks.choice(op, "drop_policy", drop_policy, _DROP_POLICIES)
    checks.finite(op, "scaling", scaling)
    checks.number(op, "jitter", jitter)
    if not 0.0 <= jitter < 1.0:
        checks.fail(op, "jitter", "in [0, 1)", jitter)
    checks.flag(op, "normalize", normalize)
    checks.flag(op, "softmax_after", softmax_after)
    checks.flag(op, "expert_choice", expert_choice)
    checks.integer(op, "top_k", top_k)
    if bias is not None:
        checks.like(op, "bias", bias, "logits", logits)
        checks.shape(op, "bias", bias, (experts,), "one per expert")
    if softmax_after and score != "softmax":
        checks.fail(op, "score", "'softmax' with softmax_after", repr(score))
    groups, best = _check_groups(op, experts, num_groups, topk_groups, group_score)
    within = experts if best == groups else experts // groups * best
    if not 1 <= top_k <= within:
        which = "the number of experts" if within == experts else "the experts of the best groups"
        checks.fail(op, "top_k", f"from 1 to {within}, {which}", top_k)
    if drop_policy == "rounds" and (normalize or softmax_after) and capacity_factor is not None:
        checks.fail(op, "drop_policy", "another one with normalize or softmax_after", "'rounds'")
    if expert_choice:
        given = {"bias": bias is not None, "num_groups": num_groups is not None}
        given |= {"normalize": normalize, "softmax_after": softmax_after}
        for name, is_given in given.items():
            if is_given:
                checks.fail(op, name, "left out with expert_choice", "it")
        capacity_factor = 1.0 if capacity_factor is None else capacity_factor
        drop_policy = "expert_choice"
    capacity = -1
    if capacity_factor is not None:
        _check_factor(op, capacity_factor)
        capacity = plain_size(moe_capacity(top_k, tokens, capacity_factor, experts))
    weights = (top_k, score, normalize or softmax_after, float(scaling))
    limits = (groups, best, group_score, float(jitter), capacity, drop_policy)
    return RouteOptions._make(weights + limits), jitter > 0


def _check_groups(
    op: str, experts: int, num_groups: Any, topk_groups: Any, group_score: str
) -> tuple[int, int]:
    if num_groups is None and topk_groups is None:
        return 1, 1
    if num_groups is None or topk_groups is None:
        missing = "num_groups" if num_groups is None else "topk_groups"
        checks.fail(op, missing, "given with num_groups or topk_groups", None)
    checks.integer(op, "num_groups", num_groups)
    checks.integer(op, "topk_groups", topk_groups)
    if num_groups < 1 or experts % num_groups != 0:
        checks.fail(op, "num_groups", f"a divisor of {experts}, the experts", num_groups)
    if not 1 <= topk_groups <= num_groups:
        checks.fail(op, "topk_groups", f"from 1 to {num_groups}, the groups", topk_groups)
    if group_score == "top2_sum" and experts // num_groups < 2 and topk_groups < num_groups:
        checks.fail(op, "group_score", "'max' for groups of one expert", repr(group_score))
    return num_groups, topk_groups


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, bias, seed, chosen, chosen_kept, *options = args
    rule = RouteOptions(*options)
    tokens, experts = logits.shape
    x = formulas.prepare(logits, seed, rule.jitter)
    if chosen is not None:
        ids = torch.clone(chosen, memory_format=torch.contiguous_format)
    elif rule.drop_policy == "expert_choice":
        ids = torch.arange(experts, dtype=torch.int32, device=x.device).repeat(tokens, 1)
    else:
        ids = formulas.choose(x, bias, rule)
    probs = formulas.probabilities(x, ids, rule)
    kept = ids.new_empty((0, ids.shape[1]), dtype=torch.bool)
    if chosen_kept is not None:
        kept = torch.clone(chosen_kept, memory_format=torch.contiguous_format)
    elif rule.capacity >= 0:
        ids, kept = drop(ids, probs, experts, rule.capacity, rule.drop_policy)
    if rule.capacity >= 0:
        probs = torch.where(kept, probs, 0.0)
    return probs.contiguous(), ids, kept


def _backward(*args: Any) -> torch.Tensor | None:
    grad_probs, logits, seed, expert_ids, kept, *options, output_mask = args
    if not output_mask[0]:
        return None
    rule = RouteOptions(*options)
    if rule.capacity >= 0:
        grad_probs = torch.where(kept, grad_probs, 0.0)
    x = formulas.prepare(logits, seed, rule.jitter)
    grad = formulas.gradient(grad_probs, x, expert_ids, rule)
    if seed is not None:
        grad = grad * formulas.jitter_factors(logits, seed, rule.jitter)
    return grad.to(logits.dtype).contiguous()


def _shard(seed: Any, capacity: int) -> list[Sharding]:
    """Tokens are independent, unless jitter counts them or a capacity is shared among them."""
    words: list[Placement] = [REPLICATE] if seed is not None or capacity >= 0 else [REPLICATE, 0]
    # The mask is empty, or has all rows.
    return [
        ([word, word, REPLICATE], [word, REPLICATE, REPLICATE, word, REPLICATE]) for word in words
    ]


_OP = define_op(
    "moe_route",
    "(Tensor logits, Tensor? bias, Tensor? seed, Tensor? chosen, Tensor? chosen_kept,"
    " SymInt top_k, str score, bool normalize, float scaling, int num_groups, int topk_groups,"
    " str group_score, float jitter, SymInt capacity, str drop_policy)"
    " -> (Tensor probs, Tensor expert_ids, Tensor kept)",
    contract={
        "logits": "T [tokens, experts]",
        "slots": "experts if drop_policy == 'expert_choice' else top_k",
        "bias": "float [experts]",
        "seed": "int64 [2]",
        "chosen": "int32 [tokens, slots]",
        "chosen_kept": "bool [tokens, slots]",
        "probs": "stat(T) [tokens, slots]",
        "expert_ids": "int32 [tokens, slots]",
        "kept": "bool [tokens if capacity >= 0 else 0, slots]",
        "num_groups": "num_groups >= 1 and experts % num_groups == 0",
        "topk_groups": "1 <= topk_groups <= num_groups",
        "within": "experts if topk_groups == num_groups else experts // num_groups * topk_groups",
        "top_k": "1 <= top_k <= within",
        "top2": "group_score == 'max' or topk_groups == num_groups or experts >= 2 * num_groups",
        "score": _SCORES,
        "group_score": _GROUP_SCORES,
        "drop_policy": (*_DROP_POLICIES, "expert_choice"),
        "jitter": "0 <= jitter < 1",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("logits",),
        outputs=("probs",),
        saves=("logits", "seed", "expert_ids", "kept"),
        reference=_backward,
    ),
    triton="fusedops.kernels.moe_route",
    shard=_shard,
)
