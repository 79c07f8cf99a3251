"""Weights of Hugging Face in a model that is sharded: each process reads what it has a part of."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import full_tensor
from torch import distributed as dist

from fusedops.models import (
    ParallelConfig,
    Transformer,
    fill_huggingface,
    load_huggingface,
    parallelize,
    preset,
    save_huggingface,
)
from fusedops.models.huggingface import weights
from fusedops.testing import threads

pytest.importorskip("safetensors")

LAYOUTS = {
    "zero3": ("tiny-llama", {"dp": 2, "zero": 3}),
    "tp2": ("tiny-gpt2", {"tp": 2}),
    "tp2-zero1": ("tiny-qwen3", {"tp": 2, "dp": 2, "zero": 1}),
    "pp2": ("tiny-gpt2", {"pp": 2, "microbatches": 2}),
    "ep2": ("tiny-mixtral", {"dp": 2, "ep": 2}),
}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the bytes of tensors that a thread has read and holds, at most: ``peak`` of a rank."""
    held, peaks = Counter[int](), Counter[int]()
    get = weights._Checkpoint._tensor

    def read(files: Any, name: str) -> torch.Tensor:
        tensor, rank = get(files, name), dist.get_rank()
        size = tensor.numel() * tensor.element_size()
        held[rank] += size
        peaks[rank] = max(peaks[rank], held[rank])
        weakref.finalize(tensor, lambda: held.subtract({rank: size}))
        return tensor

    monkeypatch.setattr(weights._Checkpoint, "_tensor", read)
    return peaks


def _loaded(rank: int, name: str, values: dict[str, Any], folder: str) -> list[str]:
    config = preset(name)
    fill = functools.partial(fill_huggingface, source=folder)
    model = Transformer(config, device="meta")
    engine = parallelize(model, ParallelConfig(**values), weights=fill)
    expected = dict(load_huggingface(folder).named_parameters())
    for key, parameter in engine.model.named_parameters():
        assert torch.equal(full_tensor(parameter), expected[key].detach()), key
    assert not any(buffer.any() for buffer in engine.model.buffers() if buffer.dim() == 1)
    return [key for key, _ in engine.model.named_parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_process_has_its_part(layout: str, tmp_path: Path) -> None:
    name, values = LAYOUTS[layout]
    whole = Transformer(preset(name))
    save_huggingface(whole, tmp_path)
    ranks = ParallelConfig(**values).sizes.ranks
    found = threads.run(_loaded, ranks, name, values, str(tmp_path))
    assert set().union(*found) == {key for key, _ in whole.named_parameters()}


def _read(rank: int, values: dict[str, Any], folder: str) -> None:
    fill = functools.partial(fill_huggingface, source=folder)
    model = Transformer(preset("tiny-gpt2"), device="meta")
    parallelize(model, ParallelConfig(**values), weights=fill)


@pytest.mark.parametrize("layout", ["pp2", "zero3"])
def test_no_process_holds_more_than_one_row(
    layout: str, tmp_path: Path, live: Counter[int]
) -> None:
    whole = Transformer(preset("tiny-gpt2"))
    save_huggingface(whole, tmp_path)
    values = LAYOUTS[layout][1]
    threads.run(_read, 2, values, str(tmp_path))
    largest = max(4 * parameter.numel() for parameter in whole.parameters())
    for rank in range(2):
        assert 0 < live[rank] <= 3 * largest  # query, key and value are one tensor there
    assert largest < 4 * sum(parameter.numel() for parameter in whole.parameters()) / 3


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_huggingface(Transformer(preset("tiny-llama")), tmp_path)
    with pytest.raises(ValueError, match="fill_huggingface: model must be of"):
        fill_huggingface(Transformer(replace(preset("tiny-llama"), num_layers=3)), tmp_path)
