"""Small models are trained: the closed form is held to what allocator and autograd counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from measured_peaks import FAMILIES, PRECISIONS, MeasuredStep, build, measure

from fusedops import models
from fusedops.models import TransformerConfig
from fusedops.planner import Layout, estimate, saved_tensors
from fusedops.planner.memory import layer_bytes
from fusedops.runtime.copy_engine import HostCopyEngine


def sizes_of(config: Any) -> TransformerConfig:
    return models.from_config(config, sizes_only=True)


# What was promised of peaks; what was kept is a sum of known tensors.
PEAK, KEPT = 0.10, 0.015
# Where activations are most, where the logits are, and where the weights are.
SIZES = ((128, 3, 4, 128, 512), (64, 2, 2, 128, 4096), (128, 2, 1, 32, 512))


@pytest.mark.parametrize("kernels", ["stock", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_measured_peaks_are_within_a_tenth_of_the_estimate(family: str, kernels: str) -> None:
    for size in SIZES:
        assert_estimate_matches(measure(family, size, kernels, "float32", "none"))
    assert_estimate_matches(measure(family, SIZES[0], kernels, "bfloat16", "none"))
    found = measure(family, SIZES[0], kernels, "autocast", "none")
    assert abs(found.error) < PEAK and abs(found.error_of_temporary) < PEAK, found


@pytest.mark.parametrize("kernels", ["stock", "fused"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_so_they_are_with_recomputation_and_with_accumulation(family: str, kernels: str) -> None:
    assert_estimate_matches(measure(family, SIZES[0], kernels, "float32", "full"))
    for size in SIZES[1:]:
        assert_estimate_matches(measure(family, size, kernels, "float32", "none", microbatches=2))


@pytest.mark.parametrize(("kernels", "dtype"), [("fused", "float32"), ("stock", "autocast")])
@pytest.mark.parametrize(("family", "layers"), [("gpt2", 1), ("llama", 1)])
def test_so_they_are_where_some_layers_recompute(
    family: str, layers: int, kernels: str, dtype: str
) -> None:
    peaks = [
        measure(family, SIZES[0], kernels, dtype, "full", ours=True, recompute_layers=count)
        for count in (layers, None)
    ]
    for found in peaks:
        assert abs(found.error) < PEAK and abs(found.error_of_temporary) < PEAK, found
    assert peaks[0].peak > peaks[1].peak and peaks[0].estimated.peak > peaks[1].estimated.peak


@pytest.fixture
def copies_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each copy end before the next call: on a busy machine it ends late, at a higher peak."""
    start = HostCopyEngine.copy

    def copy(self: HostCopyEngine, *args: Any, **kwargs: Any) -> Any:
        ticket = start(self, *args, **kwargs)
        self.finish(ticket)
        return ticket

    monkeypatch.setattr(HostCopyEngine, "copy", copy)


@pytest.mark.parametrize(
    ("kernels", "dtype", "recompute", "offload"),
    [
        ("fused", "float32", "full", ()),
        ("fused", "float32", "norm", ()),
        ("fused", "float32", "none", ("activations",)),
        ("stock", "float32", "none", ("activations",)),
        ("fused", "float32", "full", ("activations",)),
        ("fused", "float32", "none", ("optimizer",)),
        ("fused", "bfloat16", "none", ("optimizer",)),
        ("fused", "autocast", "full", ("optimizer",)),
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_so_they_are_with_the_policies_and_the_optimizer_of_this_package(
    family: str,
    kernels: str,
    dtype: str,
    recompute: str,
    offload: tuple[str, ...],
    copies_end_at_once: None,
) -> None:
    found = measure(family, SIZES[0], kernels, dtype, recompute, ours=True, offload=offload)
    assert abs(found.error) < PEAK and abs(found.error_of_temporary) < PEAK, found
    assert found.host == pytest.approx(found.estimated.host, rel=PEAK)
    assert bool(found.host) == bool(offload)


def assert_estimate_matches(found: MeasuredStep) -> None:
    hidden, layers, batch, seq_len, vocabulary = found.size
    assert abs(found.error) < PEAK and abs(found.error_of_temporary) < PEAK, found
    item = getattr(torch, found.dtype).itemsize
    wide = 4 if found.kernels == "stock" and found.family != "bert" else item
    # The loss keeps the log-softmax, or the logits and a number per row.
    loss = batch * seq_len * (vocabulary * wide + (4 if found.kernels == "fused" else 0))
    model = sizes_of(build(found.family, hidden, layers, seq_len, vocabulary).config)
    layout = Layout.of(
        micro_batch=batch,
        kernels=found.kernels,
        precision=PRECISIONS[found.dtype],
        recompute=found.recompute,
    )
    assert saved_bytes(model, layout) + loss == pytest.approx(found.kept, rel=KEPT)


def saved_bytes(model: TransformerConfig, layout: Layout) -> float:
    """Return what one forward of the model keeps for its backward, without the logits."""
    layers = sum(layer_bytes(model, layout, index) for index in range(model.num_layers))
    outside = [*saved_tensors.before(model, layout), *saved_tensors.after(model, layout)]
    per_token = sum(tensor.bytes_per_token(layout) for tensor in outside)
    return layers + per_token * layout.tokens(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_static_bytes_are_those_of_the_tensors(family: str) -> None:
    model = build(family, 64, 2, 32, 512)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = estimate(sizes_of(model.config), Layout.of(precision="float32"))
    states = [state for each in optimizer.state.values() for state in each.values()]
    assert found.weights == found.gradients == sum(each.nbytes for each in model.parameters())
    assert found.states == sum(each.nbytes for each in states if each.numel() > 1)


def test_configurations_that_are_not_known_are_told() -> None:
    with pytest.raises(ValueError, match=r"model_type .*did you mean 'llama'\?"):
        sizes_of({"model_type": "lama"})
    with pytest.raises(TypeError, match="config must be a configuration of transformers"):
        sizes_of(3)
