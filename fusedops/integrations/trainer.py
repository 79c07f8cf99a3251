"""Hugging Face's Trainer and what is built on it (trl's): fused ops by one line or by a callback.

use_fused_kernels(trainer)                                   # before trainer.train()
Trainer(model, args, callbacks=[FusedOpsCallback()], ...)    # the same
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from torch import nn

from fusedops._core import checks, imports
from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.patch import describe, patch
from fusedops.integrations.hf.report import PatchReport
from fusedops.integrations.hf.rules.rule import LEVELS
from fusedops.profiler import ModuleTimer

_transformers = imports.needed("transformers", "transformers", "fusedops.integrations.trainer")

_LOG = logging.getLogger("fusedops")


def use_fused_kernels(target: Any, *, level: str = "O2", strict: bool = False) -> PatchReport:
    """Let a Trainer's model run on the fused ops.

    Call it before ``train``, which wraps the model. Adapters that trl puts in are there by then.
    With ``model_init`` each model that is made later is patched as well.

    Args:
        target: a ``transformers.Trainer`` of any kind, or a model.
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.

    Returns:
        The report about the model, or about the one that ``model_init`` has made.

    Raises:
        TypeError: ``target`` is neither.
        UnsupportedError: ``train`` has wrapped the model; or as ``fusedops.patch``.
    """
    if isinstance(target, nn.Module):
        return patch(target, level=level, strict=strict)
    if not isinstance(target, _transformers.Trainer):
        expected = "a transformers.Trainer or a model"
        checks.fail_type("use_fused_kernels", "target", expected, target)
    if target.model_wrapped is not target.model:
        raise UnsupportedError(
            "use_fused_kernels: the model is wrapped already, as a "
            f"{type(target.model_wrapped).__name__}; call it before train()"
        )
    report = patch(target.model, level=level, strict=strict)
    if target.model_init is not None:
        model_init = target.model_init

        @functools.wraps(model_init)  # the Trainer asks for its arguments
        def patching(*args: Any) -> Any:
            model = model_init(*args)
            patch(model, level=level, strict=strict)
            return model

        target.model_init = patching
    return report


_Callback: Any = _transformers.TrainerCallback


class FusedOpsCallback(_Callback):
    """Patch the model at the end of the Trainer's construction, before anything wraps it.

    The report is logged by the logger ``fusedops`` at level INFO, and kept as ``report``. A model
    that ``model_init`` creates for training is patched when the training begins.

    Args:
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``.

    Raises:
        ValueError: ``level`` is unknown.
    """

    def __init__(self, level: str = "O2", strict: bool = False) -> None:
        checks.choice("FusedOpsCallback", "level", level, LEVELS)
        self.level = level
        self.strict = strict
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch the model."""
        self._patch(kwargs["model"], state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch the model if it is another one than at the end of the construction."""
        if describe(kwargs["model"]).num_replaced == 0:
            self._patch(kwargs["model"], state)

    def _patch(self, model: Any, state: Any) -> None:
        self.report = patch(model, level=self.level, strict=self.strict)
        if state.is_local_process_zero:
            _LOG.info("%s", self.report)


class TimingsCallback(_Callback):
    """Record where the time of each step is spent on each rank, and warn of what slows the job.

    The records are those of ``fusedops train``: ``fusedops profile`` reads them. Waits are known
    for DistributedDataParallel; with FSDP they are part of forward and backward.

    Args:
        folder: for the records; by default the trainer's ``output_dir``.
        every: steps between two gatherings of the ranks' rows.

    Raises:
        ValueError: ``every`` is less than 1.
    """

    def __init__(self, folder: str = "", every: int = 5) -> None:
        checks.integer("TimingsCallback", "every", every, least=1)
        self.folder, self._timer = folder, ModuleTimer(folder, every=every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record."""
        self._timer.folder = Path(self.folder or args.output_dir)
        self._timer.start(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the batch is there."""
        self._timer.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that all gradients are there."""
        self._timer.begin_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the optimizer has stepped."""
        self._timer.end_step(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that an evaluation ended."""
        self._timer.mark("validation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that a checkpoint was written."""
        self._timer.mark("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather the last rows."""
        self._timer.stop()
