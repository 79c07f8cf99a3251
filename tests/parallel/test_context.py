"""Attention over sharded sequences on 1, 2 and 4 processes: values, gradients, bytes, bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from process_pool import World

import fusedops
from fusedops._core import dtypes
from fusedops.parallel import ring_attention
from fusedops.parallel.context.layout import layout_of, ranges

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]


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


CAUSAL = {"is_causal": True}
CASES = {
    "causal": Case(options=CAUSAL),
    "causal_contiguous": Case("contiguous", options=CAUSAL, length=20),
    "whole": Case(options={}),
    "grouped_heads": Case(key_heads=2, value_size=12, options=CAUSAL),
    "window": Case(options={"window": (5, 0)}, length=32),
    "both_sides": Case("contiguous", options={"window": (3, 6)}, length=32),
    "alibi": Case(options=CAUSAL, alibi=True),
    "alibi_both_sides": Case(options={"window": (9, -1)}, alibi=True, key_heads=1),
    "sinks_softcap": Case(options={**CAUSAL, "softcap": 3.0}, sinks=True),
    "packed": Case(batch=1, length=40, ends=(0, 3, 21, 22, 40), options=CAUSAL),
    "packed_document": Case("document", batch=1, length=40, ends=(0, 3, 25, 40), options=CAUSAL),
    "packed_rows": Case(batch=2, length=24, ends=(0, 7, 24, 24, 41, 48), options=CAUSAL),
    "packed_whole": Case("contiguous", batch=1, length=40, ends=(0, 3, 29, 40)),
    "packed_window_alibi": Case(
        "document", length=32, ends=(0, 20, 32, 50, 64), options={"window": (6, 0)}, alibi=True
    ),
}


def _problem(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value, the gradients of output and log-sum-exp, slopes and sinks."""
    g = torch.Generator().manual_seed(7)
    b, s, d = case.batch, case.length, case.size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    inputs = [
        draw(b, case.heads, s, d),
        *(draw(b, case.key_heads, s, n) for n in (d, case.value_size)),
    ]
    grads = [draw(b, case.heads, s, case.value_size), draw(b, case.heads, s)]
    slopes = draw(case.heads).abs()
    return [*inputs, *grads, slopes, draw(case.heads)]


def _mask(case: Case) -> torch.Tensor | None:
    """Return which tokens of a row are of one document, ``[B, 1, S, S]``."""
    if case.ends is None:
        return None
    place = torch.arange(case.batch * case.length)
    document = torch.searchsorted(torch.tensor(case.ends), place, right=True)
    rows = document.view(case.batch, 1, case.length)
    return rows.unsqueeze(3) == rows.unsqueeze(2)


def _on_one_process(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return output, log-sum-exp and the gradients of query, key, value and sinks."""
    q, k, v, grad, grad_lse, slopes, sinks = _problem(case, dtype)
    inputs = [each.requires_grad_() for each in (q, k, v, sinks)]
    options = dict(case.options, enable_gqa=True, return_lse=True)
    if case.alibi:
        options["alibi_slopes"] = slopes
    if case.sinks:
        options["sinks"] = sinks
    output, lse = fusedops.attention(q, k, v, _mask(case), **options)
    wanted = inputs if case.sinks else inputs[:3]
    return [output, lse, *torch.autograd.grad((output, lse), wanted, (grad, grad_lse.to(lse)))]


def _places(case: Case, rank: int, ranks: int) -> torch.Tensor:
    """Return the places ``[B, S / n]`` of a rank's tokens in their rows."""
    layout = layout_of("test", case.length, ranks, case.balance, case.ends, case.batch)
    found = torch.cat([torch.arange(*each) for each in ranges(layout, rank)])
    return found.view(case.batch, -1) % case.length


def _shard(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[:, at] for row, at in zip(tensor, places, strict=True)])


def _ring(world: World, case: Case, ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what ``_on_one_process`` does, of this rank's tokens."""
    *tensors, slopes, sinks = _problem(case, dtype)
    places = _places(case, world.rank, ranks)
    *inputs, grad, grad_lse = (_shard(each, places) for each in tensors)
    inputs = [each.requires_grad_() for each in (*inputs, sinks)]
    options = dict(case.options, enable_gqa=True, return_lse=True, balance=case.balance)
    options["cu_seqlens"] = None if case.ends is None else torch.tensor(case.ends)
    if case.alibi:
        options["alibi_slopes"] = slopes
    if case.sinks:
        options["sinks"] = inputs[3]
    output, lse = ring_attention(*inputs[:3], world.group(ranks), **options)
    wanted = inputs if case.sinks else inputs[:3]
    return [output, lse, *torch.autograd.grad((output, lse), wanted, (grad, grad_lse.to(lse)))]


def _check_case(world: World, name: str, ranks: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    found = _ring(world, case, ranks, dtype)
    alone, truth = _on_one_process(case, dtype), _on_one_process(case, torch.float64)
    places = _places(case, world.rank, ranks)
    for i, (mine, eager, exact) in enumerate(zip(found, alone, truth, strict=True)):
        if i < 5:
            eager, exact = _shard(eager, places), _shard(exact, places)
        elif ranks > 1:
            torch.distributed.all_reduce(mine, group=world.group(ranks))
        budget = dtypes.error_budget(eager, exact, dtype, depth=case.length)
        error = (mine.double() - exact).abs()
        where = f"{name} on {ranks}, {dtype}: result {i} of rank {world.rank}"
        assert (error <= budget).all(), f"{where}: off by {error.max()}, may {budget.min()}"


def _equal(world: World, ranks: int, dtype: torch.dtype) -> None:
    if world.member(ranks):
        for name in CASES:
            _check_case(world, name, ranks, dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ring_equals_one_process(on_ranks: OnRanks, ranks: int, dtype: torch.dtype) -> None:
    on_ranks(_equal, ranks, dtype)
