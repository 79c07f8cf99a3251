"""Layouts of recursive bisection, compared with the fastest ones."""

from __future__ import annotations

import pytest
from recursive_search import recursive_layout

from fusedops.planner import check, fastest, load_device, preset, step_shape, step_time

H100 = load_device("h100")


@pytest.mark.parametrize(
    ("name", "devices", "batch", "slower"),
    [
        ("llama3-8b", 8, 64, 1.05),
        ("gpt3", 512, 1024, 1.15),
        ("mixtral-8x7b", 64, 512, 1.15),
        pytest.param("llama3-405b", 16384, 2048, 1.1, marks=pytest.mark.ci),
    ],
)
def test_recursive_bisection_finds_good_layouts_without_a_device(
    name: str, devices: int, batch: int, slower: float
) -> None:
    model, memory = preset(name), H100.memory.usable
    row = recursive_layout(model, devices, batch, memory)
    assert row is not None and row.left(memory) >= 0
    check(model, row.layout, devices)
    config = row.layout.parallel
    assert config.dp * row.layout.training.micro_batch * config.microbatches == batch
    best = fastest(model, devices, H100, batch, keep=1).rows[0]
    seconds = step_time(step_shape(model, row.layout), H100).seconds
    assert best.seconds <= seconds <= slower * best.seconds


def test_recursive_bisection_says_when_nothing_fits() -> None:
    assert recursive_layout(preset("llama3-70b"), 2, 8, 80 << 30) is None
    with pytest.raises(ValueError, match="devices"):
        recursive_layout(preset("gpt2"), 0, 8, 1 << 30)
