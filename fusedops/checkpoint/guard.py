"""A guard against steps that would spoil a model: NaN, infinities, and spikes of loss or gradient.

A value is a spike when it is further above the median of the last good ones than ``spike`` times
their deviation, which is 1.4826 times the median distance from the median (the standard deviation,
if they were normally distributed) and at least 5 % of the median. Medians, unlike means, are not
moved by the spikes themselves.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from fusedops._core import checks
from fusedops.checkpoint.checkpointer import Checkpointer, Restored
from fusedops.parallel.collective_errors import gather_objects

_log = logging.getLogger(__name__)
_OP = "Guard"
ACTIONS = ("skip", "rollback", "stop", "go")
_NORMAL = 1.4826
_LEAST_DEVIATION = 0.05
# Fewer values say nothing of what is usual.
_LEAST_HISTORY = 8


class GuardError(RuntimeError):
    """Training must not go on; the message says what was seen and what was done before."""


@dataclass(frozen=True)
class GuardDecision:
    """What to do with a step.

    Attributes:
        step: which.
        action: ``"go"``: take it; ``"skip"``: leave the optimizer alone and drop the gradients;
            ``"rollback"``: the state of ``restored`` is in place, go on from there.
        reason: what was seen; empty where nothing was.
        restored: what a rollback restored.
    """

    step: int
    action: str
    reason: str = ""
    restored: Restored | None = None

    @property
    def ok(self) -> bool:
        """Whether to make the step."""
        return self.action == "go"


class Guard:
    """Looks at loss and gradient norm before each step of the optimizer.

    Args:
        checkpointer: where a rollback goes back to. Its checkpoints are confirmed by the first good
            step after them.
        on_nonfinite: what to do at NaN or infinity: ``"skip"``, ``"rollback"`` or ``"stop"``.
        on_spike: the same for a spike; ``"go"`` only tells.
        spike: how many deviations above the median of the last values a spike is.
        window: how many good values are remembered.
        patience: after so many bad steps in a row, ``"skip"`` becomes a rollback (without a
            checkpointer: the end), to the last checkpoint before them that a good step followed.
        max_rollbacks: how many rollbacks may go to one checkpoint; the next one is the end.
        group: ranks that train together: all of them call ``check`` and do the same.

    Raises:
        ValueError: an action is unknown, there is nothing to roll back to, or a number is out of
            range.

    Note:
        After a rollback the same data would give the same bits, and the same spike: steps that were
        bad are skipped when training comes by again. ``check`` reads two numbers, for which the
        host waits on a GPU. As one of the checkpointer's ``stateful`` objects it remembers its
        values, so that a resumed run judges as one that never stopped.

    Example:
        >>> from fusedops.checkpoint import Guard
        >>> guard = Guard()
        >>> guard.check(0, loss=2.0, grad_norm=1.0).ok
        True
        >>> guard.check(1, loss=float("nan"), grad_norm=1.0)
        GuardDecision(step=1, action='skip', reason='the loss is nan', restored=None)
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None = None,
        *,
        on_nonfinite: str = "skip",
        on_spike: str = "skip",
        spike: float = 8.0,
        window: int = 64,
        patience: int = 8,
        max_rollbacks: int = 2,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        checks.choice(_OP, "on_nonfinite", on_nonfinite, ACTIONS[:3])
        checks.choice(_OP, "on_spike", on_spike, ACTIONS)
        checks.positive(_OP, "spike", spike)
        checks.integer(_OP, "window", window, least=_LEAST_HISTORY)
        checks.integer(_OP, "patience", patience, least=1)
        checks.integer(_OP, "max_rollbacks", max_rollbacks, least=0)
        checks.group(_OP, "group", group)
        if checkpointer is None and "rollback" in (on_nonfinite, on_spike):
            checks.fail(_OP, "checkpointer", "given where something is rolled back", None)
        self.checkpointer = checkpointer
        self.on_nonfinite, self.on_spike = on_nonfinite, on_spike
        self.spike, self.patience, self.max_rollbacks = spike, patience, max_rollbacks
        self.events: list[GuardDecision] = []
        self._group = group
        self._history: dict[str, deque[float]] = {
            name: deque(maxlen=window) for name in ("loss", "gradient norm")
        }
        self._bad_in_a_row = 0
        self._last_saved: int | None = None  # the last checkpoint before those in a row
        self._bad_steps: set[int] = set()
        self._rollbacks: dict[int, int] = {}

    def check(
        self,
        step: int,
        loss: float | torch.Tensor,
        grad_norm: float | torch.Tensor | None = None,
        *,
        agreed: bool = False,
    ) -> GuardDecision:
        """Return what to do with a step, between its backward and the optimizer's step.

        Args:
            step: its number.
            loss: its loss; of ranks that have others the largest counts.
            grad_norm: the norm of all gradients before clipping, as ``clip_grad_norm_`` gives it.
            agreed: the values are the same on all ranks already, which then exchange nothing.

        Raises:
            GuardError: training must not go on, because it was configured so, or because nothing
                that was tried helped.
        """
        checks.integer(_OP, "step", step, least=0)
        checks.flag(_OP, "agreed", agreed)
        values = self._values(loss, grad_norm, agreed)
        action, reason = self._judge(values)
        if not reason:
            self._bad_in_a_row = 0
            if self.checkpointer is not None:
                self.checkpointer.confirm()
            for name, value in values.items():
                self._history[name].append(value)
            return GuardDecision(step, "go")
        if action == "rollback" and step in self._bad_steps:
            action = "skip"
        self._bad_steps.add(step)
        self._bad_in_a_row += 1
        if self._bad_in_a_row == 1 and self.checkpointer is not None:
            self._last_saved = self.checkpointer.last_step
        if action == "skip" and self._bad_in_a_row > self.patience:
            reason = f"{reason}; {self._bad_in_a_row} bad steps in a row"
            action = "stop" if self.checkpointer is None else "rollback"
        verdict = self._rolled_back(step, reason) if action == "rollback" else None
        verdict = verdict or GuardDecision(step, action, reason)
        before = self._earlier_events()
        self.events.append(verdict)
        done = {"go": "taken all the same", "skip": "skipped", "stop": "training stops"}
        restored = verdict.restored
        went = f"back to step {restored.step}" if restored else done[verdict.action]
        _log.warning("step %d: %s: %s", step, reason, went)
        if verdict.action == "stop":
            raise GuardError(f"step {step}: {reason}{self._last_confirmed()}{before}")
        return verdict

    def report(self) -> str:
        """Return what was seen and done, a line for each step that was not like the others."""
        lines = []
        for event in self.events:
            went = f" to step {event.restored.step}" if event.restored else ""
            lines.append(f"step {event.step}: {event.action}{went}: {event.reason}")
        return "\n".join(lines) or "nothing unusual"

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard knows."""
        return {
            "history": {name: list(values) for name, values in self._history.items()},
            "bad_in_a_row": self._bad_in_a_row,
            "last_saved": self._last_saved,
            "bad_steps": sorted(self._bad_steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; steps that are known as bad stay so."""
        for name, values in state["history"].items():
            self._history[name] = deque(values, maxlen=self._history[name].maxlen)
        self._bad_in_a_row = state["bad_in_a_row"]
        self._last_saved = state["last_saved"]
        self._bad_steps |= set(state["bad_steps"])

    def _values(
        self, loss: float | torch.Tensor, grad_norm: float | torch.Tensor | None, agreed: bool
    ) -> dict[str, float]:
        given = {"loss": loss} | ({} if grad_norm is None else {"gradient norm": grad_norm})
        values = {name: _number(name, value) for name, value in given.items()}
        if agreed:
            return values
        # Ranks must not differ in what they do. NaN is more than infinity here.
        gathered = gather_objects(list(values.values()), self._group or dist.group.WORLD)
        columns = zip(*gathered, strict=True)
        worst = [max(column, key=lambda value: (math.isnan(value), value)) for column in columns]
        return dict(zip(values, worst, strict=True))

    def _judge(self, values: dict[str, float]) -> tuple[str, str]:
        """Return what to do and why; no reason where nothing is wrong."""
        for name, value in values.items():
            if not math.isfinite(value):
                return self.on_nonfinite, f"the {name} is {value}"
        for name, value in values.items():
            usual = self._usual(name)
            if usual is not None and value > usual[0] + self.spike * usual[1]:
                middle, deviation = usual
                times = (value - middle) / deviation
                return self.on_spike, (
                    f"the {name} is {value:.4g}, {times:.1f} deviations above {middle:.4g}"
                )
        return "go", ""

    def _usual(self, name: str) -> tuple[float, float] | None:
        values = self._history[name]
        if len(values) < _LEAST_HISTORY:
            return None
        middle = statistics.median(values)
        spread = statistics.median(abs(value - middle) for value in values)
        least = max(_LEAST_DEVIATION * abs(middle), torch.finfo(torch.float32).tiny)
        return middle, max(_NORMAL * spread, least)

    def _rolled_back(self, step: int, reason: str) -> GuardDecision:
        assert self.checkpointer is not None
        # What was saved since the first of the bad steps has the weights that they were bad with.
        last = self.checkpointer.last_step if self._last_saved is None else self._last_saved
        restored = None if last is None else self.checkpointer.rollback(last)
        if restored is None:
            raise GuardError(f"step {step}: {reason}; there is no checkpoint to go back to")
        self._bad_in_a_row = 0
        count = self._rollbacks[restored.step] = self._rollbacks.get(restored.step, 0) + 1
        if count > self.max_rollbacks:
            raise GuardError(
                f"step {step}: {reason}; went back to step {restored.step} {count - 1} times "
                f"already{self._last_confirmed()}{self._earlier_events()}"
            )
        return GuardDecision(step, "rollback", reason, restored)

    def _last_confirmed(self) -> str:
        folder = self.checkpointer and self.checkpointer.last_confirmed()
        return f"; the last good checkpoint is {folder}" if folder else ""

    def _earlier_events(self) -> str:
        return f"\nbefore:\n{self.report()}" if self.events else ""


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            checks.fail(_OP, name, "one number", f"a tensor of shape {list(value.shape)}")
        return float(value.detach())
    checks.number(_OP, name, value)
    return float(value)
