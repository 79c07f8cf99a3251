"""Configurations that cannot be, and what one means."""

from __future__ import annotations

from typing import Any

import pytest

from fusedops import UnsupportedError
from fusedops.models import ParallelConfig


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dp": 0}, "ParallelConfig: dp must be at least 1, got 0"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
        ({"dp": 2, "ep": 4}, "ep must be a divisor of dp x cp = 2"),
        ({"context": "rings"}, "did you mean 'ring'?"),
        ({"mode": "dat"}, "did you mean 'data'?"),
        ({"mode": "data", "tp": 2}, "tp must be 1 with mode 'data'"),
        ({"recompute": "ful"}, "did you mean 'full'?"),
        ({"recompute": "full+norm"}, "none or full alone"),
        ({"recompute_slice_activation": True}, "False unless recompute is 'full'"),
        (
            {"recompute_slice_activation": True, "recompute": "full", "sp": True},
            "False with sp",
        ),
        ({"offload": "optimiser"}, "did you mean 'optimizer'?"),
        ({"bucket_layers": (4, 2)}, "layers in ascending order"),
        ({"shard_ranks": 2}, "None with zero 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_without_a_meaning_are_told_with_what_would_have_one(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError) as error:
        ParallelConfig(**values)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tp": 2.0}, "tp must be an int, got float"),
        ({"sp": 1}, "sp must be a bool, got int"),
        ({"offload": 3}, "offload must be a word or several, got 3"),
        ({"recompute": None}, "recompute must be a str, got NoneType"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_of_another_type_are_type_errors(values: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ParallelConfig(**values)


def test_a_product_that_is_not_the_world_is_told_with_sizes_that_would_be() -> None:
    with pytest.raises(ValueError) as error:
        ParallelConfig(dp=2, tp=2).for_ranks(8)
    assert "dp x tp x pp x cp = 2 x 2 x 1 x 1 = 4 must be the 8 processes" in str(error.value)
    assert "dp 4 or tp 4 or pp 2 or cp 2 would fit" in str(error.value)


def test_in_mode_data_all_processes_are_data_parallel() -> None:
    assert ParallelConfig(mode="data", zero=2).for_ranks(6).sizes.dp == 6


def test_pipelines_are_refused_until_they_exist() -> None:
    with pytest.raises(UnsupportedError, match="pp must be 1, got 2"):
        ParallelConfig(pp=2).for_ranks(2)


def test_selective_recomputation_is_norms_and_activations() -> None:
    assert ParallelConfig(recompute="selective").remade == {"norm", "activation"}
    assert ParallelConfig(recompute="norm").remade == {"norm"}
    assert ParallelConfig(recompute="full").remade == {"layer"}
    assert ParallelConfig().remade == set()
