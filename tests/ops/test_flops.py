"""What FlopCounterMode counts for an op is what it counts for the products that the op does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fusedops
from fusedops.specs import all_specs


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def counted(call: Callable[..., Any], leaves: list[torch.Tensor]) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        output = call(*leaves)
    with FlopCounterMode(display=False) as backward:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return forward.get_total_flops(), backward.get_total_flops()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


TARGET = torch.tensor([1, 0, 4, 2])
ENDS = torch.tensor([2, 4], dtype=torch.int32)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]] = {
    "linear_act": (
        fusedops.linear_act,
        lambda x, w, b: F.silu(F.linear(x, w, b)),
        [new(2, 3, 8), new(5, 8), new(5)],
    ),
    "linear_glu": (
        fusedops.linear_glu,
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        [new(2, 3, 8), new(5, 8), new(5, 8)],
    ),
    "mlp": (
        lambda x, w1, w2: fusedops.mlp(x, w1, None, w2, None),
        lambda x, w1, w2: F.linear(F.silu(F.linear(x, w1)), w2),
        [new(2, 3, 8), new(5, 8), new(7, 5)],
    ),
    "baddbmm": (
        fusedops.baddbmm,
        lambda x, a, b: x + a @ b,
        [new(5), new(2, 3, 8), new(2, 8, 5)],
    ),
    "linear_cross_entropy": (
        lambda h, w: fusedops.linear_cross_entropy(h, w, TARGET, recompute=False),
        lambda h, w: F.cross_entropy(F.linear(h, w), TARGET),
        [new(4, 8), new(5, 8)],
    ),
    "grouped_mm": (
        lambda x, w: fusedops.grouped_mm(x, w, ENDS),
        lambda x, w: torch.cat([x[:2] @ w[0], x[2:] @ w[1]]),
        [new(4, 8), new(2, 8, 5)],
    ),
}


def test_every_op_with_products_is_counted() -> None:
    with_products = {
        name
        for name, spec in all_specs().items()
        if any(case.flops_forward for case in spec.bench_cases)
    }
    assert with_products
    for name in with_products:
        assert getattr(torch.ops.fusedops, name) in flop_registry, name


@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["all", "first_frozen", "second_frozen"])
@pytest.mark.parametrize("name", CASES)
def test_an_op_counts_as_its_products(name: str, frozen: int | None) -> None:
    ours, eager, leaves = CASES[name]
    given = [leaf.detach().requires_grad_(i != frozen) for i, leaf in enumerate(leaves)]
    assert counted(ours, given) == counted(eager, given)


def test_attention_counts_the_scores_that_its_backward_makes_again() -> None:
    leaves = [new(2, 3, 5, 8), new(2, 3, 7, 8), new(2, 3, 7, 4)]
    forward, backward = counted(attend, leaves)
    again = 2 * 2 * 3 * 5 * 7 * 8
    assert counted(fusedops.attention, leaves) == (forward, backward + again)


def test_packed_sequences_count_the_pairs_that_they_have() -> None:
    leaves = [new(5, 3, 8), new(9, 3, 8), new(9, 3, 4)]
    ends = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 9])

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fusedops.attention_varlen(q, k, v, *ends, 3, 7)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [
            attend(
                *(each[a:b].transpose(0, 1) for each, (a, b) in zip((q, k, v), cut, strict=True))
            )
            for cut in (((0, 2), (0, 2), (0, 2)), ((2, 5), (2, 9), (2, 9)))
        ]
        return torch.cat(parts, 1)

    forward, backward = counted(eager, leaves)
    again = 2 * (2 * 2 + 3 * 7) * 3 * 8
    assert counted(ours, leaves) == (forward, backward + again)


def test_the_counter_may_be_imported_later() -> None:
    code = """
import sys, fusedops, torch
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    fusedops.linear_act(torch.ones(2, 3), torch.ones(4, 3))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(2 * 2 * 3 * 4)


def test_experts_count_by_their_slots() -> None:
    plan = fusedops.moe_route(torch.randn(6, 3), 2)
    leaves = [new(6, 8), new(3, 8, 10), new(3, 5, 8)]

    def ours(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return fusedops.moe_mlp(x, plan, w1, w2, recompute=False)

    def added(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        into = torch.zeros(w1.shape), torch.zeros(w2.shape)
        return fusedops.moe_mlp(x, plan, w1, w2, recompute=False, grad_weights_into=into)

    products = 2 * 12 * (8 * 10 + 5 * 8)
    assert counted(ours, leaves) == (products, 2 * products)
    assert counted(added, leaves) == (products, 2 * products)
