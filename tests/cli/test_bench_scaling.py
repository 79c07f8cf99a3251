"""``fusedops bench scaling``: every setting trains the same model on the same text."""

from __future__ import annotations

import pytest
import torch

from fusedops.bench import scaling
from fusedops.cli.bench import small_models as scaling_command
from fusedops.terminal.files import UserError
from fusedops.testing import threads

WORK = scaling.ScalingWork("gpt2", 128, 4, 96, 8, 16)


def _losses(setting: scaling.ScalingSetting) -> list[float]:
    step = scaling._step_of(setting, WORK)
    return [step() for _ in range(2)]


def test_settings_differ_in_speed_alone() -> None:
    """The first losses are those of one process, and the second ones are smaller."""
    expected = torch.tensor(_losses(scaling.SETTINGS[scaling.FIRST]))
    assert expected[1] < expected[0]
    for setting in scaling.SETTINGS.values():
        if setting.parallel:
            found = threads.run(lambda rank, s=setting: _losses(s), setting.processes)
            for losses in found:
                torch.testing.assert_close(torch.tensor(losses), expected, msg=setting.name)


def test_names_that_hold_commas_are_found() -> None:
    known = {name.replace(" ", ""): name for name in scaling.SETTINGS}
    assert scaling_command._names("dp2,zero1,tp2", known) == ["dp2,zero1", "tp2"]
    assert scaling_command._names("dp2,tp2,sp", known) == ["dp2", "tp2,sp"]
    assert scaling_command._names("", known) == list(known)
    with pytest.raises(UserError, match="dp3"):
        scaling_command._names("dp3", known)
