"""What tests of sharded sequences share: attention of many kinds, alone and in shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist

import fusedops
from fusedops._core import dtypes
from fusedops.parallel.context.layout import SequenceLayout, layout_of, ranges


@dataclass(frozen=True)
class Case:
    """One attention: sizes, layout and options."""

    balance: str = "zigzag"
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    length: int = 24
    size: int = 8
    value_size: int = 8
    ends: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    alibi: bool = False
    sinks: bool = False

    def layout(self, ranks: int) -> SequenceLayout:
        return layout_of("test", self.length, ranks, self.balance, self.ends, self.batch)


CAUSAL = {"is_causal": True}
WINDOW = {"window": (6, 0)}
CASES = {
    "causal": Case(options=CAUSAL),
    "causal_contiguous": Case("contiguous", options=CAUSAL, length=20),
    "whole": Case(),
    "long": Case(batch=1, length=288, options=CAUSAL),  # several blocks of keys
    "grouped_heads": Case(key_heads=2, value_size=12, options=CAUSAL),
    "window": Case(options={"window": (5, 0)}, length=32),
    "both_sides": Case("contiguous", options={"window": (3, 6)}, length=32),
    "alibi": Case(options=CAUSAL, alibi=True),
    "alibi_both_sides": Case(options={"window": (9, -1)}, alibi=True, key_heads=1),
    "sinks_softcap": Case(options={**CAUSAL, "softcap": 3.0}, sinks=True),
    "packed": Case(batch=1, length=40, ends=(0, 3, 21, 22, 40), options=CAUSAL),
    "packed_document": Case("document", batch=1, length=40, ends=(0, 3, 25, 40), options=CAUSAL),
    "packed_rows": Case(length=24, ends=(0, 7, 24, 24, 41, 48), options=CAUSAL),
    "packed_whole": Case("contiguous", batch=1, length=40, ends=(0, 3, 29, 40)),
    "packed_window_alibi": Case(
        "document", length=32, ends=(0, 20, 32, 50, 64), options=WINDOW, alibi=True
    ),
}


def problem(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value, the gradients of output and log-sum-exp, slopes and sinks."""
    g = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    rows, wide = (case.batch, case.heads, case.length), case.value_size
    keys = (case.batch, case.key_heads, case.length)
    inputs = [draw(*rows, case.size), draw(*keys, case.size), draw(*keys, wide)]
    return [*inputs, draw(*rows, wide), draw(*rows), draw(case.heads).abs(), draw(case.heads)]


def allowed(case: Case) -> torch.Tensor:
    """Return which tokens of a row are of one document, ``[B, 1, S, S]``."""
    ends = (0, *range(case.length, case.batch * case.length + 1, case.length))
    places = torch.arange(case.batch * case.length)
    document = torch.searchsorted(torch.tensor(case.ends or ends), places, right=True)
    rows = document.view(case.batch, 1, case.length)
    return rows.unsqueeze(3) == rows.unsqueeze(2)


def gradients(
    attend: Callable[..., Any], case: Case, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return output, log-sum-exp and the gradients of query, key, value and sinks."""
    *inputs, grad, grad_lse, slopes, sinks = tensors
    inputs = [each.detach().requires_grad_() for each in (*inputs, sinks)]
    options = dict(case.options, enable_gqa=True, return_lse=True)
    if case.alibi:
        options["alibi_slopes"] = slopes
    if case.sinks:
        options["sinks"] = inputs[3]
    output, lse = attend(*inputs[:3], **options)
    wanted = inputs if case.sinks else inputs[:3]
    grads = torch.autograd.grad((output, lse), wanted, (grad, grad_lse.to(lse)))
    return [output.detach(), lse.detach(), *grads]


def on_one_process(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what the whole gives, by the reference."""
    mask = None if case.ends is None else allowed(case)

    def attend(*inputs: torch.Tensor, **options: Any) -> Any:
        return fusedops.attention(*inputs, mask, **options)

    with fusedops.use_backend("torch"):
        return gradients(attend, case, problem(case, dtype))


def shard(tensor: torch.Tensor, case: Case, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens (dim 2) of this rank."""
    cuts = ranges(case.layout(group.size()), group.rank())
    found = torch.cat([torch.arange(*cut) for cut in cuts])
    places = found.view(case.batch, -1) % case.length
    return torch.stack([row[:, at] for row, at in zip(tensor, places, strict=True)])


def in_shards(
    function: Callable[..., Any], group: dist.ProcessGroup, case: Case, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return what this rank's tokens give, and its part of the sinks' gradient."""
    *tensors, slopes, sinks = problem(case, dtype)
    mine = [shard(tensor, case, group) for tensor in tensors]
    ends = None if case.ends is None else torch.tensor(case.ends)

    def attend(*inputs: torch.Tensor, **options: Any) -> Any:
        options.update(balance=case.balance, cu_seqlens=ends)
        return function(*inputs, group, **options)

    return gradients(attend, case, [*mine, slopes, sinks])


def assert_as_one_process(
    function: Callable[..., Any], group: dist.ProcessGroup, case: Case, dtype: torch.dtype
) -> None:
    """Assert that each rank's results lie within the error budget of one process."""
    found = in_shards(function, group, case, dtype)
    alone, truth = on_one_process(case, dtype), on_one_process(case, torch.float64)
    for i, (mine, eager, exact) in enumerate(zip(found, alone, truth, strict=True)):
        if i < 5:
            eager, exact = (shard(each, case, group) for each in (eager, exact))
        else:  # of the sinks: each rank has a part
            dist.all_reduce(mine, group=group)
        budget = dtypes.error_budget(eager, exact, dtype, depth=case.length)
        error = (mine.double() - exact).abs()
        where = f"{function.__name__} of {case} in {dtype}: result {i} of rank {group.rank()}"
        assert bool((error <= budget).all()), f"{where} is off by {float(error.max())}"
