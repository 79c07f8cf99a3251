"""Which tokens a rank holds, and which scores it computes: all of them, and each once."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from context_cases import CASES, Case, allowed

from fusedops.parallel.context import plan
from fusedops.parallel.context.layout import (
    SequenceLayout,
    layout_of,
    order,
    ranges,
)
from fusedops.parallel.context.plan import ContextPattern

RANKS = (1, 2, 3, 4)
# Lengths that leave remainders in all cuts, and documents shorter than the number of ranks.
ODD = {
    "odd": Case(batch=1, length=36, options={"is_causal": True}),
    "tiny_documents": Case("document", 1, length=36, ends=(0, 1, 3, 4, 9, 9, 36)),
    "narrow": Case("contiguous", 1, length=36, options={"window": (1, 1)}, ends=(0, 17, 36)),
    "itself": Case(batch=1, length=36, options={"window": (0, 0)}),
    "after": Case(batch=1, length=36, options={"window": (0, -1)}),
}
ALL = {name: case for name, case in (CASES | ODD).items() if case.length % 12 == 0}


def _pattern(case: Case, placed: bool) -> ContextPattern:
    left, right = case.options.get("window", (-1, -1))
    return ContextPattern(left, 0 if case.options.get("is_causal") else right, placed)


def _wanted(case: Case, pattern: ContextPattern) -> torch.Tensor:
    """Return which scores the attention of a batch has, ``[B * S, B * S]``."""
    place = torch.arange(case.length)
    distance = place - place.unsqueeze(1)
    inside = torch.ones_like(distance, dtype=torch.bool)
    if pattern.left >= 0:
        inside &= distance >= -pattern.left
    if pattern.right >= 0:
        inside &= distance <= pattern.right
    return torch.block_diag(*(allowed(case)[:, 0] & inside))


def _covered(layout: SequenceLayout, pattern: ContextPattern) -> torch.Tensor:
    """Return how often each score is computed."""
    total, share = layout.ends[-1], layout.ends[-1] // layout.ranks
    places = order(layout, torch.device("cpu")).view(layout.ranks, share)
    counts = torch.zeros(total, total, dtype=torch.int64)
    for rank in range(layout.ranks):
        for source in range(layout.ranks):
            step = plan.step(layout, pattern, rank, source)
            keys = [places[source][slice(*column)] for column in step.columns]
            sent = torch.cat([places[0][:0], *keys])
            for block in (block for call in step.calls for block in call.blocks):
                rows, columns = places[rank][slice(*block.rows)], sent[slice(*block.columns)]
                assert int(rows[0] - columns[0]) == block.distance or not pattern.placed
                offset = torch.arange(len(columns)) - torch.arange(len(rows)).unsqueeze(1)
                band = torch.ones_like(offset, dtype=torch.bool)
                if block.left >= 0:
                    band &= offset >= -block.left
                if block.right >= 0:
                    band &= offset <= block.right
                assert int(band.sum()) == block.scores
                assert bool(band.any(0).all() and band.any(1).all()), "a line of no score"
                counts[rows.unsqueeze(1), columns] += band
    return counts


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_each_score_is_computed_once(name: str, placed: bool) -> None:
    case, pattern = ALL[name], _pattern(ALL[name], placed)
    wanted = _wanted(case, pattern)
    for ranks in RANKS:
        assert torch.equal(_covered(case.layout(ranks), pattern), wanted.long()), f"{ranks} ranks"


def test_zigzag_gives_all_ranks_the_same_work() -> None:
    def work(layout: SequenceLayout) -> list[int]:
        ranks = range(layout.ranks)
        causal = ContextPattern(-1, 0)
        return [sum(plan.step(layout, causal, r, s).scores for s in ranks) for r in ranks]

    whole = 64 * 65 // 2
    assert work(layout_of("test", 64, 4, "zigzag")) == [whole // 4] * 4
    assert max(work(layout_of("test", 64, 4, "contiguous"))) > 1.7 * whole / 4
    ends = (0, 16, 64)
    halves = (16 * 17 + 48 * 49) // 2
    assert work(layout_of("test", 64, 4, "document", ends)) == [halves // 4] * 4
    assert max(work(layout_of("test", 64, 4, "zigzag", ends))) > halves / 4


def test_only_keys_that_are_needed_travel() -> None:
    """A causal zigzag sends three quarters of all; a window and documents send less."""

    def sent(
        pattern: ContextPattern, balance: str = "zigzag", ends: tuple[int, ...] | None = None
    ) -> int:
        layout, ranks = layout_of("test", 64, 4, balance, ends), range(4)
        pairs = [(r, s) for r in ranks for s in ranks if r != s]
        return sum(plan.step(layout, pattern, *pair).tokens for pair in pairs)

    everything = 4 * 3 * 16
    assert sent(ContextPattern(-1, -1)) == everything
    assert sent(ContextPattern(-1, 0)) == everything * 3 // 4
    assert sent(ContextPattern(-1, 0), "contiguous") == everything // 2
    assert sent(ContextPattern(5, 0), "contiguous") == 3 * 5
    assert sent(ContextPattern(-1, 0), "contiguous", (0, 16, 32, 48, 64)) == 0
    assert sent(ContextPattern(-1, 0), "contiguous", (0, 20, 64)) == 16 + 2 * 12 + 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((30, 4, "zigzag"), "the sequence must be of a length that 4 ranks divide, got 30"),
        ((32, 4, "zigzga"), "did you mean 'zigzag'"),
        ((32, 4, "zigzag", [0, 9]), "cu_seqlens must be from 0 to 32"),
        ((32, 4, "zigzag", []), "cu_seqlens must be from 0 to 32"),
        ((32, 4, "zigzag", [0, 9, 8, 32]), "cu_seqlens must be monotone, got 9 before 8"),
        ((32, 4, "zigzag", [0, 40, 64], 2), "a document begins with each row of 32 tokens"),
    ],
    ids=["length", "balance", "short", "empty", "falling", "across_rows"],
)
def test_what_cannot_be_cut_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        layout_of("ring_attention", *arguments)


def test_an_empty_sequence_has_no_steps() -> None:
    layout = layout_of("test", 0, 4, "zigzag")
    assert ranges(layout, 1) == () and plan.step(layout, ContextPattern(-1, 0), 1, 0).calls == ()
    assert math.prod(order(layout, torch.device("cpu")).shape) == 0


def test_the_picture_is_that_of_the_plan() -> None:
    """Else: python docs/gen_context.py."""
    source = Path(__file__).parents[2] / "docs" / "gen_context.py"
    drawn = runpy.run_path(str(source))
    assert drawn["PICTURE"].read_text() == drawn["picture"]()
