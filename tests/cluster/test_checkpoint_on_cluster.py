"""A checkpoint that is written while training goes on, and resumed by ranks in another layout."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from short_training import Training, assert_parity, build, make_steps, model_config, reference

from fusedops.checkpoint import Checkpointer, tensors
from fusedops.testing.case_run import Reference, Values

pytestmark = pytest.mark.distributed
SAVED, STEPS = 2, 3
MODEL = model_config("tiny-llama")


def _save_and_continue(device: str, training: Training, folder: Path) -> Values:
    engine, optimizer = build(device, training)
    values = make_steps(device, engine, optimizer, training, range(SAVED))
    has_stepped, write = threading.Event(), tensors.write

    def write_later(*args: Any) -> None:
        has_stepped.wait()
        write(*args)

    with (
        mock.patch.object(tensors, "write", write_later),
        Checkpointer(folder, engine.model, optimizer) as checkpointer,
    ):
        checkpointer.save(SAVED, block=False)
        try:
            return values | make_steps(device, engine, optimizer, training, range(SAVED, STEPS))
        finally:
            has_stepped.set()


def _resume(device: str, training: Training, folder: Path) -> Values:
    engine, optimizer = build(device, training)
    with Checkpointer(folder, engine.model, optimizer) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and restored.step == SAVED
    return make_steps(device, engine, optimizer, training, range(SAVED, STEPS))


def _resumed(values: Values) -> Values:
    return {key: value for key, value in values.items() if key[1] >= SAVED}


def test_another_layout_continues_from_an_asynchronous_checkpoint(
    cluster: Any, tmp_path: Path
) -> None:
    first, second = (
        cluster.layout(layout) for layout in ({"dp": 2, "zero": 3}, {"tp": 2, "sp": True})
    )
    known = reference(cluster.device, Training(MODEL, {}), STEPS)
    assert_parity(cluster.run(_save_and_continue, Training(MODEL, first), tmp_path), known, first)
    after = Reference(_resumed(known.single), _resumed(known.truth))
    assert_parity(cluster.run(_resume, Training(MODEL, second), tmp_path), after, second)
