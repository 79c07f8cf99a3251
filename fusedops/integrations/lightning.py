"""Lightning: a callback that patches the module before the strategy wraps it.

    Trainer(callbacks=[FusedOps(level="O2")])

Importing this module imports ``lightning`` (or ``pytorch_lightning`` where only that is there).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusedops._core import checks, imports
from fusedops.integrations.hf.patch import patch, unpatch
from fusedops.integrations.hf.report import PatchReport
from fusedops.integrations.hf.rules.rule import LEVELS
from fusedops.profiler import ModuleTimer

_ROOT = "lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning"
_lightning = imports.needed(_ROOT, "lightning", "fusedops.integrations.lightning")
_Callback: Any = _lightning.Callback
_rank_zero = imports.needed(f"{_ROOT}.utilities.rank_zero", "lightning", "FusedOps")


class FusedOps(_Callback):
    """Patch the ``LightningModule`` with the fused ops.

    It is patched before its own ``setup`` and ``configure_model`` run, because the latter may shard
    it, and again before the strategy's set-up, because they may have built it. The report is
    printed by Lightning's ``rank_zero_info`` and kept as ``report``. A model that
    ``configure_model`` both builds and shards has to be patched there, between the two.

    Args:
        level: as for ``fusedops.patch``.
        strict: as for ``fusedops.patch``, about the module as the strategy gets it.
        unpatch: take the fused ops out again when the fit, validation, test or prediction is over.

    Raises:
        ValueError: ``level`` is unknown.
    """

    def __init__(self, level: str = "O2", strict: bool = False, unpatch: bool = False) -> None:
        super().__init__()
        checks.choice("FusedOps", "level", level, LEVELS)
        self.level = level
        self.strict = strict
        self.unpatch = unpatch
        self.report: PatchReport | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch now, and once more right before the strategy's set-up."""
        patch(pl_module, level=self.level)
        strategy = trainer.strategy
        set_up = strategy.setup

        def patch_and_set_up(*args: Any) -> None:
            del strategy.setup  # the method of the class again
            self.report = patch(pl_module, level=self.level, strict=self.strict)
            _rank_zero.rank_zero_info(str(self.report))
            set_up(*args)

        strategy.setup = patch_and_set_up

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Unpatch, if that was asked for."""
        if self.unpatch:
            unpatch(pl_module)


class StepTimings(_Callback):
    """Record where the time of each step is spent on each rank, and warn of what slows the job.

    Args:
        folder: for the records; by default the trainer's ``default_root_dir``.
        every: steps between two gatherings of the ranks' rows.

    Raises:
        ValueError: ``every`` is less than 1.
    """

    def __init__(self, folder: str = "", every: int = 5) -> None:
        super().__init__()
        checks.integer("StepTimings", "every", every, least=1)
        self.folder, self._timer = folder, ModuleTimer(folder, every=every)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record."""
        self._timer.folder = Path(self.folder or trainer.default_root_dir)
        self._timer.start(trainer.model or pl_module, device=pl_module.device.type)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Note that the batch is there."""
        self._timer.begin_step()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Note that the loss is there."""
        self._timer.mark("forward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note that all gradients are there."""
        self._timer.begin_optimizer()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *outputs: Any) -> None:
        """Note that the optimizer has stepped."""
        self._timer.end_step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Gather the last rows."""
        self._timer.stop()
