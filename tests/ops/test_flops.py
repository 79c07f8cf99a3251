"""What FlopCounterMode counts for an op is what it counts for the products that the op does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


# Op -> the sample whose products are those of eager torch: nothing is computed again.
SAMPLES = {
    "linear_act": "gelu",
    "linear_glu": "gelu",
    "mlp": None,
    "baddbmm": None,
    "linear_cross_entropy": "kept",
    "grouped_mm": "bias",
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
@pytest.mark.parametrize("name", SAMPLES)
def test_an_op_counts_as_its_products(name: str, frozen: int | None) -> None:
    spec = all_specs()[name]
    samples = spec.samples(torch.device("cpu"), torch.float32)
    sample = next(each for each in samples if SAMPLES[name] in (None, each.name))
    leaves = sample.leaves

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_leaves(*given: torch.Tensor) -> Any:
            new = {id(leaf): value for leaf, value in zip(leaves, given, strict=True)}
            changed = sample.map(lambda tensor: new.get(id(tensor), tensor))
            return function(*changed.args, **changed.kwargs)

        return of_leaves

    given = [leaf.detach().requires_grad_(i != frozen) for i, leaf in enumerate(leaves)]
    counts = counted(call(spec.op), given)
    assert counts == counted(call(spec.eager), given) and all(counts)


def test_attention_counts_the_scores_that_its_backward_makes_again() -> None:
    leaves = [new(2, 3, 5, 8), new(2, 3, 7, 8), new(2, 3, 7, 4)]
    forward, backward = counted(attend, leaves)
    again = 2 * 2 * 3 * 5 * 7 * 8
    assert counted(fusedops.attention, leaves) == (forward, backward + again)


def test_packed_sequences_count_the_pairs_that_they_have() -> None:
    leaves = [new(5, 3, 8), new(9, 3, 8), new(9, 3, 4)]
    q_ends, k_ends = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 9])

    def eager(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in tensors)
        first = attend(q[:, :2], k[:, :2], v[:, :2])
        return torch.cat([first, attend(q[:, 2:], k[:, 2:], v[:, 2:])], 1)

    forward, backward = counted(eager, leaves)
    again = 2 * (2 * 2 + 3 * 7) * 3 * 8
    counts = counted(lambda *t: fusedops.attention_varlen(*t, q_ends, k_ends, 3, 7), leaves)
    assert counts == (forward, backward + again)


@pytest.mark.parametrize("adds", [False, True])
def test_experts_count_by_their_slots(adds: bool) -> None:
    plan, leaves = (
        fusedops.moe_route(torch.randn(6, 3), 2),
        [new(6, 8), new(3, 8, 10), new(3, 5, 8)],
    )

    def call(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        into = (torch.zeros(w1.shape), torch.zeros(w2.shape)) if adds else None
        return fusedops.moe_mlp(x, plan, w1, w2, recompute=False, grad_weights_into=into)

    products = 2 * 12 * (8 * 10 + 5 * 8)
    assert counted(call, leaves) == (products, 2 * products)
