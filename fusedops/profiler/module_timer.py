"""Times the steps of any data-parallel training of a module, from the events of its trainer.

Forward and backward are seen by hooks of the module. After the last gradient of a rank is there, it
waits for the others: DistributedDataParallel reduces gradients in threads of its own, and its
backward returns when the last bucket has arrived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedops.profiler.recorder import Moment, StepRecorder
from fusedops.profiler.timings import RunShape
from fusedops.profiler.watch import RunWatch


class ModuleTimer:
    """Records where the time of each step goes, by events that every trainer has.

    The order is ``start``, for each step ``begin_step``, the module's forwards and backwards,
    ``begin_optimizer``, ``end_step``; and ``stop``. Between two steps ``mark`` names what the time
    since the last event was spent on: ``"validation"`` or ``"checkpoint"``; the rest counts as
    ``"data"``. All ranks call ``start`` and ``end_step`` together.

    Args:
        folder: of the run: its records are in ``profile`` there.
        every: steps between two gatherings of the ranks' rows.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from fusedops.profiler import ModuleTimer, read_timings
        >>> model, folder = torch.nn.Linear(4, 4), tempfile.mkdtemp()
        >>> timer = ModuleTimer(folder, every=1)
        >>> timer.start(model)
        >>> timer.begin_step()
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> timer.begin_optimizer()
        >>> timer.end_step(1)
        >>> timer.stop()
        >>> float(read_timings(folder).of("forward")) > 0
        True
    """

    def __init__(self, folder: str | Path, *, every: int = 5) -> None:
        self.folder, self.every = Path(folder), every
        self._recorder: StepRecorder | None = None
        self._watch: RunWatch | None = None
        self._handles: list[Any] = []
        self._since: Moment = 0.0  # the last event
        self._gradient: Moment = None  # of the last gradient since then
        self._depth = 0  # of forwards that are under way

    def start(self, module: nn.Module, *, device: str = "") -> None:
        """Begin to record.

        Args:
            module: that is trained: what computes the loss, as the trainer calls it.
            device: ``"cpu"`` or ``"cuda"``; by default that of the module's first parameter.
        """
        several = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        first = next(module.parameters(), None)
        kind = device or ("cpu" if first is None else first.device.type)
        sizes = {"pp": 1, "dp": ranks, "cp": 1, "tp": 1, "ep": 1}
        shape = RunShape(sizes, device=kind)
        self._watch = RunWatch(self.folder, shape) if rank == 0 else None
        handler = None if self._watch is None else self._watch.look
        self._recorder = StepRecorder(shape, every=self.every, handler=handler)
        self._recorder.__enter__()
        self._handles = [
            module.register_forward_pre_hook(self._begin_forward),
            module.register_forward_hook(self._end_forward, always_call=True),
        ]
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = self._note_gradient
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._begin()

    def begin_step(self) -> None:
        """Note that the batch is there."""
        self.mark("data")

    def mark(self, section: str) -> None:
        """Count the time since the last event as that of a section, a name of ``SECTIONS``."""
        if self._recorder is not None:
            self._end_section(section, self._recorder.moment())

    def begin_optimizer(self) -> None:
        """Note that all gradients are there, and that the optimizer steps next."""
        if self._recorder is None:
            return
        now = self._recorder.moment()
        if self._recorder.shape.ranks > 1 and self._gradient is not None:
            self._recorder.add_wait("dp", self._gradient, now)
        self._end_section("backward", now)

    def end_step(self, step: int) -> None:
        """Note that the optimizer has stepped.

        Args:
            step: how many steps were done.
        """
        if self._recorder is None:
            return
        self.mark("optimizer")
        self._recorder.number = step
        self._recorder.end()
        self._begin()

    def stop(self) -> None:
        """Gather the last rows, and remove all hooks. All ranks call it together."""
        for handle in self._handles:
            handle.remove()
        if self._recorder is not None:
            self._recorder.flush()
            self._recorder.__exit__()
        if self._watch is not None:
            self._watch.close()
        self._recorder, self._watch, self._handles = None, None, []

    def _begin(self) -> None:
        assert self._recorder is not None
        self._recorder.begin(0)
        self._since, self._gradient = self._recorder.moment(), None

    def _end_section(self, section: str, now: Moment) -> None:
        assert self._recorder is not None
        self._recorder.add(section, self._since, now)
        self._since, self._gradient = now, None

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth != 1 or not module.training or self._recorder is None:
            return
        # The backward of an earlier micro-batch ended with its last gradient.
        if self._gradient is not None:
            self._end_section("backward", self._gradient)
        self.mark("data")

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth and module.training:
            self.mark("forward")

    def _note_gradient(self, _: torch.Tensor) -> None:
        if self._recorder is not None:
            self._gradient = self._recorder.moment()
