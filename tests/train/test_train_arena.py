"""``arena = true``: training steps in one block of memory have the same bits, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import on_fresh_ranks
from train_runs import around_backward, config, digest

from fusedops._core import extension
from fusedops.train import InputError, train
from fusedops.train.builder import Run

pytestmark = pytest.mark.skipif(extension.cpu_library() is not None, reason="no library")
# Ranks, and what they share or save.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "recompute": (1, {"microbatches": 2, "recompute": "full"}),
    "offload": (1, {"offload": ["activations"]}),
    "pipeline": (2, {"pp": 2, "microbatches": 4}),
    "zero 3": (2, {"dp": 2, "zero": 3, "microbatches": 2}),
    "tensor": (2, {"tp": 2, "sp": True}),
}


def _train(rank: int, folder: str, out: str, changes: dict[str, Any]) -> tuple[str, float, str]:
    """Return a digest of this rank's weights, and of a step the share in the block and the note."""
    found: list[tuple[float, str]] = [(0.0, "")]

    def look(run: Run) -> None:
        if run.arena is not None and run.step:  # the figures of this step so far
            report = run.arena.report()
            found.append((report.served_bytes / report.step_bytes, report.note))

    with around_backward(after=look) as runs:
        train(config(Path(folder), out=f"{folder}/{out}", **changes))
    return digest(runs[0]), *found[-1]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("zero 3", "tensor") else ())
        for name in LAYOUTS
    ],
)
def test_training_in_an_arena_keeps_its_bits(tmp_path: Path, layout: str) -> None:
    config(tmp_path)  # writes the corpus
    ranks, parallel = LAYOUTS[layout]
    changes = {"model": {"preset": "tiny-llama"}, "parallel": parallel, "steps": 8}
    plain = on_fresh_ranks(ranks, _train, str(tmp_path), "plain", changes)
    using = on_fresh_ranks(ranks, _train, str(tmp_path), "arena", changes | {"arena": True})
    assert all(isinstance(result, tuple) for result in [*plain, *using]), (plain, using)
    for (weights, share, note), (expected, *_) in zip(using, plain, strict=True):
        assert weights == expected and not note
        assert share > (0.5 if ranks == 1 else 0.3)


def test_training_on_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "cpu_library", lambda: "it is not built")
    with pytest.raises(InputError, match="arena = true is not possible: use_arena: it needs the"):
        train(config(tmp_path, arena=True))
