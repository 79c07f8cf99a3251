"""RoutingPlan: what it holds, that it is immutable, and where it can go."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fusedops import RoutingPlan
from fusedops.specs import _routing

CPU = torch.device("cpu")
PATTERNS = pytest.mark.parametrize("pattern", _routing.PATTERNS)


def make(pattern: str = "dropped", tokens: int = 12, top_k: int = 3, experts: int = 5) -> Any:
    return _routing.plan(tokens, top_k, experts, device=CPU, dtype=torch.float32, pattern=pattern)


@PATTERNS
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


def test_a_plan_is_immutable() -> None:
    plan = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_experts = 3
    other = plan.with_probs(plan.probs.detach() * 2)
    assert torch.equal(other.probs, plan.probs * 2) and other.positions is plan.positions


@PATTERNS
def test_a_plan_is_a_pytree_of_its_tensors(pattern: str) -> None:
    plan = dataclasses.replace(make(pattern), capacity=4)
    for each in (plan, dataclasses.replace(plan, kept=None)):
        leaves, structure = pytree.tree_flatten(each)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        again = pytree.tree_unflatten(leaves, structure)
        assert isinstance(again, RoutingPlan) and (again.num_experts, again.capacity) == (5, 4)
        for field in dataclasses.fields(each):
            assert getattr(again, field.name) is getattr(each, field.name)
        keys = [pytree.keystr(key) for key, _ in pytree.tree_flatten_with_path(each)[0]]
        assert keys[:2] == [".expert_ids", ".probs"]
    copied = copy.deepcopy(plan)
    assert torch.equal(copied.permutation, plan.permutation)
    assert copied.permutation is not plan.permutation


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_plan_goes_into_through_and_out_of_compiled_and_checkpointed_code(dynamic: bool) -> None:
    def route(ids: torch.Tensor, probs: torch.Tensor) -> RoutingPlan:
        plan = RoutingPlan.from_choices(ids, probs, 5)
        return plan.with_probs(plan.probs * 2)

    def use(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return x * plan.probs.sum() + plan.permutation[0] + plan.num_tokens * plan.num_experts

    def step(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> Any:
        plan = route(ids, probs)
        return checkpoint(use, x, plan, use_reentrant=False), plan

    results = []
    for function in (step, torch.compile(step, fullgraph=True, dynamic=dynamic)):
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        probs = make().probs.detach().requires_grad_()
        output, plan = function(x, make().expert_ids, probs)
        assert isinstance(plan, RoutingPlan)
        compiled_use = torch.compile(use, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        outputs = (output, compiled_use(x, plan))
        grads = torch.autograd.grad(sum(each.sum() for each in outputs), (x, probs))
        results.append((*outputs, *grads, plan.permutation, plan.offsets))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(
    ("ids", "probs", "error", "words"),
    [
        (torch.tensor([[3]]), torch.ones(1, 1), ValueError, ("expert_ids", "3", "token 0")),
        (torch.tensor([[-1]]), torch.ones(1, 1), ValueError, ("expert_ids", "-1")),
        (torch.tensor([[2**32]]), torch.ones(1, 1), ValueError, ("expert_ids", str(2**32))),
        (torch.tensor([[0]]), torch.ones(1, 2), ValueError, ("probs", "[1, 1]", "[1, 2]")),
        (torch.tensor([[0]]), torch.ones(1, 1).int(), TypeError, ("probs", "int32")),
        (torch.tensor([0]), torch.ones(1), ValueError, ("expert_ids", "[tokens, top_k]")),
    ],
)
def test_wrong_choices_are_named(ids: Any, probs: Any, error: Any, words: Any) -> None:
    with pytest.raises(error) as caught:
        RoutingPlan.from_choices(ids, probs, 2)
    for word in ("RoutingPlan.from_choices: ", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("experts", [2**24 + 1, 2**31])
def test_too_many_experts_are_named(experts: int) -> None:
    with pytest.raises(ValueError, match="from_choices: num_experts must be at most 16777216, got"):
        RoutingPlan.from_choices(torch.tensor([[0]]), torch.ones(1, 1), experts)
