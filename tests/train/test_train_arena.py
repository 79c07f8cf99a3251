"""``arena = true``: training steps in one block of memory have the same bits, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import on_fresh_ranks
from train_runs import Watching, config, digest, same_bits, uninterrupted, whole

from fusedops._core import extension
from fusedops.train import InputError, loop, train
from fusedops.train.builder import Run

pytestmark = pytest.mark.skipif(extension.cpu_library() is not None, reason="no library")
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3": {"dp": 2, "zero": 3, "microbatches": 2},
    "pipeline": {"pp": 2, "microbatches": 4},
    "tensor": {"tp": 2, "sp": True},
}


class Used(Watching):
    """Looks at the arena after each step: it is removed at the end of the run."""

    def show(self, record: Any) -> None:
        super().show(record)
        if record["step"] == 10:
            report = self.run.arena.report()
            assert not report.note and report.served_bytes > 0.5 * report.step_bytes


@pytest.mark.parametrize(
    "parallel",
    [{}, {"microbatches": 2, "recompute": "full"}, {"offload": ["activations"]}],
    ids=["plain", "recompute", "offload"],
)
def test_training_in_an_arena_keeps_its_bits(tmp_path: Path, parallel: dict[str, Any]) -> None:
    # One micro-batch with offloaded activations has the bits of one without.
    plain = whole(tmp_path, parallel=parallel) if "recompute" in parallel else uninterrupted()
    using = Used()
    train(config(tmp_path, arena=True, parallel=parallel), callback=using)
    assert len(using.records) == 12
    assert same_bits(using, plain)


def test_training_on_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "cpu_library", lambda: "it is not built")
    with pytest.raises(InputError, match="arena = true is not possible: use_arena: it needs the"):
        train(config(tmp_path, arena=True))


def _train(rank: int, folder: str, out: str, changes: dict[str, Any]) -> tuple[str, float]:
    """Return a digest of this rank's weights, and the share of a step that was in the block."""
    plain, runs, shares = loop.update, [], [0.0]

    def update(run: Run, *args: Any, **options: Any) -> Any:
        if run.arena is not None and run.step:  # the figures of this step so far
            report = run.arena.report()
            shares.append(report.served_bytes / report.step_bytes)
        runs.append(run)
        return plain(run, *args, **options)

    loop.update = update
    train(config(Path(folder), out=f"{folder}/{out}", **changes))
    return digest(runs[0]), shares[-1]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "pipeline" else pytest.mark.slow) for name in LAYOUTS],
)
def test_layouts_in_an_arena_keep_their_bits(tmp_path: Path, layout: str) -> None:
    config(tmp_path)  # writes the corpus
    changes = {"model": {"preset": "tiny-llama"}, "parallel": LAYOUTS[layout], "steps": 8}
    plain = on_fresh_ranks(2, _train, str(tmp_path), "plain", changes)
    using = on_fresh_ranks(2, _train, str(tmp_path), "arena", changes | {"arena": True})
    assert all(isinstance(result, tuple) for result in [*plain, *using]), (plain, using)
    for (weights, share), (expected, _) in zip(using, plain, strict=True):
        assert weights == expected
        assert share > 0.3
