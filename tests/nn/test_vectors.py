"""Weight decay leaves out biases and norms of all models, whatever they are called."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

from fusedops.models import PRESETS, TINY, TrainEngine, Transformer, preset
from fusedops.nn.vectors import vector_patterns
from fusedops.train import builder
from fusedops.train.config import Config, DataConfig

VECTORS = ("bias", "b1", "b2", "up_proj_bias", "gate_up_proj_bias", "down_proj_bias")


def _is_vector(name: str) -> bool:
    *_, owner, last = ("", *name.split("."))
    return last in VECTORS or owner.endswith("norm")


def _vectors(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if _is_vector(name)}


@pytest.mark.parametrize("name", PRESETS)
def test_patterns_match_exactly_the_vectors(name: str) -> None:
    model = Transformer(preset(name), device="meta")
    patterns = vector_patterns(model)
    assert len(patterns) < 24  # however many layers there are
    names = [name for name, _ in model.named_parameters()]
    assert {n for n in names if any(fnmatchcase(n, p) for p in patterns)} == _vectors(model)


@pytest.mark.parametrize("name", TINY)
def test_training_decays_exactly_matrices_and_embeddings(name: str) -> None:
    """By a step of the optimizer that it makes by default, with gradients of 0."""
    model = Transformer(preset(name))
    config = Config(out="a", steps=1, batch=1, data=DataConfig(train=("",)))
    ranks: Any = None
    optimizer = builder._build_optimizer(config, TrainEngine(model), ranks)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    same = {name for name, parameter in model.named_parameters() if bool((parameter == 1.0).all())}
    assert same == _vectors(model)
