"""What tests, benchmarks and documentation need to know of ``moe_router_loss``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops import RoutingPlan, moe_router_loss
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory, common_offset, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    logits: torch.Tensor,
    choices: RoutingPlan | torch.Tensor | None = None,
    *,
    balance: float = 1.0,
    z: float = 0.0,
    form: str = "switch",
    score: str = "softmax",
    num_sequences: int = 1,
    mask: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Write the losses as models do, with one_hot and means (of one process)."""
    x = logits.double() if logits.dtype == torch.float64 else logits.float()
    tokens, experts = x.shape
    there = torch.ones(tokens, dtype=torch.bool, device=x.device) if mask is None else mask
    loss = x.new_zeros(())
    if balance != 0.0:
        ids = choices.expert_ids if isinstance(choices, RoutingPlan) else choices
        assert ids is not None
        scores = x.softmax(-1) if score == "softmax" else x.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        hot = F.one_hot(ids.long(), experts + 1).sum(1)[:, :experts] * there[:, None]
        lengths = there.view(num_sequences, -1).sum(1, keepdim=True).clamp_min(1)
        shares = hot.view(num_sequences, -1, experts).sum(1) / lengths.to(x.dtype)
        kept = (scores * there[:, None]).view(num_sequences, -1, experts)
        per_sequence = experts * (shares * kept.sum(1) / lengths).sum(-1)
        factor = 1.0 / ids.shape[1] if form == "switch" else 1.0
        loss = loss + balance * factor * per_sequence.mean()
    if z != 0.0:
        squares = x.logsumexp(-1).square() * there
        loss = loss + z * squares.sum() / there.sum().clamp_min(1)
    return loss


def _of_counted(
    logits: torch.Tensor, *choices: Any, mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Do the same where the logits of tokens that do not count may hold anything."""
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], 0.0)
    return _eager(logits, *choices, mask=mask, **options)


def _samples(new: TensorFactory) -> list[Sample]:
    def ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
        return _routing.choices("random", tokens, top_k, experts, new.device)[0]

    def call(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(tokens, experts), ids(tokens, top_k, experts)

    def mask(tokens: int) -> torch.Tensor:
        return new.integers(tokens, high=3, key="mask") > 0

    plan = _routing.plan(18, 2, 6, **new.place, pattern="dropped", grad=False)
    return [
        Sample("balance", call(12, 2, 5)),
        Sample("both", call(33, 2, 8), {"balance": 0.01, "z": 0.1}),
        Sample("z_loss", (new(17, 9),), {"balance": 0.0, "z": 1.0}),
        Sample("squared", call(12, 2, 4), {"form": "squared"}),
        Sample("plan_with_dropped_slots", (new(18, 6), plan)),
        Sample("sigmoid", call(20, 4, 16), {"score": "sigmoid", "balance": 0.5, "z": 0.1}),
        Sample("extremes", (with_extremes(new(12, 5)), ids(12, 2, 5)), {"z": 1e-3}),
        Sample(
            "extremes_sigmoid", (with_extremes(new(12, 5)), ids(12, 2, 5)), {"score": "sigmoid"}
        ),
        Sample("offset", (new(12, 5, shift=common_offset(new.dtype)), ids(12, 2, 5)), {"z": 1e-9}),
        Sample("sequences", call(24, 2, 7), {"num_sequences": 4}),
        Sample(
            "sequences_masked", call(24, 2, 7), {"num_sequences": 4, "mask": mask(24), "z": 0.5}
        ),
        Sample("masked", call(40, 3, 33), {"mask": mask(40), "z": 1e-3}),
        Sample("all_masked", call(4, 1, 3), {"mask": mask(4) & False, "z": 1.0}),
        Sample("sentinels", (new(6, 4), ids(6, 2, 4).masked_fill(ids(6, 2, 4) == 1, 4))),
        Sample("one_expert", call(5, 1, 1), {"z": 1.0}),
        Sample("no_tokens", (new(0, 4), ids(1, 2, 4)[:0]), {"z": 1.0}),
        Sample("several_chunks", call(130, 5, 37), {"z": 1e-2}),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(6, 4, device=device)
    ids = torch.zeros(6, 2, dtype=torch.int64, device=device)
    mask = ids[:, 0] == 0

    bad = bad_changes(logits=x, choices=ids)
    return [
        bad("dims", "logits", "[tokens, experts]", "[1, 6, 4]", logits=x[None]),
        bad("no_experts", "logits", "[6, 0]", logits=x[:, :0]),
        bad("no_choices", "choices", "RoutingPlan", "NoneType", error=TypeError, choices=None),
        bad("choices_shape", "choices", "[6, top_k]", "[5, 2]", choices=ids[:5]),
        bad("choices_range", "choices", "[0, 4)", "got 5", choices=ids + 5),
        bad("choices_negative", "choices", "got -1", choices=ids - 1, mask=mask),
        bad("sequences", "num_sequences", "6", "4", num_sequences=4),
        bad("group", "group", num_sequences=2, group=object()),
        bad("mask_shape", "mask", "[6]", "[5]", mask=mask[:5]),
    ]


def _case(tokens: int, experts: int, top_k: int) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        ids = new.integers(tokens, top_k, high=experts).int()
        return Sample("bench", (new(tokens, experts), ids), {"balance": 1e-2, "z": 1e-3})

    size, extra = tokens * experts, (4 * tokens * top_k, 0)
    return BenchCase.moving(f"{tokens}x{experts} top{top_k}", make, (size, 2 * size), extra=extra)


SPEC = describe(moe_router_loss, _eager, _samples, _bad_inputs, _case)(
    non_finite=(_of_counted,),
    bench_cases=(_case(4096, 8, 2).headlined(), _case(4096, 64, 8).headlined()),
    summary="load balance (batch, sequence, group) and z-loss of a router",
    autocast="keep",
    rows_are_independent=False,
)
