"""Saving and loading all that a training run is, so that it resumes with the same bits.

Tensors go through torch's distributed checkpoint, which shards and reshards them (``tensors.py``);
what belongs to a rank is a file of its own (``rank_file.py``). ``writer.py`` writes one checkpoint,
``reader.py`` reads one, and this file decides which, when, and what stays. How a checkpoint becomes
visible at once, and how it is known to be complete, is in ``folder.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops._core import checks
from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import rank_file, reader, tensors, writer
from fusedops.checkpoint.ranks import CheckpointRanks, reason
from fusedops.checkpoint.reader import Restored

_log = logging.getLogger(__name__)
_OP = "Checkpointer"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; the message says why."""


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
        UnsupportedError: the model is sharded by ``FullyShardedDataParallel`` (FSDP1).

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
        optimizers = (
            (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        )
        for given in optimizers:
            if not isinstance(given, torch.optim.Optimizer):
                checks.fail_type(_OP, "optimizer", "a torch.optim.Optimizer", given)
        self._state = tensors.State(model, optimizers)
        self._stateful: dict[str, Any] = {}
        self.add(**stateful)
        self._ranks = CheckpointRanks(group)
        self._lock: IO[bytes] | None = None
        self._damaged: list[Path] = []
        self.last_step: int | None = None
        self._unconfirmed: Path | None = None  # the last one that was saved or loaded
        self._confirms = False  # whether to confirm that one after its write
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fusedops-checkpoint")
        self._writing: Future[None] | None = None  # what the thread writes or has written

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
        ranks = self._ranks
        ranks.check_same(_OP, "step", step)
        with ranks.raising(TypeError):
            states = {name: owner.state_dict() for name, owner in self._stateful.items()}
            own_file = rank_file.packed(step, data, extra, states, self._state.groups())

        def begin() -> Path:
            self._lock = self._lock or folders.lock(self.root)
            return folders.begin(self.root, step)

        problem, folder = ranks.first(begin)
        if problem is not None:
            raise self._not_written(step, problem)
        content = self._state.content()
        if block:
            self._write(folder, content, own_file)
        else:
            copied = tensors.copied(content)
            self._writing = self._thread.submit(self._write_async, folder, copied, own_file)
        self.last_step, self._unconfirmed = step, folder
        return folder

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            if self._writing is not None:
                self._writing.result()  # waits
        finally:
            self._writing = None
            if self._confirms:
                self._confirm()

    def confirm(self) -> None:
        """Record that training goes well with the state that was last saved or loaded.

        A checkpoint is written before anybody knows what the weights in it are worth. One that is
        confirmed is not removed before a newer one is, and ``rollback`` goes back to it. A
        ``Guard`` that has the checkpointer calls this at each good step.
        """
        if self._unconfirmed is None:
            return
        self._confirms = True
        if self._writing is None or self._writing.done():
            self._confirm()

    def _confirm(self) -> None:
        """Mark the checkpoint, which has been written, and remove what it replaces."""
        folder, self._unconfirmed, self._confirms = self._unconfirmed, None, False
        if self._ranks.rank == 0 and folder is not None and folder.exists():
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
        self._ranks.check_same(_OP, "step", step)
        if step is not None:
            checks.integer(_OP, "step", step, least=0)
        candidates = self._ranks.from_first(folders.checkpoints(self.root, step))
        if step is not None and not candidates:
            steps = sorted({folders.step_of(folder) for folder in folders.checkpoints(self.root)})
            has = ", ".join(map(str, steps)) or "none"
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
        self._ranks.check_same(_OP, "step", step)
        before = [
            folder for folder in folders.checkpoints(self.root) if folders.step_of(folder) <= step
        ]
        before.sort(key=folders.is_confirmed, reverse=True)  # stable: the newest first of either
        restored = self._load_first(self._ranks.from_first(before))
        if restored is not None and self._ranks.rank == 0:
            for folder in folders.checkpoints(self.root):
                if folder == restored.folder:
                    break
                folders.remove(folder)
        return restored

    def _load_first(self, candidates: list[Path]) -> Restored | None:
        """Restore the first of these checkpoints that is not damaged."""
        passed_over: list[tuple[Path, str]] = []
        for folder in candidates:
            problem = reader.verify(folder, self._ranks)
            if problem is None:
                restored = reader.restore(folder, self._state, self._stateful, self._ranks)
                self.last_step, self._unconfirmed = restored.step, folder
                return replace(restored, passed_over=tuple(passed_over))
            passed_over.append((folder, problem))
            self._damaged.append(folder)
            if self._ranks.rank == 0:
                _log.warning("checkpoint %s is passed over: %s", folder, problem)
        if not passed_over:
            return None
        failures = "; ".join(f"{path.name}: {problem}" for path, problem in passed_over)
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

    def _write(self, folder: Path, content: dict[str, Any], own_file: bytes) -> None:
        """Write a checkpoint, on all ranks; raise if it could not be written."""
        problem = writer.write(folder, content, own_file, self._ranks)
        if problem is not None:
            raise self._not_written(folders.step_of(folder), problem)
        if self._ranks.rank == 0:
            folders.keep_last(self.root, self.keep, self._damaged)

    def _write_async(self, folder: Path, content: dict[str, Any], own_file: bytes) -> None:
        """Write in a thread; ``wait`` raises its error, also that of a rank that died."""
        try:
            self._write(folder, content, own_file)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                error = self._not_written(folders.step_of(folder), reason(error))
            if self._ranks.rank == 0:
                _log.warning("%s", error)  # before wait raises it
            raise error from None

    def _not_written(self, step: int, problem: str) -> CheckpointError:
        good = [folder for folder in folders.checkpoints(self.root) if folder not in self._damaged]
        last = f"the last good one is {good[0]}" if good else "there is none before it"
        return CheckpointError(f"the checkpoint of step {step} was not written: {problem}; {last}")
