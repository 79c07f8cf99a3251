"""What is published of models and of training them, which the closed form has to reproduce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusedops.planner import Layout, estimate, preset
from fusedops.planner.memory import layer_bytes

# Counts of the released weights (gpt3 and the PanGu models: what their papers' sizes make).
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
}
# Billions: the count to four or five digits, and what the model is called by.
ROUNDED = {
    "pangu-2.6b": (2.625, 2.6),
    "pangu-13b": (12.80, 13.1),
    "pangu-200b": (206.86, 207.0),
    "codegeex-13b": (12.869, 13.0),
    "gpt3": (174.60, 175.0),
    "gpt3-13b": (12.85, 13.0),
    "gpt3-6.7b": (6.66, 6.7),
    "gpt3-1.3b": (1.316, 1.3),
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_those_of_the_released_weights(name: str) -> None:
    assert preset(name).parameters().total == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    count, called = ROUNDED[name]
    found = preset(name).parameters().total / 1e9
    digits = len(str(count).partition(".")[2])
    assert round(found, digits) == count
    assert abs(found / called - 1) < 0.025


# devices, experts, parameters of the layers, as published, GB per device at 4 and at 12 bytes,
# parameters with one dense layer and the vocabulary
SCALING = [
    ("pangu-moe-61b", 8, 36, 61.255, 61.2, 30.6, 91.9, 59.53),
    ("pangu-moe-121b", 16, 72, 121.671, 121.0, 30.4, 91.3, 118.05),
    ("pangu-moe-242b", 32, 144, 242.502, 242.0, 30.3, 90.9, 235.11),
]


@pytest.mark.parametrize("row", SCALING, ids=lambda row: row[0])
def test_the_scaling_table_of_experts(row: tuple[Any, ...]) -> None:
    name, devices, experts, billions, published, offloaded, whole, with_dense = row
    model = preset(name)
    mixed = replace(model, moe_layers=31)
    assert mixed.parameters().total / 1e9 == pytest.approx(with_dense, abs=0.006)
    layers = model.layers()
    assert model.num_experts == experts
    assert round(layers.total / 1e9, 3) == billions
    assert abs(layers.total / 1e9 / published - 1) < 0.01
    assert layers.experts == 32 * experts * 52_441_600

    # The source system divides every parameter evenly over all devices, experts by tensor
    # parallelism, which replicates them here: zero 3 gives each device the same share.
    layout = Layout.of(dp=devices, zero=3, precision="float32")
    # The table is of the layers: a vocabulary of one word leaves little else.
    bare = replace(model, vocab_size=1, position_tables=0, query_layer=False)
    on = estimate(bare, layout, devices=devices)
    # Masters and moments once, and gradients: what the source system keeps on the host.
    away = {"offload": ("optimizer",), "optimizer_overlap": False}
    off = estimate(bare, layout.replace(**away), devices=devices)
    assert off.weights / 1e9 == pytest.approx(offloaded, rel=0.01)
    assert (on.weights + on.states) / 1e9 == pytest.approx(whole, rel=0.01)
    # Three times the model for the same memory, and more than 60 % of it off the device.
    assert (on.weights + on.states) / off.weights == pytest.approx(3.0, rel=0.001)
    assert 1 - off.weights / (on.weights + on.states) > 0.6
    assert off.states == 0
    if devices == 8:
        assert off.weights / 2**30 == pytest.approx(28.5, rel=0.01)
        assert off.host * devices / 1e9 == pytest.approx(982, rel=0.01)  # "at least 1 TB"


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({"precision": "float32"}, 16),
        ({"precision": "half-gradients"}, 16),
        ({"precision": "mixed"}, 18),
        ({"dp": 8}, 18),
        ({"dp": 8, "zero": 3}, 18 / 8),
        *(({"dp": n, "zero": 1}, 6 + 12 / n) for n in (1, 2, 8, 64)),
    ],
    ids=str,
)
def test_static_bytes_of_a_parameter(options: dict[str, Any], nbytes: float) -> None:
    """A distributed optimizer takes 6 + 12 / n bytes on n devices."""
    estimated = estimate(preset("gpt2"), Layout.of(**options))
    assert estimated.static / estimated.parameters == pytest.approx(nbytes)


# Korthikanti et al., arXiv:2205.05198, table 2: bytes of activations per layer, in units of s b h.
def korthikanti(t: int, scores: float, *, sp: bool, remade: bool) -> float:
    scores = 0.0 if remade else 5 * scores / t
    return 34 / t + scores if sp else 10 + 24 / t + scores


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("remade", [False, True])
def test_activations_of_a_layer_are_those_of_the_paper(t: int, sp: bool, remade: bool) -> None:
    model = replace(preset("gpt3"), seq_len=2048)
    options = {"micro_batch": 4, "kernels": "eager", "dropout": True}
    options |= {"recompute": "scores" if remade else "none"}
    layout = Layout.of(tp=t, sp=sp, **options)
    unit = 2048 * 4 * model.hidden_size
    wanted = korthikanti(t, 96 * 2048 / model.hidden_size, sp=sp, remade=remade)
    # Theirs leaves out the two statistics of each norm's rows.
    statistics = 2 * 2 * 4 * 2048 * 4 / (t if sp else 1)
    assert (layer_bytes(model, layout, 0) - statistics) / unit == pytest.approx(wanted, rel=1e-9)


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    model, h = preset("gpt3"), 12288
    layout = Layout.of(tp=8, recompute="full")
    tokens = 2048
    assert layer_bytes(model, layout, 0) == 2 * tokens * h
    assert layer_bytes(model, layout.replace(sp=True), 0) == 2 * tokens * h / 8
    sliced = layout.replace(recompute_slice_activation=True)
    assert layer_bytes(model, sliced, 0) == 2 * tokens * h / 8
    # The results of two all-reduces beside it.
    kept = sliced.replace(mp_comm_recompute=False)
    assert layer_bytes(model, kept, 0) == 2 * tokens * h * (1 / 8 + 2)
