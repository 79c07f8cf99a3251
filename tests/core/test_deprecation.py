"""Former names are accepted for one release, with a warning that has the new one."""

from __future__ import annotations

import importlib

import pytest

from fusedops._core.deprecation import renamed_arguments

FORMER = [
    ("fusedops.planner", "Transformer", "fusedops.models", "TransformerConfig"),
    ("fusedops.train", "Result", "fusedops.train", "TrainResult"),
    ("fusedops.train", "Watcher", "fusedops.train", "ProgressCallback"),
    ("fusedops.checkpoint", "Saved", "fusedops.checkpoint", "CheckpointInfo"),
    ("fusedops.checkpoint", "Verdict", "fusedops.checkpoint", "GuardDecision"),
]


@pytest.mark.parametrize(("module", "old", "home", "new"), FORMER)
def test_former_names_of_classes(module: str, old: str, home: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{module}.{old} is now .*{new}"):
        former = getattr(importlib.import_module(module), old)
    assert former is getattr(importlib.import_module(home), new)
    assert old not in importlib.import_module(module).__all__


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="'fusedops.train' has no attribute 'Nothing'"):
        _ = importlib.import_module("fusedops.train").Nothing


def test_former_names_of_arguments() -> None:
    @renamed_arguments(whole="ignored_params")
    def shard(stage: int, *, ignored_params: tuple[str, ...] = ()) -> tuple[int, tuple[str, ...]]:
        return stage, ignored_params

    with pytest.warns(DeprecationWarning, match=r"shard: whole is now ignored_params=\('a',\)"):
        assert shard(1, whole=("a",)) == (1, ("a",))  # type: ignore[call-arg]
    assert shard(2, ignored_params=("b",)) == (2, ("b",))
    with pytest.raises(TypeError, match="whole is the former name of ignored_params: give one"):
        shard(1, whole=(), ignored_params=())  # type: ignore[call-arg]
