"""Full disks, truncated and changed files: the last good one loads, and the reason is told."""

from __future__ import annotations

import errno
import io
import logging
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import Run
from process_pool import start_process
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from fusedops.checkpoint import Checkpointer, CheckpointError
from fusedops.checkpoint import folder as folders
from fusedops.runtime import generators

FILES = (".metadata", "__0_0.distcp", "rank-00000.pt", "manifest.json")


def two_checkpoints(root: Path) -> Run:
    """Return a run that has saved steps 1 and 2."""
    run = Run(root)
    run.train(2)
    return run


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
    assert run.train(4) == Run(tmp_path / "other").train(4)
    assert [folders.step_of(checkpoint) for checkpoint in folders.checkpoints(tmp_path)] == [
        4,
        3,
        2,
    ]


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


class FullDisk:
    """A disk with room for so many bytes: each write beyond fails as the system's would."""

    def __init__(self, room: int) -> None:
        self.room = room

    def take(self, size: int) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size

    def stream(self, path: Any, mode: str) -> Any:
        disk = self

        class Stream(io.FileIO):
            def write(self, content: Any) -> int:
                disk.take(memoryview(content).nbytes)
                return super().write(content)

        return Stream(str(path), mode)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import contextlib

        @contextlib.contextmanager
        def create_stream(_: Any, path: Any, mode: str) -> Any:
            with self.stream(path, mode) if "w" in mode else open(path, mode) as file:
                yield file

        write = folders.write

        def limited(path: Path, content: bytes) -> None:
            self.take(len(content))
            write(path, content)

        monkeypatch.setattr(FileSystem, "create_stream", create_stream)
        monkeypatch.setattr(folders, "write", limited)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.97, 0.999])
def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, block: bool
) -> None:
    run = two_checkpoints(tmp_path)
    newest = folders.checkpoints(tmp_path)[0]
    run.step(2)
    with monkeypatch.context() as patch:
        FullDisk(int(share * size_of(newest))).install(patch)
        with pytest.raises(CheckpointError) as error:
            run.checkpointer.save(3, block=block)
            run.checkpointer.wait()
    says = str(error.value)
    assert says.startswith("the checkpoint of step 3 was not written: No space left on device")
    assert says.endswith(f"the last good one is {newest}")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".partial")] == []
    meanwhile = generators.capture()
    restored = Run(tmp_path).checkpointer.load()
    assert restored is not None and restored.step == 2 and restored.passed_over == ()
    generators.restore(meanwhile)
    # When there is room again, training has lost nothing.
    run.checkpointer.save(3, data={"position": 24})
    run.checkpointer.close()
    assert Run(tmp_path).train(5) == Run(tmp_path / "other").train(5)


def _train_with_small_files(connection: Any, root: str, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = Run(Path(root))
    run.checkpointer.load()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        run.checkpointer.save(3)
    except CheckpointError as error:
        connection.send(str(error))


def test_a_limit_of_the_system_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    two_checkpoints(tmp_path).checkpointer.close()
    for size in (0, 5000, 100_000):
        process, mine = start_process(_train_with_small_files, str(tmp_path), size)
        says = mine.recv()
        process.join()
        assert "the checkpoint of step 3 was not written: File too large" in says
        restored = Run(tmp_path).checkpointer.load()
        assert restored is not None and restored.step == 2 and restored.passed_over == ()


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
    with pytest.raises(
        CheckpointError, match="of step 1 was not written: .*; there is none before"
    ):
        run.checkpointer.save(1)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    run = two_checkpoints(tmp_path)
    newest = folders.checkpoints(tmp_path)[0]
    shutil.copytree(newest, tmp_path / ".partial-step-0000000009.0")
    shutil.copytree(newest, tmp_path / ".removed-step-0000000001.0")
    restored = run.checkpointer.load()
    assert restored is not None and restored.step == 2 and restored.passed_over == ()
    run.checkpointer.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        *(f"step-{step:010d}.0" for step in (1, 2, 3)),
    ]


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
