"""What only routing promises: plans, ties, capacities, hashes, balance, choices that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import (
    RoutingPlan,
    hash_route,
    keep_routing,
    moe_capacity,
    moe_route,
    routing_contexts,
    update_balancing_bias,
)
from fusedops.ops.hash_route import _mix, _signed
from fusedops.specs import _routing
from fusedops.testing import threads

CPU = torch.device("cpu")
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
ONES = torch.ones(1, 1)
of_each_pattern = pytest.mark.parametrize("pattern", _routing.PATTERNS)


def make(pattern: str = "dropped") -> Any:
    return _routing.plan(12, 3, 5, device=CPU, dtype=torch.float32, pattern=pattern)


@of_each_pattern
def test_rows_are_sorted_by_expert_then_by_slot_and_dropped_slots_come_last(pattern: str) -> None:
    plan = make(pattern)
    ids, kept = plan.expert_ids.flatten().tolist(), plan.kept.flatten().tolist()
    wanted = sorted(range(36), key=lambda slot: (ids[slot] if kept[slot] else 5, slot))
    assert plan.permutation.tolist() == wanted
    assert [plan.permutation[row] for row in plan.positions.flatten().tolist()] == list(range(36))
    counts = [sum(k and i == e for i, k in zip(ids, kept, strict=True)) for e in range(5)]
    assert plan.tokens_per_expert.tolist() == counts
    assert plan.offsets.tolist() == [sum(counts[: e + 1]) for e in range(5)]
    assert plan.num_dropped.item() == 36 - sum(counts)
    assert (plan.probs[~plan.kept] == 0).all() and (plan.probs[plan.kept] > 0).all()
    assert (plan.num_tokens, plan.top_k) == (12, 3)
    for each in (plan.expert_ids, plan.permutation, plan.positions, plan.offsets):
        assert each.dtype == torch.int32


def test_probabilities_are_differentiable_and_those_of_dropped_slots_get_no_gradient() -> None:
    ids = torch.tensor([[0, 2], [1, 0]])
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        probs = torch.ones(2, 2, dtype=dtype, requires_grad=True)
        plan = RoutingPlan.from_choices(ids, probs, 2, kept=torch.tensor([[True, True]] * 2))
        assert plan.probs.dtype == wide
        plan.probs.sum().backward()
        assert probs.grad is not None and probs.grad.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_plan_goes_into_through_and_out_of_compiled_and_checkpointed_code(dynamic: bool) -> None:
    def use(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return x * plan.probs.sum() + plan.permutation[0] + plan.num_tokens * plan.num_experts

    def step(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> Any:
        plan = RoutingPlan.from_choices(ids, probs, 5)
        plan = plan.with_probs(plan.probs * 2)
        return checkpoint(use, x, plan, use_reentrant=False), plan

    torch._dynamo.reset()
    compiled_step, compiled_use = (
        torch.compile(each, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for each in (step, use)
    )
    results = []
    for function in (step, compiled_step):
        x = torch.ones(3, requires_grad=True)
        probs = make().probs.detach().requires_grad_()
        output, plan = function(x, make().expert_ids, probs)
        assert isinstance(plan, RoutingPlan)
        outputs = (output, compiled_use(x, plan))
        grads = torch.autograd.grad(sum(each.sum() for each in outputs), (x, probs))
        results.append((*outputs, *grads, plan.permutation, plan.offsets))
    assert_same_bits(*results)


@pytest.mark.parametrize(
    ("top_k", "tokens", "factor", "experts", "capacity"),
    [
        *((1, 1024, 1.1, 8, 141), (1, 8192, 1.1, 36, 251), (2, 1024, 1.25, 8, 320)),
        # A decimal factor is exact.
        *((1, 100, 1.1, 8, 14), (1, 100, 1.1, 10, 11), (1, 10**7, 1.1, 11, 10**6)),
    ],
)
def test_published_capacities(
    top_k: int, tokens: int, factor: float, experts: int, capacity: int
) -> None:
    assert moe_capacity(top_k, tokens, factor, experts) == capacity
    if tokens == 100:
        plan = moe_route(torch.randn(tokens, experts), top_k, capacity_factor=factor)
        assert plan.capacity == capacity and int(plan.tokens_per_expert.max()) <= capacity


def route(
    backend: str,
    logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    score: str = "softmax",
    normalize: bool = False,
    groups: tuple[int, int, str] = (1, 1, "max"),
    capacity: int = -1,
    drop_policy: str = "position",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call the operator itself, without ordering rows: (probs, ids, kept)."""
    rule = (score, normalize, 1.0, *groups, 0.0, capacity, drop_policy)
    with fusedops.use_backend(backend):
        result: Any = torch.ops.fusedops.moe_route(logits, bias, None, None, None, top_k, *rule)
    return result


ZEROS = torch.zeros(37, 11)
ZEROS[1::2, ::2] = -0.0
SOME = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0, 0.0]])
TWO_OF_A_GROUP = torch.zeros(5, 12)
TWO_OF_A_GROUP[:, 9:] = torch.tensor([2.0, 2.0, 0.0])
# Logits, number of choices, options, the choices of each token.
TIES: list[tuple[torch.Tensor, int, dict[str, Any], list[int]]] = [
    *((ZEROS, top_k, {}, list(range(top_k))) for top_k in (1, 2, 5, 11)),
    *((ZEROS.bfloat16(), top_k, {}, list(range(top_k))) for top_k in (1, 2, 5, 11)),
    (SOME, 7, {}, [1, 3, 5, 2, 4, 6, 0]),
    (SOME.bfloat16(), 7, {}, [1, 3, 5, 2, 4, 6, 0]),
    # Scores that saturate, and equal ones with a bias.
    (10.0 * SOME + 20.0, 4, {"score": "sigmoid", "bias": torch.zeros(8)}, [0, 1, 2, 3]),
    (
        torch.full((3, 40), 0.7),
        34,
        {"score": "sigmoid", "bias": torch.full((40,), 0.1)},
        list(range(34)),
    ),
    (TWO_OF_A_GROUP, 4, {"groups": (4, 2, "max")}, [9, 10, 0, 1]),
    (TWO_OF_A_GROUP, 4, {"groups": (4, 2, "top2_sum")}, [9, 10, 0, 1]),
]


@on_each_backend
@pytest.mark.parametrize(("logits", "top_k", "options", "choices"), TIES)
def test_ties_go_to_the_lower_expert_or_group(
    logits: torch.Tensor, top_k: int, options: dict[str, Any], choices: list[int], backend: str
) -> None:
    _, ids, _ = route(backend, logits, top_k, **options)
    assert ids.tolist() == [choices] * len(logits)


@on_each_backend
def test_ties_between_tokens_go_to_the_earlier_token(backend: str) -> None:
    logits = torch.zeros(9, 3)
    _, _, kept = route(backend, logits, 2, capacity=4, drop_policy="probability")
    assert kept.tolist() == [[True, True]] * 4 + [[False, False]] * 5
    _, _, kept = route(backend, logits, 3, capacity=2, drop_policy="expert_choice")
    assert kept.tolist() == [[True] * 3] * 2 + [[False] * 3] * 7


@on_each_backend
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_nan_and_infinity_are_routed_as_documented(
    backend: str, score: str, normalize: bool
) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [nan, 1.0, -inf, 0.0], [inf, 1.0, nan, 2.0], [-inf] * 4]
    logits = torch.tensor(rows, requires_grad=True)
    probs, ids, _ = route(backend, logits, 2, score=score, normalize=normalize)
    assert ids.tolist() == [[0, 1], [1, 3], [0, 3], [0, 1]]
    assert probs.isfinite().all()
    assert probs[0].tolist() == [0.0, 0.0] and probs[3].tolist() == [0.0, 0.0]
    if score == "softmax":
        assert probs[2].tolist() == [1.0, 0.0]
    (grad,) = torch.autograd.grad(probs, logits, torch.tensor([3.0, -2.0]).expand(4, 2))
    assert grad.isfinite().all() and (grad[logits.isnan()] == 0).all()


@on_each_backend
def test_all_backends_choose_the_same(backend: str) -> None:
    torch.manual_seed(5)
    for experts, top_k in ((8, 2), (60, 4), (64, 8), (128, 8), (200, 40)):
        logits = (torch.randn(29, experts) * 8).round() / 8  # full of ties
        bias = torch.randn(experts) * 0.1
        grouped = {"bias": bias, "score": "sigmoid", "groups": (4, 2, "top2_sum")}
        for options in ({}, grouped):
            got, want = (route(name, logits, top_k, **options) for name in (backend, "torch"))
            assert torch.equal(got[1], want[1])


@on_each_backend
def test_a_token_does_not_depend_on_its_batch(backend: str) -> None:
    torch.manual_seed(6)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(70, 37).to(dtype)
        for options in ({"normalize": True}, {}, {"score": "sigmoid"}):
            probs, ids, _ = route(backend, logits, 4, **options)
            for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
                alone = route(backend, logits[rows], 4, **options)
                assert torch.equal(alone[1], ids[rows]) and torch.equal(alone[0], probs[rows])


class Layer(torch.nn.Module):
    """A router whose recomputation sees other logits, as a kernel that rounds otherwise would."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.router = torch.nn.Linear(16, 8, bias=False)
        self.balancing = fusedops.nn.BalancingBias(8)
        self.options = options
        self.runs = 0
        self.ids: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(8, generator=torch.Generator().manual_seed(self.runs))
        self.runs += 1
        plan = moe_route(self.router(x) + noise, 2, **self.options)
        self.ids.append(plan.expert_ids.clone())
        self.balancing.count(plan)
        return x * plan.probs.sum(-1, keepdim=True)


def hidden(tokens: int = 50) -> torch.Tensor:
    return torch.randn(tokens, 16, requires_grad=True)


def kept(layer: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint(keep_routing(layer), x, **{"use_reentrant": False} | options)


def selective(layer: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=routing_contexts)


# Whether a recomputation chooses as the first run did.
WAYS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "keep_routing": (kept, True),
    "keep_routing, reentrant": (lambda *args: kept(*args, use_reentrant=True), True),
    "selective": (selective, True),
    "neither": (lambda *args: checkpoint(*args, use_reentrant=False), False),
}


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 0.5, "normalize": True}, {"jitter": 0.1}], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_keeps_the_first_choice(way: str, options: dict[str, Any]) -> None:
    layer, x = Layer(**options), hidden()
    run, same = WAYS[way]
    for _ in range(2):  # steps: each wraps anew
        layer.ids.clear()
        fusedops.reset_counters()
        run(layer, x).sum().backward()
        first, again = layer.ids
        assert torch.equal(first, again) == same
    assert layer.router.weight.grad is not None and layer.router.weight.grad.any()
    assert int(layer.balancing.tokens_per_expert.sum()) == 2 * 50 * 2, "each choice counts once"
    if way == "selective":
        assert fusedops.counters()["moe_route", "cpp"] == 1


def test_weights_of_a_kept_routing_come_from_the_recomputed_logits() -> None:
    """With the same logits the gradient is that of a pass without checkpoint."""
    x = hidden()
    grads = []
    for wrapped in (False, True):
        layer = Layer(normalize=True)

        def run(value: torch.Tensor, layer: Layer = layer) -> torch.Tensor:
            layer.runs = 0
            return layer(value)

        y = kept(run, x) if wrapped else run(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, layer.router.weight]))
    assert_same_bits(*grads)


def test_nested_checkpoints_keep_the_first_choice() -> None:
    inner, outer = Layer(), Layer()
    kept(lambda value: outer(kept(inner, value)), hidden()).sum().backward()
    for layer in (inner, outer):
        assert len(layer.ids) > 1
        assert all(torch.equal(ids, layer.ids[0]) for ids in layer.ids)


def test_micro_batches_in_flight_keep_their_own_choices() -> None:
    layer = Layer()
    losses = [kept(layer, hidden(30)).sum() for _ in range(3)]
    first = list(layer.ids)
    for number in (1, 0, 2):
        losses[number].backward()
        assert torch.equal(layer.ids[-1], first[number])


def test_a_wrapper_that_is_used_for_another_batch_says_so() -> None:
    wrapper = keep_routing(Layer())
    wrapper(hidden(5))
    with pytest.raises(RuntimeError, match="keep_routing: .* 6 tokens .* 5"):
        wrapper(hidden(6))
    calls = iter((1, 2))

    def more_often(x: torch.Tensor) -> None:
        for _ in range(next(calls)):
            moe_route(x, 1)

    wrapper = keep_routing(more_often)
    wrapper(hidden(5))
    with pytest.raises(RuntimeError, match="keep_routing: .* more often than the first run"):
        wrapper(hidden(5))


def test_a_compiled_selective_checkpoint_routes_once() -> None:
    weight, x = torch.randn(8, 16, requires_grad=True), hidden()

    def layer(x: torch.Tensor) -> torch.Tensor:
        plan = moe_route(torch.sin(x) @ weight.t(), 2)
        return x * plan.probs.sum(-1, keepdim=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return selective(layer, x)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    fusedops.reset_counters()
    got = torch.autograd.grad(compiled(x).square().sum(), [x, weight])
    assert fusedops.counters()["moe_route", "cpp"] == 1
    assert_same_bits(got, torch.autograd.grad(layer(x).square().sum(), [x, weight]))


def test_choices_count_before_they_are_dropped_and_only_in_training() -> None:
    balancing = fusedops.nn.BalancingBias(8)
    plan = moe_route(torch.randn(40, 8), 2, capacity_factor=0.25)
    balancing.count(plan)
    assert int(balancing.tokens_per_expert.sum()) == 80
    balancing.eval().count(plan)
    assert int(balancing.tokens_per_expert.sum()) == 80


def test_the_bias_stays_float32_and_is_saved_alone() -> None:
    balancing = fusedops.nn.BalancingBias(3, rate=1e-3)
    balancing.tokens_per_expert += torch.tensor([3, 0, 0])
    balancing.step().bfloat16()
    assert torch.equal(balancing.bias, torch.tensor([-1e-3, 1e-3, 1e-3]))
    assert not balancing.tokens_per_expert.any()
    assert list(balancing.state_dict()) == ["bias"]


def test_another_modules_bias_can_be_stepped() -> None:
    gate = fusedops.nn.MoE(8, 4, num_experts=4, top_k=1, score="sigmoid", correction_bias=True).gate
    balancing = fusedops.nn.BalancingBias(4, rate=0.5)
    balancing.count(gate(torch.ones(6, 8))[1])  # equal tokens: one expert has them all
    balancing.step(gate.e_score_correction_bias)
    assert sorted(gate.e_score_correction_bias.tolist()) == [-0.5, 0.5, 0.5, 0.5]


def test_the_counts_of_ranks_are_summed_before_they_are_compared() -> None:
    def on_rank(rank: int) -> list[float]:
        # 256 + 1 is no number of bfloat16.
        counts = torch.tensor([[256.0, 256.0], [1.0, 0.0]], dtype=torch.bfloat16)[rank]
        bias = torch.zeros(2)
        update_balancing_bias(bias, counts, rate=0.5, group=torch.distributed.group.WORLD)
        own = counts.double()
        update_balancing_bias(torch.zeros(2), own, group=torch.distributed.group.WORLD)
        assert torch.equal(own, counts.double())  # not the sum of the ranks
        broken = torch.tensor([[1.0, 1.0], [1.0, float("nan")]])[rank]
        with pytest.raises(ValueError, match="got nan for expert 1"):
            update_balancing_bias(bias, broken, group=torch.distributed.group.WORLD)
        return bias.tolist()

    assert threads.run(on_rank, 2) == [[-0.5, 0.5]] * 2


def test_equal_counts_change_nothing_and_centering_keeps_the_mean() -> None:
    bias = update_balancing_bias(torch.ones(3), torch.tensor([7, 7, 7]))
    assert torch.equal(bias, torch.ones(3))
    bias = update_balancing_bias(torch.zeros(4), torch.tensor([9, 0, 0, 0]), centered=True)
    assert bias[0] < 0 < bias[1]
    assert float(bias.double().sum()) == pytest.approx(0.0, abs=torch.finfo(bias.dtype).eps)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (7, 2), (64, 8), (5, 5), (1, 1)])
def test_hashed_choices_of_a_token_differ_and_spread(experts: int, top_k: int) -> None:
    plan = hash_route(torch.arange(20_000), experts, top_k=top_k)
    chosen = plan.expert_ids.sort(-1).values
    assert plan.expert_ids.shape == (20_000, top_k)
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    mean = 20_000 * top_k / experts
    assert ((plan.tokens_per_expert - mean).abs() < 0.15 * mean).all()
    assert torch.equal(plan.probs, torch.full_like(plan.probs, 1 / top_k))


def test_equal_ids_are_routed_alike_and_seeds_differ() -> None:
    ids = torch.tensor([5, -3, 5, 2**40, -3, 2**40])
    chosen = hash_route(ids, 16, top_k=2).expert_ids
    assert torch.equal(chosen[0], chosen[2]) and torch.equal(chosen[1], chosen[4])
    many = torch.arange(100)
    same = hash_route(many.int(), 16).expert_ids
    assert torch.equal(same, hash_route(many, 16).expert_ids)
    assert not torch.equal(same, hash_route(many, 16, seed=1).expert_ids)


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator, seeds 0 and 1234567."""
    published = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}
    for seed, value in published.items():
        mixed = _mix(torch.tensor([_signed(seed + 0x9E3779B97F4A7C15)]))
        assert int(mixed) % 2**64 == value


def test_a_table_decides() -> None:
    table = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    ids = torch.tensor([2, 0, 2, 1])
    assert torch.equal(hash_route(ids, 3, table=table).expert_ids, table[ids])


def choose(ids: list[Any], probs: torch.Tensor = ONES, experts: int = 2) -> Any:
    return RoutingPlan.from_choices(torch.tensor(ids), probs, experts)


def by_table(ids: list[int], *rows: list[int], **options: Any) -> Any:
    return hash_route(torch.tensor(ids), 4, table=torch.tensor(rows).long(), **options)


THREE, COUNTS = torch.zeros(3), torch.zeros(3).long()
Bias, step = fusedops.nn.BalancingBias, update_balancing_bias
NOT_A_ROW = "token_ids must be rows of table, at least 0 and less than 2, got"
TOO_MANY = "num_experts must be at most 16777216, got"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: choose([[3]]), "expert_ids .*3.*token 0"),
    (lambda: choose([[-1]]), "expert_ids .*-1"),
    (lambda: choose([[2**32]]), f"expert_ids .*{2**32}"),
    (lambda: choose([[0]], torch.ones(1, 2)), r"probs .*\[1, 1\].*\[1, 2\]"),
    (lambda: choose([[0]], ONES.int()), "probs .*int32"),
    (lambda: choose([0], torch.ones(1)), r"expert_ids .*\[tokens, top_k\]"),
    (lambda: choose([[0]], experts=2**24 + 1), TOO_MANY),
    (lambda: moe_capacity(1, 8, 0.0, 8), "capacity_factor must be positive"),
    (lambda: hash_route(torch.arange(3), 4, top_k=5), "top_k must be from 1 to 4"),
    (lambda: hash_route(torch.zeros(2, 3).long(), 4), "token_ids must be of 1 dims"),
    (lambda: hash_route(torch.arange(3), 2**31), TOO_MANY),
    (lambda: hash_route(torch.arange(3), 4, table=torch.arange(3)), "table must be of 2"),
    (lambda: by_table([0, 2], [0], [1]), f"{NOT_A_ROW} 2"),
    (lambda: by_table([0, -1], [0], [1]), f"{NOT_A_ROW} -1"),
    (lambda: by_table([1], [0], [5]), "table must be of experts from 0 to 3, .* got 5"),
    (lambda: by_table([0], [], []), "table must be of 1 to 4"),
    (lambda: by_table([0], [0], top_k=2), "top_k must be 1, the columns of table, got 2"),
    (lambda: step(THREE, COUNTS[[0]].repeat(4)), r"tokens_per_expert .* \[3\]"),
    (lambda: step(THREE[:, None], COUNTS), "bias must be of 1 dim"),
    (lambda: step(COUNTS, COUNTS), "bias must have a floating dtype"),
    (lambda: step(THREE[:1].expand(3), COUNTS), "bias must .* expanded one"),
    (lambda: step(THREE, THREE - 1.0), "tokens_per_expert must be .*, got -1.0 for"),
    (lambda: step(THREE, THREE + torch.nan), "tokens_per_expert must be .*, got nan for"),
    (lambda: step(THREE, THREE + torch.inf), "tokens_per_expert must be .*, got inf for"),
    (lambda: step(THREE, COUNTS, rate=-1.0), "rate must be at least 0"),
    (lambda: Bias(3, -1.0), "rate must be at least 0"),
    (lambda: Bias(3).count(None), "plan must be a RoutingPlan"),
    (lambda: Bias(3).step("bias"), "bias must be a torch.Tensor"),
    (lambda: Bias(0), "num_experts must be at least 1, got 0"),
    (lambda: Bias(3).count(moe_route(THREE[None, :2], 1)), "plan must have 3 experts, got 2"),
    (lambda: fusedops.ops.routing_contexts(3), "policy must be a function, got int"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_wrong_choices_are_named(call: Callable[[], Any], words: str) -> None:
    names = "RoutingPlan.from_choices|moe_capacity|hash_route|.*balancing_bias|Bal.*|.*contexts"
    with pytest.raises((TypeError, ValueError), match=f"^({names}): {words}"):
        call()
