"""Zero-bubble schedules: each recomputed forward runs twice, once in each direction, never more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedops
from fusedops import memory

RANKS, STAGES, MICROBATCHES = 2, 2, 4
HIDDEN = 16
FORWARDS = STAGES * MICROBATCHES  # of a rank in a step


class Counted(nn.Module):
    """A layer of ours that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fusedops.nn.TransformerEncoderLayer(
            HIDDEN, 2, 32, dropout=0.1, batch_first=True
        )
        self.tail = nn.Linear(HIDDEN, HIDDEN)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.tail(self.layer(x)).tanh()  # torch detaches outputs: no view


POLICIES = {
    "whole": lambda: memory.Policy(memory.recompute("0")),
    "selective": lambda: memory.Policy(
        memory.recompute("0"), memory.save(ops=["attention", "aten::addmm"])
    ),
    "both": lambda: memory.Policy(memory.recompute("0"), memory.offload("0")),
    "by op": lambda: memory.Policy(memory.recompute(ops=["aten::tanh", "layer_norm"])),
    "offload": lambda: memory.Policy(memory.offload("0")),
}


def train(world: Any, schedule: str, policy: str | None) -> tuple[list[int], list[Any], list[Any]]:
    """Run two steps; return how often this rank's layers ran in the second, gradients, losses.

    In the first step torch runs each stage forward and backward once more, to learn shapes.
    """
    from torch.distributed import pipelining

    torch.manual_seed(0)
    layers = [nn.Sequential(Counted()) for _ in range(RANKS * STAGES)]
    v_shaped = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [world.rank, 3 - world.rank] if v_shaped else [world.rank, world.rank + RANKS]
    settings = memory.OffloadSettings(least_bytes=1, check=True)
    for index in mine:
        if policy is not None:
            memory.apply(layers[index], POLICIES[policy](), offload_settings=settings)
    stages = [
        pipelining.PipelineStage(layers[index], index, RANKS * STAGES, torch.device("cpu"))
        for index in mine
    ]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    run = getattr(pipelining.schedules, schedule)(stages, MICROBATCHES, loss_fn=loss)
    x, target = (torch.randn(2 * MICROBATCHES, 6, HIDDEN) for _ in range(2))
    torch.manual_seed(world.rank)
    inputs = (x,) if 0 in mine else ()
    losses: list[torch.Tensor] = []
    targets = {"target": target, "losses": losses} if RANKS * STAGES - 1 in mine else {}
    for _ in range(2):
        for index in mine:
            layers[index][0].runs = 0
        run.step(*inputs, **targets)
    gradients = [p.grad for index in mine for p in layers[index].parameters()]
    return (
        [layers[index][0].runs for index in mine],
        gradients,
        [each.detach() for each in losses],
    )


@pytest.mark.distributed
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "schedule",
    ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B"],
)
def test_a_zero_bubble_schedule_recomputes_once(
    on_two_ranks: Callable[..., list[Any]], schedule: str, policy: str
) -> None:
    plain = on_two_ranks(train, schedule, None)
    found = on_two_ranks(train, schedule, policy)
    again = STAGES * MICROBATCHES if policy in ("whole", "selective", "both") else 0
    for (runs, gradients, losses), (usual, expected, wanted) in zip(found, plain, strict=True):
        assert sum(usual) == FORWARDS
        assert sum(runs) == FORWARDS + again
        assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
        assert expected and all(each is not None for each in expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
