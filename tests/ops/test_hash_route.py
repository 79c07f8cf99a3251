"""Hash routing: equal ids go the same way, choices differ, all experts are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedops import hash_route


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (7, 2), (64, 8), (5, 5), (1, 1)])
def test_choices_of_a_token_differ_and_spread(experts: int, top_k: int) -> None:
    ids = torch.arange(20_000)
    plan = hash_route(ids, experts, top_k=top_k)
    chosen = plan.expert_ids.sort(-1).values
    assert plan.expert_ids.shape == (20_000, top_k)
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    mean = 20_000 * top_k / experts
    assert ((plan.tokens_per_expert - mean).abs() < 0.15 * mean).all()
    assert torch.equal(plan.probs, torch.full_like(plan.probs, 1 / top_k))


def test_equal_ids_are_routed_alike_and_seeds_differ() -> None:
    ids = torch.tensor([5, -3, 5, 2**40, -3, 2**40])
    plan = hash_route(ids, 16, top_k=2)
    assert torch.equal(plan.expert_ids[0], plan.expert_ids[2])
    assert torch.equal(plan.expert_ids[1], plan.expert_ids[4])
    many = torch.arange(100)
    same = hash_route(many.int(), 16).expert_ids
    assert torch.equal(same, hash_route(many, 16).expert_ids)
    assert not torch.equal(same, hash_route(many, 16, seed=1).expert_ids)


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator, seeds 0 and 1234567."""
    from fusedops.ops.hash_route import _mix, _signed

    step = 0x9E3779B97F4A7C15
    published = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}
    for seed, value in published.items():
        mixed = _mix(torch.tensor([_signed(seed + step)]))
        assert int(mixed) % 2**64 == value


def test_a_table_decides() -> None:
    table = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    ids = torch.tensor([2, 0, 2, 1])
    assert torch.equal(hash_route(ids, 3, table=table).expert_ids, table[ids])


def table(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"table": torch.tensor(rows)}


THREE, ROWS = torch.arange(3), "token_ids must be rows of table, at least 0 and less than 2, got"
TWO_ROWS = table([0], [1])
# Ids, number of experts, options, words of the error.
BAD: dict[str, tuple[torch.Tensor, Any, dict[str, Any], str]] = {
    "top_k": (THREE, 4, {"top_k": 5}, "top_k must be from 1 to 4"),
    "experts": (THREE, 0, {}, "num_experts must be at least 1"),
    "floating": (torch.zeros(3), 4, {}, "token_ids must be int32 or int64"),
    "dims": (torch.zeros(2, 3).long(), 4, {}, "token_ids must be of 1 dims"),
    "table": (THREE, 4, {"table": THREE}, "table must be of 2"),
    "many experts": (THREE, 2**31, {}, "num_experts must be at most 16777216"),
    "an id above the table": (torch.tensor([0, 2]), 4, TWO_ROWS, f"{ROWS} 2"),
    "an id below the table": (torch.tensor([0, -1]), 4, TWO_ROWS, f"{ROWS} -1"),
    "an expert of the table": (
        THREE[1:2],
        4,
        table([0], [5]),
        "table must be of experts from 0 to 3, .* got 5",
    ),
    "no columns": (
        THREE[:1],
        4,
        {"table": torch.zeros(2, 0).long()},
        "table must be of 1 to 4",
    ),
    "more columns than experts": (THREE[:1], 1, table([0, 0]), "table must be of 1 to 1 columns"),
    "top_k beside a table": (
        THREE[:1],
        4,
        table([0]) | {"top_k": 2},
        "top_k must be 1, the columns of table, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    ids, experts, options, message = BAD[name]
    error = TypeError if name == "floating" else ValueError
    with pytest.raises(error, match=f"hash_route: {message}"):
        hash_route(ids, experts, **options)
