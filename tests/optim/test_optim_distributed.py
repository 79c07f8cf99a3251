"""Optimizers over DTensors, FSDP2 and DDP: the bits of one process, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optim_models
import optim_ranks
import pytest
import torch
from comparing import assert_same_bits

pytestmark = pytest.mark.distributed

OnRanks = Callable[..., list[Any]]
KINDS = ["adamw", "late", "overlapped"]
each_kind = pytest.mark.parametrize("kind", KINDS)
ROUNDED: dict[str, Any] = {"state_dtype": torch.bfloat16, "max_norm": 0.5, "skip_non_finite": True}


@each_kind
@pytest.mark.parametrize("layout", optim_ranks.PLACEMENTS)
def test_shards_do_not_show(on_ranks: OnRanks, kind: str, layout: str) -> None:
    expected = optim_ranks.whole_steps(kind, ROUNDED)
    results = on_ranks(optim_ranks.sharded_steps, kind, layout, ROUNDED)
    members = [result for result in results if result is not None]
    assert len(members) in (2, 4)
    for member in members:
        assert_same_bits(member, expected)


@each_kind
@pytest.mark.parametrize("options", [{}, ROUNDED], ids=["plain", "rounded"])
def test_fsdp2_gives_the_bits_of_one_process(
    on_ranks: OnRanks, kind: str, options: dict[str, Any]
) -> None:
    expected = on_ranks(optim_ranks.alone, kind, options)[0]
    for answer in on_ranks(optim_ranks.fsdp_steps, kind, options)[:4]:
        assert_same_bits(answer, expected)


@each_kind
def test_masters_of_shards_follow_changed_parameters(on_ranks: OnRanks, kind: str) -> None:
    expected = on_ranks(optim_ranks.changed_steps, "adamw", False)[0][0]
    for answer, reads in on_ranks(optim_ranks.changed_steps, kind, True)[:4]:
        assert_same_bits(answer, expected)
        # All of them once, then only those that were changed: FSDP2 itself writes to none.
        assert reads == ([0, 0, 0] if kind == "adamw" else [8, 2, 0])


def test_ddp_steps_with_the_reduced_gradients(on_ranks: OnRanks) -> None:
    options = {"max_norm": 0.5}
    expected = on_ranks(optim_ranks.ddp_steps, "adamw", options)[0]
    for kind in ("late", "overlapped"):
        for answer in on_ranks(optim_ranks.ddp_steps, kind, options)[:2]:
            assert_same_bits(answer, expected)


@each_kind
def test_a_patched_model_under_fsdp2_gives_the_bits_of_one_process(
    on_ranks: OnRanks, kind: str
) -> None:
    pytest.importorskip("transformers")
    options = {"master_weights": True, "max_norm": 0.5, "lr": 1e-2, "no_decay": ("*norm*",)}
    expected = on_ranks(optim_models.language, kind, False, options)[0]
    assert expected[0][-1] < expected[0][0]
    for answer in on_ranks(optim_models.language, kind, True, options)[:2]:
        assert_same_bits(answer, expected)


@each_kind
@pytest.mark.parametrize("options", [{}, ROUNDED], ids=["plain", "rounded"])
def test_tensor_parallel_modules_step_as_whole_ones(
    on_ranks: OnRanks, kind: str, options: dict[str, Any]
) -> None:
    for found, expected, begun in on_ranks(optim_models.tensor_parallel, kind, options)[:2]:
        assert_same_bits(found, expected)
        assert bool(begun) == (kind == "overlapped")


@each_kind
def test_checkpoints_of_other_meshes_and_of_torch(
    on_ranks: OnRanks, kind: str, tmp_path: Path
) -> None:
    results = on_ranks(optim_ranks.checkpoint, kind, str(tmp_path / "saved"))
    trained, masters = results[0][:2]
    moments = [each[1:] for each in trained]
    for rank in (0, 1):
        ours, loaded_masters, stock = results[rank][2:]
        assert_same_bits(ours, moments)
        assert_same_bits(loaded_masters, masters)
        assert_same_bits(stock, [[each.bfloat16() for each in pair] for pair in moments])
