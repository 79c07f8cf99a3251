"""How often the host waits for numbers of the device in a step of training."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from train_runs import config

from fusedops.checkpoint import Guard, guard
from fusedops.train import step, train

WAITING = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.nonzero, torch.nonzero),
}


class Waits(TorchFunctionMode):
    """Counts calls that give numbers of a tensor to the host, by the line of ``step.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller: FrameType | None = sys._getframe(1)
        if func in WAITING and caller is not None and caller.f_code.co_filename == step.__file__:
            self.lines[caller.f_lineno] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_waits_once(tmp_path: Path) -> None:
    changes = {"parallel": {"microbatches": 2}, "validation": {"sequences": 0}}
    with Waits() as waits:
        result = train(config(tmp_path, steps=3, **changes))
    assert result.finished and list(waits.lines.values()) == [3]


def test_a_guard_exchanges_nothing_that_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(guard, "gather_objects", lambda values, group: [values, [9.0, 9.0]])
    watching = Guard(None, on_nonfinite="skip", on_spike="skip")
    assert watching.check(0, 1.0, 2.0, agreed=True).ok
    assert watching._history["loss"][-1] == 1.0
    assert watching.check(1, 1.0, 2.0).ok and watching._history["loss"][-1] == 9.0
    with pytest.raises(TypeError, match="agreed must be a bool"):
        watching.check(2, 1.0, agreed=1)
