"""Saving and loading all that a training run is, so that it resumes with the same bits.

Tensors go through torch's distributed checkpoint, which shards and reshards them; what belongs to a
rank (random generators, the position in its data, schedulers and the like) is a file of its own.
How a checkpoint becomes visible at once, and how it is known to be complete, is in ``folder.py``.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops._core import checks
from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import generators, reasons, tensors
from fusedops.parallel.collective_errors import gather_errors, gather_objects, raise_on_all

_log = logging.getLogger(__name__)
_OP = "Checkpointer"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; the message says why."""


@dataclass(frozen=True)
class Restored:
    """What ``load`` gave back.

    Attributes:
        step: at which it was saved.
        data: the position in the data, as it was given to ``save`` by this rank; by the first rank
            where there was no such rank.
        positions: those of all ranks that saved.
        extra: what else was given.
        folder: of the checkpoint.
        confirmed: whether a good step followed it (``Checkpointer.confirm``).
        passed_over: newer checkpoints that are damaged, each with the reason.
        notes: what is not as if the run had never stopped.
    """

    step: int
    data: Any
    positions: tuple[Any, ...]
    extra: Any
    folder: Path
    confirmed: bool = False
    passed_over: tuple[tuple[Path, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself.

    Attributes:
        step: at which it was saved.
        extra: what was given to ``save`` by the first rank.
        folder: of the checkpoint.
    """

    step: int
    extra: Any
    folder: Path


def newest(root: str | os.PathLike[str], step: int | None = None) -> CheckpointInfo | None:
    """Return what the newest checkpoint says of itself, for who has no model to load it into yet.

    Of its files the first rank's alone is looked at; ``Checkpointer.load`` looks at all.

    Args:
        root: the folder of the checkpoints.
        step: that of a step alone.

    Returns:
        ``None`` where there is no checkpoint whose first file is complete.
    """
    for folder in folders.checkpoints(Path(root)):
        if step is not None and folders.step_of(folder) != step:
            continue
        try:
            record = folders.manifest(folder)
            folders.verify(folder, record, [_file_of(0)])
        except folders.Damaged:
            continue
        return CheckpointInfo(record["step"], _read_rank(folder, 0)["extra"], folder)
    return None


@dataclass(frozen=True)
class _WriteJob:
    """What a rank writes of a checkpoint, and where."""

    step: int
    partial: Path  # the folder that is written into
    final: Path  # what it is called when it is complete
    content: dict[str, Any]  # the tensors of all ranks
    rank_file: bytes  # what is in the file of this rank
    flat: bool  # as of ``State.content``


class Checkpointer:
    """Keeps the last good checkpoints of a training run in a folder.

    Attributes:
        last_step: the step of the checkpoint that was last saved or loaded; ``None``: there is
            none.

    Args:
        root: the folder; on several machines, one that all of them see.
        model: its parameters and buffers; sharded ones (FSDP2, tensor parallel) are resharded.
        optimizer: of the model's parameters, or several.
        keep: how many good checkpoints stay; beyond them the newest that is confirmed.
        group: the ranks that train together, ``None``: all that there are, or this process alone.
        **stateful: whatever else has ``state_dict`` and ``load_state_dict``: a scheduler, a
            gradient scaler, a data loader, a ``Guard``.

    Raises:
        ValueError: ``keep`` is less than 1.
        TypeError: the model is no module, an optimizer none, or one of ``stateful`` has no state.

    Note:
        With several ranks all of them make the object and call its methods, in the same order.
        Random generators are saved and restored by rank, so a run that is resumed on as many ranks
        gives the same bits as one that never stopped, dropout included.

    Example:
        >>> import tempfile, torch
        >>> from fusedops.checkpoint import Checkpointer
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with Checkpointer(tempfile.mkdtemp(), model, optimizer) as checkpointer:
        ...     restored = checkpointer.load()  # None: there is nothing yet
        ...     folder = checkpointer.save(100, data={"batch": 100})
        ...     checkpointer.load().data
        {'batch': 100}
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        keep: int = 3,
        group: dist.ProcessGroup | None = None,
        **stateful: Any,
    ) -> None:
        checks.integer(_OP, "keep", keep, least=1)
        checks.group(_OP, "group", group)
        checks.module(_OP, model)
        self.root = Path(root)
        self.keep = keep
        self._state = tensors.State(model, _optimizers(optimizer))
        self._stateful: dict[str, Any] = {}
        self.add(**stateful)
        self._group = _own_group(group)
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._ranks = dist.get_world_size(self._group) if self._group is not None else 1
        self._lock: IO[bytes] | None = None
        self._damaged: list[Path] = []
        self.last_step: int | None = None
        self._unconfirmed: Path | None = None  # the last one that was saved or loaded
        self._confirms = False  # whether to confirm that one after its write
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def add(self, **stateful: Any) -> None:
        """Also save and load these, as those given to the constructor.

        For what needs the checkpointer itself: ``checkpointer.add(guard=Guard(checkpointer))``.

        Args:
            **stateful: by name, what has ``state_dict`` and ``load_state_dict``.

        Raises:
            TypeError: one has not.
        """
        for name, owner in stateful.items():
            if not (hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")):
                checks.fail_type(_OP, name, "something with state_dict and load_state_dict", owner)
        self._stateful |= stateful

    def save(self, step: int, *, data: Any = None, extra: Any = None, block: bool = True) -> Path:
        """Save everything, between two steps.

        Args:
            step: how many steps were done.
            data: where in its data this rank is: numbers, texts, tensors, and lists and
                dictionaries of them. A data loader with ``state_dict`` is better given to the
                constructor.
            extra: anything else of that kind.
            block: ``False``: copy to the host's memory, return, and write in a thread. ``wait``, or
                the next ``save``, tells whether it went well.

        Returns:
            The checkpoint's folder; with ``block=False``, what it will be.

        Raises:
            CheckpointError: it could not be written, or the one before in its thread; the message
                says what the last good one is. Everything in memory is as it was.
            TypeError: ``data``, ``extra`` or a state holds what a checkpoint must not load again.
            ValueError: ranks gave other steps.
        """
        checks.integer(_OP, "step", step, least=0)
        checks.flag(_OP, "block", block)
        self.wait()
        self._check_same("step", step)
        with raise_on_all(TypeError, lambda errors: TypeError(self._joined(errors)), self._group):
            mine = self._of_rank(step, data, extra)
        problem = None
        places = None
        if self._rank == 0:
            try:
                self._lock = self._lock or folders.lock(self.root)
                places = folders.begin(self.root, step)
            except OSError as error:
                problem = reasons.reason(error)
        problem = self._agree(problem)
        if problem is not None:
            raise self._failed(step, problem)
        partial, final = self._from_first(places)
        # Ranks have parameters of other names where they are stages of a pipeline.
        flat = len({tuple(names) for names in self._gather(self._state.names())}) > 1
        content = self._state.content(flat=flat)
        if not block:
            content = tensors.copied(content)
        job = _WriteJob(step, partial, final, content, mine, flat)
        if block:
            self._write(job)
            self._raise_failure()
        else:
            self._writer = threading.Thread(
                target=self._write_async, args=(job,), name="fusedops-checkpoint"
            )
            self._writer.start()
        self.last_step, self._unconfirmed = step, final
        return final

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._confirms:
            self._confirm()
        self._raise_failure()

    def confirm(self) -> None:
        """Record that training goes well with the state that was last saved or loaded.

        A checkpoint is written before anybody knows what the weights in it are worth. One that is
        confirmed is not removed before a newer one is, and ``rollback`` goes back to it. A
        ``Guard`` that has the checkpointer calls this at each good step.
        """
        if self._unconfirmed is None:
            return
        self._confirms = True
        if self._writer is None or not self._writer.is_alive():
            self._confirm()

    def _confirm(self) -> None:
        """Mark the checkpoint, which has been written, and remove what it replaces."""
        folder, self._unconfirmed, self._confirms = self._unconfirmed, None, False
        if self._rank == 0 and folder is not None and folder.exists():
            folders.confirm(folder)
            if self._lock is not None:
                folders.keep_last(self.root, self.keep, self._damaged)

    def last_confirmed(self) -> Path | None:
        """Return the folder of the newest checkpoint that is confirmed, if there is one."""
        newest_first = folders.checkpoints(self.root)
        return next((folder for folder in newest_first if folders.is_confirmed(folder)), None)

    def load(self, step: int | None = None) -> Restored | None:
        """Restore the newest good checkpoint, or that of a step.

        Damaged ones are passed over for the one before, with a warning each (``logging``) and in
        the result. Nothing is changed before a checkpoint is known to be complete and to fit.

        Args:
            step: which; the newest by default.

        Returns:
            What was restored; ``None`` where there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, and none is good; or none of that step.
            ValueError: the checkpoint is of another model or optimizer, or ranks gave other steps.
        """
        self.wait()
        self._check_same("step", step)
        candidates = self._from_first(folders.checkpoints(self.root) if self._rank == 0 else None)
        if step is not None:
            checks.integer(_OP, "step", step, least=0)
            there = sorted({folders.step_of(folder) for folder in candidates})
            candidates = [folder for folder in candidates if folders.step_of(folder) == step]
            if not candidates:
                has = ", ".join(map(str, there)) or "none"
                raise CheckpointError(f"{self.root} has no checkpoint of step {step}; it has {has}")
        return self._load_first(candidates)

    def rollback(self, step: int) -> Restored | None:
        """Restore the newest confirmed checkpoint up to a step, and remove all later ones.

        Where none is confirmed it is the newest up to the step.

        Args:
            step: of the last checkpoint that was saved before training went wrong: later ones have
                the state with which it did.

        Returns:
            What was restored; ``None`` where there is no checkpoint up to the step.

        Raises:
            CheckpointError: there are such checkpoints, and none is good.
            ValueError: the checkpoint is of another model or optimizer, or ranks gave other steps.
        """
        checks.integer(_OP, "step", step, least=0)
        self.wait()
        self._check_same("step", step)
        before = [
            folder for folder in folders.checkpoints(self.root) if folders.step_of(folder) <= step
        ]
        before.sort(key=folders.is_confirmed, reverse=True)  # stable: the newest first of either
        restored = self._load_first(self._from_first(before))
        if restored is not None and self._rank == 0:
            for folder in folders.checkpoints(self.root):
                if folder == restored.folder:
                    break
                folders.remove(folder)
        return restored

    def _load_first(self, candidates: list[Path]) -> Restored | None:
        """Restore the first of these checkpoints that is not damaged."""
        passed_over: list[tuple[Path, str]] = []
        for folder in candidates:
            reason, record = self._check(folder)
            if reason is None:
                assert record is not None
                return self._restore(folder, record, tuple(passed_over))
            passed_over.append((folder, reason))
            self._damaged.append(folder)
            if self._rank == 0:
                _log.warning("checkpoint %s is passed over: %s", folder, reason)
        if not passed_over:
            return None
        failures = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over)
        raise CheckpointError(f"no checkpoint in {self.root} is good: {failures}")

    def close(self) -> None:
        """Wait for what is being written, and let another process save here.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None:
                raise  # else what ended the run is the cause, and this was logged

    def _of_rank(self, step: int, data: Any, extra: Any) -> bytes:
        """Return the file of this rank; what is in it is what it was when this was called."""
        states = {name: owner.state_dict() for name, owner in self._stateful.items()}
        parts = {"step": step, "data": data, "extra": extra, "stateful": states}
        parts["generators"] = generators.capture()
        parts["groups"] = self._state.groups()
        more = [("data", data), ("extra", extra), ("a group of the optimizer", parts["groups"])]
        for name, part in [*states.items(), *more]:
            try:
                _unpacked(_packed(part))
            except Exception as error:
                raise TypeError(
                    f"{_OP}: {name} must hold numbers, texts, tensors, and lists and dictionaries "
                    f"of them, got what cannot be loaded again: {reasons.first_line(error)}"
                ) from None
        return _packed(parts)

    def _write(self, job: _WriteJob) -> None:
        """Write a checkpoint, or leave in ``_failure`` why not; runs on all ranks."""

        def write_files() -> None:
            tensors.write(job.content, job.partial, self._group)
            folders.write(job.partial / _file_of(self._rank), job.rank_file)

        problem = self._agree(reasons.attempt(write_files)) or self._finish(job)
        if problem is not None:
            self._failure = self._failed(job.step, problem)
            if self._rank == 0:
                folders.discard(job.partial)

    def _write_async(self, job: _WriteJob) -> None:
        """Write in a thread; ``wait`` raises its error, also that of a rank that died."""
        try:
            self._write(job)
        except Exception as error:
            self._failure = self._failed(job.step, reasons.reason(error))
        if self._failure is not None and self._rank == 0:
            _log.warning("%s", self._failure)  # before wait raises it

    def _finish(self, job: _WriteJob) -> str | None:
        """Take the fingerprints, each rank of what it wrote, and make the checkpoint visible."""
        parts: dict[str, dict[str, Any]] = {}

        def take_fingerprints() -> None:
            names = [path.name for path in job.partial.glob(f"__{self._rank}_*")]
            names += [_METADATA] if self._rank == 0 else []
            names.append(_file_of(self._rank))
            parts.update(folders.fingerprints(job.partial, names))

        problem = self._agree(reasons.attempt(take_fingerprints))
        gathered = self._gather(parts)
        if problem is None and self._rank == 0:
            files = {name: entry for entries in gathered for name, entry in entries.items()}
            record = {
                "schema": folders.SCHEMA,
                "step": job.step,
                "ranks": self._ranks,
                "flat": job.flat,
                "torch": torch.__version__,
                "files": files,
            }
            written = {path.name for path in job.partial.iterdir()}
            if written - files.keys():
                problem = f"no rank has written {', '.join(sorted(written - files.keys()))}"
            else:
                problem = reasons.attempt(lambda: folders.commit(job.partial, job.final, record))
            if problem is None:
                folders.keep_last(self.root, self.keep, self._damaged)
        return self._agree(problem)

    def _check(self, folder: Path) -> tuple[str | None, dict[str, Any] | None]:
        """Return why a checkpoint is damaged, and its manifest; each rank reads a share."""
        reason, record = None, None
        try:
            record = folders.manifest(folder)
            names = sorted(record["files"])
            folders.verify(folder, record, names[self._rank :: self._ranks])
        except folders.Damaged as error:
            reason = str(error)
        return self._agree(reason), record

    def _restore(
        self, folder: Path, record: dict[str, Any], passed_over: tuple[tuple[Path, str], ...]
    ) -> Restored:
        saved = record["ranks"]
        # A share of the files on each rank: all ranks read all files of a large job too often.
        share = {rank: _read_rank(folder, rank) for rank in range(self._rank, saved, self._ranks)}
        mine = share[self._rank] if share else _read_rank(folder, 0)
        shares = self._gather([part["data"] for part in share.values()])
        positions = (shares[rank % self._ranks][rank // self._ranks] for rank in range(saved))
        missing = sorted(self._stateful.keys() - mine["stateful"].keys())
        names = {name for of_rank in self._gather(self._state.names()) for name in of_rank}
        with raise_on_all(ValueError, lambda errors: ValueError(self._joined(errors)), self._group):
            loading = self._state.prepare(folder, names, mine["groups"], flat=record["flat"])
            if missing:
                has = ", ".join(sorted(mine["stateful"])) or "none"
                raise ValueError(
                    f"{folder} has no state of {', '.join(missing)}; in addition to model and "
                    f"optimizer it has {has}"
                )
        self._state.load(loading, self._group)
        for name, target in self._stateful.items():
            target.load_state_dict(mine["stateful"][name])
        notes = []
        if self._rank < saved:
            generators.restore(mine["generators"])
        else:
            generators.seed(record["step"] * self._ranks + self._rank)
        if saved != self._ranks:
            notes.append(
                f"saved by {saved} ranks and loaded by {self._ranks}: random numbers are others "
                "than if the run had not stopped"
            )
        self.last_step, self._unconfirmed = record["step"], folder
        if self._rank == 0:
            _log.info("restored %s", folder)
        return Restored(
            step=record["step"],
            data=mine["data"],
            positions=tuple(positions),
            extra=mine["extra"],
            folder=folder,
            confirmed=self._from_first(folders.is_confirmed(folder)),
            passed_over=passed_over,
            notes=tuple(notes),
        )

    def _failed(self, step: int, problem: str) -> CheckpointError:
        good = [folder for folder in folders.checkpoints(self.root) if folder not in self._damaged]
        last = f"the last good one is {good[0]}" if good else "there is none before it"
        return CheckpointError(f"the checkpoint of step {step} was not written: {problem}; {last}")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # no frame refers to its own exception, which would keep its memory

    def _agree(self, problem: str | None) -> str | None:
        """Return the problems of all ranks, ``None`` where no rank has one."""
        return self._joined(gather_errors(problem, self._group)) or None

    def _joined(self, errors: dict[int, str]) -> str:
        named = self._ranks > 1
        return "; ".join(f"rank {rank}: {text}" if named else text for rank, text in errors.items())

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._group)

    def _check_same(self, name: str, value: Any) -> None:
        """Raise on all ranks unless all gave the same value: they would wait for each other."""
        given = self._gather(value)
        if len(set(given)) > 1:
            values = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(given[:8]))
            checks.fail(_OP, name, "the same on all ranks", values)

    def _from_first(self, value: Any) -> Any:
        return self._gather(value)[0]


def _optimizers(
    given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            checks.fail_type(_OP, "optimizer", "a torch.optim.Optimizer", optimizer)
    return optimizers


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks: a thread's exchanges must not meet the trainer's."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.new_group(ranks, backend="gloo")
    # Without the other ranks torch names a group by how many its ranks are in already, and they
    # wait for ever where that differs: it is made the same.
    c10d: Any = dist.distributed_c10d
    counts = gather_objects(len(c10d._world.pg_names), group)
    for _ in range(max(counts) - counts[dist.get_rank(group)]):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


_METADATA = ".metadata"  # of torch's checkpoint; the first rank writes it


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _read_rank(folder: Path, rank: int) -> dict[str, Any]:
    return _unpacked((folder / _file_of(rank)).read_bytes())


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
