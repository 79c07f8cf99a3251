"""Loss-free balancing: what is counted, and one step of the bias per optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops import moe_route, update_balancing_bias
from fusedops.testing import threads


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


THREE, COUNTS = torch.zeros(3), torch.zeros(3).long()
Bias = fusedops.nn.BalancingBias
step = update_balancing_bias


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: step(THREE, COUNTS[[0]].repeat(4)), r"tokens_per_expert .* \[3\]"),
        (lambda: step(THREE[:, None], COUNTS), "bias must be of 1 dim"),
        (lambda: step(COUNTS, COUNTS), "bias must have a floating dtype"),
        (lambda: step(THREE[:1].expand(3), COUNTS), "bias must .* expanded one"),
        (lambda: step(THREE, THREE - 1.0), "tokens_per_expert must be .*, got -1.0 for"),
        (lambda: step(THREE, THREE + torch.nan), "tokens_per_expert must be .*, got nan for"),
        (lambda: step(THREE, THREE + torch.inf), "tokens_per_expert must be .*, got inf for"),
        (lambda: step(THREE, COUNTS, rate=-1.0), "rate must be at least 0"),
        (lambda: Bias(3, -1.0), "rate must be at least 0"),
        (lambda: Bias(0), "num_experts must be at least 1, got 0"),
        (lambda: Bias(3).count(moe_route(THREE[None, :2], 1)), "plan must have 3 experts, got 2"),
        (lambda: fusedops.ops.routing_contexts(3), "policy must be a function, got int"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"(balancing_bias|Bias.*|contexts): {words}"):
        call()
