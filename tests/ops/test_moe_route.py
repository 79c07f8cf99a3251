"""What only routing promises: ties, published capacities, the families' routers, reused plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import keep_routing, moe_capacity, moe_route, routing_contexts

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


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


def test_a_capacity_factor_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_capacity: capacity_factor must be positive"):
        moe_capacity(1, 8, 0.0, 8)


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_ties_go_to_the_lower_expert(backend: str, dtype: torch.dtype) -> None:
    same = torch.zeros(37, 11, dtype=dtype)
    same[1::2, ::2] = -0.0
    for top_k in (1, 2, 5, 11):
        _, ids, _ = route(backend, same, top_k)
        assert torch.equal(ids, torch.arange(top_k, dtype=torch.int32).repeat(37, 1))
    some = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0, 0.0]], dtype=dtype)
    _, ids, _ = route(backend, some, 7)
    assert ids.tolist() == [[1, 3, 5, 2, 4, 6, 0]]


@on_each_backend
def test_ties_of_scores_go_to_the_lower_expert(backend: str) -> None:
    saturated = torch.tensor([[40.0, 30.0, 50.0, 20.0]])
    _, ids, _ = route(backend, saturated, 4, score="sigmoid", bias=torch.zeros(4))
    assert ids.tolist() == [[0, 1, 2, 3]]
    equal = torch.full((3, 40), 0.7)
    _, ids, _ = route(backend, equal, 34, score="sigmoid", bias=torch.full((40,), 0.1))
    assert torch.equal(ids, torch.arange(34, dtype=torch.int32).repeat(3, 1))


@on_each_backend
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_ties_of_groups_go_to_the_lower_group(backend: str, group_score: str) -> None:
    logits = torch.zeros(5, 12)
    logits[:, 9:] = torch.tensor([2.0, 2.0, 0.0])
    _, ids, _ = route(backend, logits, 4, groups=(4, 2, group_score))
    assert ids.tolist() == [[9, 10, 0, 1]] * 5


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
    logits = torch.tensor(
        [
            [nan, nan, nan, nan],
            [nan, 1.0, -inf, 0.0],
            [inf, 1.0, nan, 2.0],
            [-inf, -inf, -inf, -inf],
        ],
        requires_grad=True,
    )
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
        got, want = route(backend, logits, top_k), route("torch", logits, top_k)
        assert torch.equal(got[1], want[1])
        groups = (4, 2, "top2_sum")
        got = route(backend, logits, top_k, bias=bias, score="sigmoid", groups=groups)
        want = route("torch", logits, top_k, bias=bias, score="sigmoid", groups=groups)
        assert torch.equal(got[1], want[1])


@on_each_backend
def test_every_first_choice_stands_before_any_second_one(backend: str) -> None:
    first, second = [2.0, 1.0, 0.0], [1.0, 2.0, 0.0]
    logits = torch.tensor([first, first, second, second])
    _, ids, kept = route(backend, logits, 2, capacity=3)
    assert ids.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert kept.tolist() == [[True, True], [True, False], [True, True], [True, False]]


@on_each_backend
def test_in_rounds_a_dropped_token_chooses_the_same_expert_again(backend: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(3, 1)
    _, ids, kept = route(backend, logits, 3, capacity=2, drop_policy="rounds")
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0]]
    assert kept.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    _, ids, kept = route(backend, logits, 3, capacity=2, drop_policy="position")
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert kept.tolist() == [[True] * 3, [True] * 3, [False] * 3]


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


def test_dropped_slots_have_no_weight_and_no_gradient() -> None:
    torch.manual_seed(7)
    logits = torch.randn(40, 4, requires_grad=True)
    plan = moe_route(logits, 1, capacity_factor=0.5, score="sigmoid")
    assert plan.kept is not None and not plan.kept.all()
    assert (plan.probs[~plan.kept] == 0).all() and (plan.probs[plan.kept] > 0).all()
    (grad,) = torch.autograd.grad(plan.probs.sum(), logits)
    assert torch.equal(grad.ne(0).any(1), plan.kept[:, 0])
    assert int(plan.num_dropped) == int((~plan.kept).sum())


class Layer(torch.nn.Module):
    """A router whose recomputation sees other logits, as a kernel that rounds otherwise would."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.router = torch.nn.Linear(16, 8, bias=False)
        self.options = options
        self.runs = 0
        self.ids: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(8, generator=torch.Generator().manual_seed(self.runs))
        self.runs += 1
        plan = moe_route(self.router(x) + noise, 2, **self.options)
        self.ids.append(plan.expert_ids.clone())
        return x * plan.probs.sum(-1, keepdim=True)


OPTIONS = [{}, {"capacity_factor": 0.5, "normalize": True}, {"jitter": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "capacity", "jitter"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_keeps_the_first_choice(use_reentrant: bool, options: Any) -> None:
    layer, x = Layer(**options), torch.randn(50, 16, requires_grad=True)
    for _ in range(2):  # steps: each wraps anew
        layer.ids.clear()
        checkpoint(keep_routing(layer), x, use_reentrant=use_reentrant).sum().backward()
        first, again = layer.ids
        assert torch.equal(first, again)
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().sum() > 0


def test_without_it_the_perturbed_recomputation_chooses_otherwise() -> None:
    layer, x = Layer(), torch.randn(50, 16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    first, again = layer.ids
    assert not torch.equal(first, again)


def test_selective_checkpointing_keeps_the_first_choice() -> None:
    layer, x = Layer(), torch.randn(50, 16, requires_grad=True)
    fusedops.reset_counters()
    y = checkpoint(layer, x, use_reentrant=False, context_fn=routing_contexts)
    y.sum().backward()
    first, again = layer.ids
    assert torch.equal(first, again)
    assert fusedops.counters()["moe_route", "cpp"] == 1


def test_weights_of_a_kept_routing_come_from_the_recomputed_logits() -> None:
    """With the same logits the gradient is that of a pass without checkpoint."""
    x = torch.randn(50, 16, requires_grad=True)
    grads = []
    for wrapped in (False, True):
        layer = Layer(normalize=True)

        def run(value: torch.Tensor, layer: Layer = layer) -> torch.Tensor:
            layer.runs = 0
            return layer(value)

        y = checkpoint(keep_routing(run), x, use_reentrant=False) if wrapped else run(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, layer.router.weight]))
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_nested_checkpoints_keep_the_first_choice() -> None:
    inner, outer = Layer(), Layer()
    x = torch.randn(50, 16, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        value = checkpoint(keep_routing(inner), value, use_reentrant=False)
        return outer(value)

    checkpoint(keep_routing(block), x, use_reentrant=False).sum().backward()
    for layer in (inner, outer):
        assert len(layer.ids) > 1
        assert all(torch.equal(ids, layer.ids[0]) for ids in layer.ids)


def test_micro_batches_in_flight_keep_their_own_choices() -> None:
    layer = Layer()
    batches = [torch.randn(30, 16, requires_grad=True) for _ in range(3)]
    losses = [checkpoint(keep_routing(layer), x, use_reentrant=False).sum() for x in batches]
    first = list(layer.ids)
    for number in (1, 0, 2):
        losses[number].backward()
        assert torch.equal(layer.ids[-1], first[number])


def test_a_wrapper_that_is_used_for_another_batch_says_so() -> None:
    kept = keep_routing(Layer())
    kept(torch.randn(5, 16))
    with pytest.raises(RuntimeError, match="keep_routing: .* 6 tokens .* 5"):
        kept(torch.randn(6, 16))
    calls = iter((1, 2))

    def more_often(x: torch.Tensor) -> None:
        for _ in range(next(calls)):
            moe_route(x, 1)

    kept = keep_routing(more_often)
    kept(torch.randn(5, 16))
    with pytest.raises(RuntimeError, match="keep_routing: .* more often than the first run"):
        kept(torch.randn(5, 16))


def test_a_compiled_selective_checkpoint_routes_once() -> None:
    weight = torch.randn(8, 16, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        plan = moe_route(torch.sin(x) @ weight.t(), 2)
        return x * plan.probs.sum(-1, keepdim=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=routing_contexts)

    x = torch.randn(50, 16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    fusedops.reset_counters()
    got = torch.autograd.grad(compiled(x).square().sum(), [x, weight])
    assert fusedops.counters()["moe_route", "cpp"] == 1
    want = torch.autograd.grad(layer(x).square().sum(), [x, weight])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
