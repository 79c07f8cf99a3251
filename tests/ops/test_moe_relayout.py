"""The layouts of the experts' rows, told by what stands where."""

from __future__ import annotations

import pytest
import torch

from fusedops import RoutingPlan, moe_permute, moe_relayout
from fusedops.ops.moe_relayout import LAYOUTS
from fusedops.specs import _routing

CPU = torch.device("cpu")
PATTERNS = pytest.mark.parametrize("pattern", _routing.PATTERNS)
NAN = float("nan")


def make(pattern: str) -> RoutingPlan:
    return _routing.plan(13, 3, 5, device=CPU, dtype=torch.float32, pattern=pattern)


def slots_of_experts(plan: RoutingPlan) -> list[list[tuple[int, int]]]:
    """Return each expert's kept slots as (token, choice), in token-major order."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_experts)]
    for token, row in enumerate(plan.expert_ids.tolist()):
        for choice, expert in enumerate(row):
            if plan.kept[token, choice]:
                found[expert].append((token, choice))
    return found


def numbered(plan: RoutingPlan) -> torch.Tensor:
    """Rows that say which slot they are, from 1 on; NaN behind the last offset."""
    rows = plan.permutation.float().unsqueeze(1) + 1
    rows[int(plan.offsets[-1]) :] = NAN
    return rows


def test_the_picture_in_the_documentation() -> None:
    ids = torch.tensor([[1, 0], [1, 2], [0, 1], [2, 3]])
    plan = RoutingPlan.from_choices(ids, torch.ones(4, 2), 3)
    assert plan.permutation.tolist() == [1, 4, 0, 2, 5, 3, 6, 7]
    assert plan.positions.tolist() == [[2, 0], [3, 5], [1, 4], [6, 7]]
    assert plan.offsets.tolist() == [2, 5, 7]
    rows = plan.permutation.float().unsqueeze(1)
    k_major = moe_relayout(rows, plan, "token_major", "k_major").flatten().tolist()
    assert k_major[:7] == [4, 1, 0, 2, 5, 6, 3]
    padded = moe_relayout(rows + 1, plan, "token_major", "capacity", capacity=3).squeeze(2) - 1
    assert padded.tolist() == [[1, 4, -1], [0, 2, 5], [3, 6, -1]]


@PATTERNS
def test_k_major_rows_go_by_choice_then_by_token(pattern: str) -> None:
    plan = make(pattern)
    got = moe_relayout(numbered(plan), plan, "token_major", "k_major").flatten().tolist()
    want = [
        token * 3 + choice + 1
        for slots in slots_of_experts(plan)
        for token, choice in sorted(slots, key=lambda slot: slot[::-1])
    ]
    assert got == want + [0] * (39 - len(want))


@PATTERNS
@pytest.mark.parametrize("capacity", [1, 4, 39])
def test_capacity_rows_are_padded_and_what_is_beyond_is_left_out(
    pattern: str, capacity: int
) -> None:
    plan = make(pattern)
    rows = numbered(plan)
    padded = moe_relayout(rows, plan, "token_major", "capacity", capacity=capacity)
    assert padded.shape == (5, capacity, 1)
    left_out = set()
    for expert, slots in enumerate(slots_of_experts(plan)):
        numbers = [token * 3 + choice + 1 for token, choice in slots]
        here = numbers[:capacity]
        left_out |= set(numbers[capacity:])
        assert padded[expert].flatten().tolist() == here + [0] * (capacity - len(here))
        padded[expert, len(here) :] = NAN  # is not read on the way back
    back = moe_relayout(padded, plan, "capacity", "token_major", capacity=capacity)
    real = int(plan.offsets[-1])
    want = torch.tensor([0 if n in left_out else n for n in rows[:real, 0].tolist()])
    assert torch.equal(back[:real, 0], want.float()) and (back[real:] == 0).all()


@PATTERNS
def test_every_way_round_comes_back_to_the_same_rows(pattern: str) -> None:
    plan = make(pattern)
    rows = moe_permute(torch.randn(13, 24), plan)
    start = {
        layout: moe_relayout(rows, plan, "token_major", layout, capacity=39) for layout in LAYOUTS
    }
    for source in LAYOUTS:
        for target in LAYOUTS:
            got = moe_relayout(start[source], plan, source, target, capacity=39)
            assert torch.equal(got, start[target]), f"{source} to {target}"


def test_static_shapes_compile_without_a_break_for_any_routing() -> None:
    def padded(x: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        rows = moe_permute(x, plan)
        wide = moe_relayout(rows, plan, "token_major", "capacity", capacity=8)
        return moe_relayout(wide * 2, plan, "capacity", "token_major", capacity=8)

    compiled = torch.compile(padded, fullgraph=True, backend="aot_eager")
    counts = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counts.clear()
    x = torch.randn(13, 8)
    for pattern in ("random", "one_expert", "dropped"):
        plan = make(pattern)
        assert torch.equal(compiled(x, plan), padded(x, plan))
    assert counts["stats"]["unique_graphs"] == 1
