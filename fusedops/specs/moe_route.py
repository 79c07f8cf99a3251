"""What tests, benchmarks and documentation need to know of ``moe_route``."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import backends
from fusedops.ops import RoutingPlan, moe_capacity, moe_route
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
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
    """Route as models do today: softmax, topk, and one_hot with cumsum for the order of the rows.

    Ties are broken as ``topk`` happens to: samples have none.
    """
    tokens, experts = logits.shape
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    capacity = None
    if expert_choice:
        ids = torch.arange(experts, device=logits.device).expand(tokens, experts)
        probs = scores * scaling
        capacity = moe_capacity(top_k, tokens, capacity_factor or 1.0, experts)
        best = scores.detach().topk(min(capacity, tokens), dim=0).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True)
        return _plan(ids, probs, experts, kept, capacity)
    keys = scores if bias is None else scores + bias.to(scores.dtype)
    if bias is None and group_score == "max":
        keys = wide  # the same order, also of scores that underflow or saturate
    if num_groups is not None:
        groups = keys.view(tokens, num_groups, -1)
        ranks = groups.amax(-1) if group_score == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        best = ranks.topk(topk_groups or 1, dim=-1).indices
        inside = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, best, True)
        keys = groups.masked_fill(~inside[..., None], -torch.inf).view(tokens, experts)
    ids = keys.topk(top_k, dim=-1).indices
    probs = wide.gather(1, ids).softmax(-1) if softmax_after else scores.gather(1, ids)
    if normalize:
        probs = probs / probs.sum(-1, keepdim=True)
    probs = probs * scaling
    if capacity_factor is None:
        return _plan(ids, probs, experts, None, None)
    capacity = moe_capacity(top_k, tokens, capacity_factor, experts)
    if drop_policy == "probability":
        weights = torch.zeros_like(scores).scatter_(1, ids, probs.detach())
        best = weights.topk(min(capacity, tokens), dim=0).indices
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(0, best, True).gather(1, ids)
        return _plan(ids, probs, experts, kept, capacity)
    counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
    alive = torch.ones(tokens, dtype=torch.bool, device=logits.device)
    chosen: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for number, choice in enumerate(ids.t()):
        if drop_policy == "rounds" and number:
            choice = torch.where(alive, choice, chosen[-1])
        hot = F.one_hot(choice, experts) * alive[:, None]
        place = (hot.cumsum(0) + counts).gather(1, choice[:, None])[:, 0]
        fits = (place <= capacity) & alive
        counts = counts + (hot * fits[:, None]).sum(0)
        if drop_policy == "rounds":
            alive = fits
        chosen.append(choice)
        masks.append(fits)
    return _plan(torch.stack(chosen, 1), probs, experts, torch.stack(masks, 1), capacity)


def _plan(
    ids: torch.Tensor,
    probs: torch.Tensor,
    experts: int,
    kept: torch.Tensor | None,
    capacity: int | None,
) -> RoutingPlan:
    """Order the rows by ``one_hot`` and ``cumsum``, dropped ones behind."""
    groups, places = (ids, experts) if kept is None else (ids.where(kept, experts), experts + 1)
    flat = groups.reshape(-1)
    hot = F.one_hot(flat, places)
    totals = hot.sum(0)
    rank = (hot.cumsum(0) * hot).sum(-1) - 1
    positions = rank + (totals.cumsum(0) - totals)[flat]
    permutation = torch.empty_like(positions)
    permutation[positions] = torch.arange(flat.numel(), device=flat.device)
    if kept is not None:
        probs = torch.where(kept, probs, 0.0)
    counts = totals[:experts]
    order = (permutation, positions.view(ids.shape), counts, counts.cumsum(0))
    permutation, positions, counts, ends = (tensor.int() for tensor in order)
    return RoutingPlan(
        ids.int(), probs, permutation, positions, counts, ends, kept, experts, capacity
    )


def distinct(tokens: int, experts: int, **place: Any) -> torch.Tensor:
    """Return logits without ties in any dtype: a permutation per row, each row of its own slope.

    Multiples of 1/64 of at most 8 bits are exact in bfloat16; 0 would be a tie between rows.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{tokens}x{experts}".encode()))
    ranks = torch.rand(tokens, experts, generator=generator).argsort(-1) - experts // 2
    ranks = ranks + (ranks >= 0)
    most = 255 // (experts // 2 + 1)
    slopes = most - torch.arange(tokens) % max(1, most // 2)
    values = ranks * slopes[:, None] / 64
    return values.to(**place).requires_grad_()


# Sigmoids and softmaxes of all of a row, or of some, underflow or saturate; none are equal.
_EXTREME_LOGITS = (
    (-110.0, -100.0, -90.0, -75.0, -60.0),
    (-95.0, -110.0, -90.0, -100.0, -105.0),
    (60.0, -1.0, 2.0, -110.0, 0.5),
    (-90.0, 90.0, 1.0, -2.0, 0.0),
    (3.0, -60.0, -110.0, 1.0, 110.0),
)


def _reference(*args: Any, **kwargs: Any) -> RoutingPlan:
    with backends.use_backend("torch"):
        return moe_route(*args, **kwargs)


def _samples(new: TensorFactory) -> list[Sample]:
    def logits(tokens: int, experts: int) -> torch.Tensor:
        return distinct(tokens, experts, **new.place)

    def bias(experts: int) -> torch.Tensor:
        return new(experts, dtype=torch.float32, scale=0.1, grad=False, key="bias")

    sigmoid: dict[str, Any] = {"score": "sigmoid", "normalize": True, "scaling": 2.5}
    groups: dict[str, Any] = {"num_groups": 4, "topk_groups": 2}
    capacity: dict[str, Any] = {"capacity_factor": 0.75}
    by_weight: dict[str, Any] = {**capacity, "drop_policy": "probability"}
    rounds: dict[str, Any] = {**capacity, "drop_policy": "rounds"}
    extremes = torch.tensor(_EXTREME_LOGITS, **new.place).requires_grad_()
    deepseek = {**sigmoid, **groups, "group_score": "top2_sum", "bias": bias(32)}
    by_experts = {"expert_choice": True, "capacity_factor": 2.0, "score": "sigmoid"}
    return [
        Sample("plain", (logits(12, 5), 2)),
        Sample("normalized", (logits(33, 8), 2), {"normalize": True}),
        Sample("switch", (logits(7, 4), 1)),
        Sample("softmax_after", (logits(19, 32), 4), {"softmax_after": True}),
        Sample("all_experts", (logits(6, 7), 7), {"scaling": 0.5}),
        Sample("many_choices", (logits(5, 61), 40), {"normalize": True}),
        Sample("sigmoid", (logits(17, 9), 3), {"score": "sigmoid"}),
        Sample("extremes", (extremes, 2)),
        Sample("extremes_normalized", (extremes, 2), {"normalize": True}),
        Sample("extremes_sigmoid", (extremes, 2), {"score": "sigmoid"}),
        Sample("extremes_sigmoid_normalized", (extremes, 3), sigmoid),
        Sample("sigmoid_bias", (logits(17, 16), 3), {**sigmoid, "bias": bias(16)}),
        Sample("softmax_bias", (logits(9, 6), 2), {"bias": bias(6)}),
        Sample("softmax_bias_normalized", (logits(9, 6), 2), {"bias": bias(6), "normalize": True}),
        Sample("groups", (logits(21, 16), 3), {**groups}),
        Sample("deepseek_v3", (logits(21, 32), 6), deepseek),
        Sample("groups_of_many_choices", (logits(3, 80), 36), {**groups, "normalize": True}),
        Sample("capacity", (logits(20, 4), 2), capacity),
        Sample("capacity_normalized", (logits(20, 4), 2), {**capacity, "normalize": True}),
        Sample("capacity_sigmoid", (logits(18, 6), 3), {**capacity, **sigmoid}),
        Sample("capacity_above_all", (logits(5, 3), 2), {"capacity_factor": 9.0}),
        Sample("capacity_by_probability", (logits(12, 6), 2), by_weight),
        Sample("capacity_in_rounds", (logits(20, 4), 2), rounds),
        Sample("rounds_sigmoid", (logits(18, 6), 3), {**rounds, "score": "sigmoid"}),
        Sample("expert_choice", (logits(12, 6), 2), {"expert_choice": True}),
        Sample("expert_choice_sigmoid", (logits(11, 5), 1), by_experts),
        Sample("jitter", (logits(9, 7), 2), {"jitter": 0.01}, random=True),
        Sample(
            "jitter_chosen", (logits(9, 8), 2), {"jitter": 0.01, "normalize": True}, random=True
        ),
        Sample("one_expert", (logits(5, 1), 1)),
        Sample("one_token", (logits(1, 6), 2)),
        Sample("no_tokens", (logits(0, 6), 2), capacity),
        Sample("several_blocks", (logits(130, 37), 5), {"normalize": True}),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(6, 8, device=device)

    grouped: dict[str, Any] = {"num_groups": 4, "topk_groups": 1}
    pairs: dict[str, Any] = {"num_groups": 8, "topk_groups": 2, "group_score": "top2_sum"}
    rounds: dict[str, Any] = {"drop_policy": "rounds", "capacity_factor": 1.0}
    bad = bad_changes(logits=x, top_k=2)
    return [
        bad("top_k_above", "top_k", "from 1 to 8", "9", top_k=9),
        bad("top_k_zero", "top_k", "from 1", "0", top_k=0),
        bad("capacity_huge", "capacity_factor", "1e+09", capacity_factor=1e300),
        bad("no_experts", "top_k", "from 1 to 0", logits=x[:, :0], top_k=1),
        bad("dims", "logits", "[tokens, experts]", "[1, 6, 8]", logits=x[None]),
        bad("bias_shape", "bias", "[8]", "[7]", bias=x[0, :7]),
        bad("groups_alone", "topk_groups", "None", num_groups=4),
        bad("best_groups_alone", "num_groups", "None", topk_groups=1),
        bad("groups_divide", "num_groups", "3", top_k=1, num_groups=3, topk_groups=1),
        bad("groups_above", "topk_groups", "5", top_k=1, num_groups=4, topk_groups=5),
        bad("top_k_in_groups", "top_k", "from 1 to 2", "3", top_k=3, **grouped),
        bad("groups_of_one", "group_score", "max", top_k=1, **pairs),
        bad("capacity_zero", "capacity_factor", "0.0", capacity_factor=0.0),
        bad("jitter", "jitter", "[0, 1)", "1.0", jitter=1.0),
        bad("after", "score", "sigmoid", softmax_after=True, score="sigmoid"),
        bad("rounds", "drop_policy", "normalize", normalize=True, **rounds),
        bad("expert_choice", "bias", expert_choice=True, bias=x[0]),
    ]


# What DeepSeek-V3 chooses among 256 experts with.
_DEEPSEEK: dict[str, Any] = {"score": "sigmoid", "normalize": True, "group_score": "top2_sum"}
_DEEPSEEK |= {"num_groups": 8, "topk_groups": 4}


def _case(tokens: int, experts: int, top_k: int, **options: Any) -> BenchCase:
    sigmoid = options.get("score") == "sigmoid"

    def make(new: TensorFactory) -> Sample:
        made = dict(options)
        if sigmoid:
            made["bias"] = new(experts, dtype=torch.float32, scale=0.01, grad=False)
        return Sample("bench", (new(tokens, experts), top_k), made)

    # Logits, and ids, weights, permutation and positions.
    size, slots = tokens * experts, tokens * top_k
    label = f"{tokens}x{experts} top{top_k}{' sigmoid groups' * sigmoid}"
    return BenchCase.moving(label, make, (size, 2 * size), extra=(16 * slots, 8 * slots))


SPEC = describe(moe_route, _eager, _samples, _bad_inputs, _case)(
    # NaN is taken for -inf, inf for the largest number; which of equal logits come first is fixed.
    non_finite=(_reference,),
    bench_cases=(
        _case(4096, 8, 2, normalize=True).headlined(),
        _case(4096, 8, 8, normalize=True),
        _case(4096, 64, 2, normalize=True),
        _case(4096, 64, 8, normalize=True).headlined(),
        _case(4096, 256, 8, **_DEEPSEEK),
        _case(4096, 64, 8),
    ),
    summary="experts and weights of each token: top-k, groups, bias, capacity, expert choice",
    autocast="keep",
    rows_are_independent=False,
    limits=(
        "Scores with a bias are rounded to float32: two that differ by a unit in the last place "
        "may compare differently on different backends. Equal ones never do.",
    ),
)
