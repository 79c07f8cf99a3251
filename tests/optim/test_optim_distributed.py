"""Optimizers over DTensors, FSDP2 and DDP: the bits of one process, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optim_ranks
import pytest
import torch
from comparing import assert_same_bits

pytestmark = pytest.mark.distributed

OnRanks = Callable[..., list[Any]]
each_kind = pytest.mark.parametrize("kind", ["adamw", "late", "overlapped"])
ROUNDED: dict[str, Any] = {"state_dtype": torch.bfloat16, "max_norm": 0.5, "skip_non_finite": True}
LLAMA = {"master_weights": True, "max_norm": 0.5, "lr": 1e-2, "no_decay": ("*norm*",)}


@each_kind
@pytest.mark.parametrize("layout", optim_ranks.PLACEMENTS)
def test_shards_do_not_show(on_ranks: OnRanks, kind: str, layout: str) -> None:
    results = on_ranks(optim_ranks.placed_steps, kind, layout, ROUNDED)
    members = [result for result in results if result is not None]
    assert len(members) in (2, 4)
    for sharded, whole in members:
        assert_same_bits(sharded, whole)


@each_kind
@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [(4, "tiny", {}), (4, "tiny", ROUNDED), (2, "llama", LLAMA)],
    ids=["plain", "rounded", "patched"],
)
def test_fsdp2_gives_the_bits_of_one_process(
    on_ranks: OnRanks, kind: str, ranks: int, model: str, options: dict[str, Any]
) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    for sharded, alone in on_ranks(optim_ranks.fsdp_steps, ranks, model, kind, options)[:ranks]:
        assert_same_bits(sharded, alone)


@each_kind
def test_masters_of_shards_follow_changed_parameters(on_ranks: OnRanks, kind: str) -> None:
    for sharded, alone in on_ranks(optim_ranks.halved_steps, kind)[:4]:
        assert_same_bits(sharded, alone)


def test_ddp_steps_with_the_reduced_gradients(on_ranks: OnRanks) -> None:
    options = {"max_norm": 0.5}
    expected = on_ranks(optim_ranks.ddp_steps, "adamw", options)[0]
    for kind in ("late", "overlapped"):
        for answer in on_ranks(optim_ranks.ddp_steps, kind, options)[:2]:
            assert_same_bits(answer, expected)


@each_kind
@pytest.mark.parametrize("options", [{}, ROUNDED], ids=["plain", "rounded"])
def test_tensor_parallel_modules_step_as_whole_ones(
    on_ranks: OnRanks, kind: str, options: dict[str, Any]
) -> None:
    for found, expected, begun in on_ranks(optim_ranks.tensor_parallel, kind, options)[:2]:
        assert_same_bits(found, expected)
        assert bool(begun) == (kind == "overlapped")


@each_kind
def test_checkpoints_of_other_meshes_and_of_torch(
    on_ranks: OnRanks, kind: str, tmp_path: Path
) -> None:
    results = on_ranks(optim_ranks.checkpoint, kind, str(tmp_path / "saved"))
    moments, masters = results[0][0]
    for _, (ours, stock) in results[:2]:
        assert_same_bits(ours, [moments, masters])
        assert_same_bits(stock[0], [[each.bfloat16() for each in pair] for pair in moments])
