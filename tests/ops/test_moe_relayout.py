"""The layouts of the experts' rows, told by what stands where."""

from __future__ import annotations

import pytest
import torch

from fusedops import RoutingPlan, moe_permute, moe_relayout
from fusedops.specs import _routing

CPU = torch.device("cpu")
PATTERNS = pytest.mark.parametrize("pattern", _routing.PATTERNS)
NAN = float("nan")


def make(pattern: str) -> RoutingPlan:
    return _routing.plan(13, 3, 5, device=CPU, dtype=torch.float32, pattern=pattern)


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
