"""Full disks, kills, truncated and changed files: the last good one loads, and says why."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import Run, steps_in, train, undrawn, uninterrupted
from run_ranks import start_process
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from fusedops.checkpoint import Checkpointer, CheckpointError
from fusedops.checkpoint import folder as folders

FILES = (".metadata", "__0_0.distcp", "rank-00000.pt", "manifest.json")


def two_checkpoints(root: Path) -> Run:
    """Return a run that has saved steps 1 and 2."""
    run = Run(root)
    run.train(2)
    return run


def assert_loads(root: Path, step: int) -> None:
    """Assert that the last checkpoint is good, and of a step."""
    restored = Run(root).checkpointer.load()
    assert restored is not None and restored.step == step and restored.passed_over == ()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" x")


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncated, emptied, flipped, grown, removed])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_told_and_the_one_before_is_loaded(
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    two_checkpoints(tmp_path)
    newest, older = folders.checkpoints(tmp_path)
    damage(newest / name)
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored = run.checkpointer.load()
    assert restored is not None and restored.step == 1 and restored.folder == older
    ((folder, reason),) = restored.passed_over
    assert folder == newest and reason.startswith(name)
    assert f"{newest} is passed over: {reason}" in caplog.text
    # It goes on from there to the same end, and the damaged one is neither counted nor kept.
    assert run.train(4) == uninterrupted(4)
    assert steps_in(tmp_path) == [4, 3, 2]


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.checkpointer.save(1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        try:
            record = folders.manifest(path.parent)
        except folders.Damaged:
            continue
        # Only what stands between the words can differ.
        path.write_bytes(whole)
        assert record == folders.manifest(path.parent)


def test_where_all_are_damaged_it_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for checkpoint in folders.checkpoints(tmp_path):
        truncated(checkpoint / "__0_0.distcp")
    run = Run(tmp_path)
    before = run.digest()
    run = Run(tmp_path)
    with pytest.raises(CheckpointError) as error:
        run.checkpointer.load()
    for step in (1, 2):
        assert f"step-{step:010d}.0: __0_0.distcp has " in str(error.value)
    assert run.digest() == before


def test_a_manifest_of_a_later_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.checkpointer.save(1)
    monkeypatch.setattr(folders, "SCHEMA", 2)
    run.checkpointer.save(2)
    monkeypatch.setattr(folders, "SCHEMA", 1)
    restored = run.checkpointer.load()
    assert restored is not None and restored.step == 1
    assert "is of version 2, this fusedops reads 1" in restored.passed_over[0][1]


def fill_disk(patch: pytest.MonkeyPatch, room: int) -> None:
    """Leave room for so many bytes: each write beyond fails as the system's would."""
    left = [room]

    def take(size: int) -> None:
        if size > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= size

    class Stream(io.FileIO):
        def write(self, content: Any) -> int:
            take(memoryview(content).nbytes)
            return super().write(content)

    @contextlib.contextmanager
    def create_stream(_: Any, path: Any, mode: str) -> Any:
        with Stream(str(path), mode) if "w" in mode else open(path, mode) as file:
            yield file

    write = folders.write

    def limited(path: Path, content: bytes) -> None:
        take(len(content))
        write(path, content)

    patch.setattr(FileSystem, "create_stream", create_stream)
    patch.setattr(folders, "write", limited)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.97, 0.999])
def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, block: bool
) -> None:
    run = two_checkpoints(tmp_path)
    newest = folders.checkpoints(tmp_path)[0]
    run.step(2)
    size = sum(path.stat().st_size for path in newest.iterdir())
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
        fill_disk(patch, int(share * size))
        run.checkpointer.save(3, block=block)
        run.checkpointer.wait()
    says = str(error.value)
    assert says.startswith("the checkpoint of step 3 was not written: No space left on device")
    assert says.endswith(f"the last good one is {newest}")
    assert not list(tmp_path.glob(".partial*"))
    with undrawn():
        assert_loads(tmp_path, 2)
    # When there is room again, training has lost nothing.
    run.checkpointer.save(3, data={"position": 24})
    run.checkpointer.close()
    assert Run(tmp_path).train(5) == uninterrupted(5)


def test_two_processes_do_not_write_into_one_folder(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    first.checkpointer.save(1)
    with pytest.raises(CheckpointError, match="another process saves checkpoints here"):
        second.checkpointer.save(2)
    restored = second.checkpointer.load()  # reading is free
    assert restored is not None and restored.step == 1
    first.checkpointer.close()
    second.checkpointer.save(2)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file")
    with pytest.raises(CheckpointError, match="of step 1 was not written: .*; there is none"):
        run.checkpointer.save(1)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    run = two_checkpoints(tmp_path)
    newest = folders.checkpoints(tmp_path)[0]
    shutil.copytree(newest, tmp_path / ".partial-step-0000000009.0")
    shutil.copytree(newest, tmp_path / ".removed-step-0000000001.0")
    assert_loads(tmp_path, 2)
    run.checkpointer.save(3)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", *(f"step-{step:010d}.0" for step in (1, 2, 3))}


def test_what_ended_the_run_is_told_before_a_checkpoint_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    checkpointer = Run(tmp_path).checkpointer
    monkeypatch.setattr(folders, "write", full)
    with pytest.raises(KeyError, match="the cause"), checkpointer:
        checkpointer.save(1, block=False)
        raise KeyError("the cause")
    assert caplog.text.count("step 1 was not written: No space left on device") == 1


def test_a_file_that_no_rank_fingerprinted_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest without one of the files would not notice its damage."""
    take = folders.fingerprints
    monkeypatch.setattr(
        folders,
        "fingerprints",
        lambda folder, names: take(folder, [name for name in names if "distcp" not in name]),
    )
    with pytest.raises(CheckpointError, match="no rank has fingerprinted __0_0.distcp"):
        Checkpointer(tmp_path, nn.Linear(2, 2)).save(1)
    assert not folders.checkpoints(tmp_path)


STEPS = 10


def run_and_kill(root: Path, after: float | None, *, block: bool) -> tuple[float, str | None]:
    """Train in a process and kill it so many seconds after it began.

    Returns how long it ran, and its digest if it came to the end.
    """
    process, mine = start_process(train, str(root), STEPS, block)
    assert mine.recv() == "begins"
    began = time.monotonic()
    ended = mine.poll(60 if after is None else after)
    process.kill()
    process.join()
    return time.monotonic() - began, mine.recv() if ended else None


def sweep(root: Path, moments: int, seed: int) -> None:
    """Kill runs at random moments; each must have left what leads to the same end."""
    lasts, wanted = run_and_kill(root / "whole", None, block=True)
    assert wanted == uninterrupted(STEPS)
    draw = random.Random(seed)
    steps, unfinished = [], 0
    for moment in range(moments):
        folder = root / f"killed-{moment}"
        block = moment % 2 == 0
        _, digest = run_and_kill(folder, draw.uniform(0.0, lasts), block=block)
        assert digest in (None, wanted)
        unfinished += digest is None
        run = Run(folder)
        restored = run.checkpointer.load()
        if restored is not None:
            assert restored.passed_over == ()
            steps.append(restored.step)
        assert Run(folder).train(STEPS) == wanted, f"killed in run {moment} of seed {seed}"
    # The moments fell into training, and into all of it.
    assert unfinished >= moments // 2 and len(set(steps)) >= min(moments, 5) // 2


def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    sweep(tmp_path, moments=3, seed=0)


@pytest.mark.slow
def test_fifty_moments(tmp_path: Path) -> None:
    sweep(tmp_path, moments=50, seed=1)
