"""Efficiencies of a device from measured steps: Levenberg-Marquardt on the logarithms of times.

Each constant is fitted as a logarithm, so that it stays positive. Errors above ``_LARGE`` count
less than their square: a row whose cause the clock does not know must not move the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fusedops.launch.config_table import InputError
from fusedops.planner.device import SHARES, Device, DeviceEfficiency
from fusedops.planner.shapes import StepShape
from fusedops.planner.step_time import step_time

_STEP = 1e-3  # of a logarithm, for derivatives
_MOST = 0.4  # by which a logarithm may change in one iteration
_LARGE = 0.25
_ITERATIONS = 40
Step = tuple[StepShape, Device, float]


def calibrate(
    steps: Sequence[Step],
    start: DeviceEfficiency,
    *,
    names: Sequence[str] = tuple(DeviceEfficiency.__dataclass_fields__),
    weights: Sequence[float] | None = None,
    report: Callable[[int, float], None] | None = None,
) -> DeviceEfficiency:
    """Return the efficiencies with which the predicted times are nearest to the measured ones.

    Args:
        steps: what ran, on which device, and its measured seconds.
        start: where the search begins; constants that are not in ``names`` keep these values.
        names: the constants that are fitted; those that change no prediction stay.
        weights: of the steps; 1 by default.
        report: is called with the iteration and the root mean square of the errors.

    Raises:
        InputError: there are fewer than two steps.
    """
    if len(steps) < 2:
        raise InputError(f"calibrate: expected at least 2 measured steps, got {len(steps)}")
    scale = torch.tensor(weights or [1.0] * len(steps), dtype=torch.float64)

    def errors(logs: torch.Tensor) -> torch.Tensor:
        usual = _efficiency(start, names, logs)
        values = [
            math.log(step_time(shape, replace(here, efficiency=usual)).seconds / seconds)
            for shape, here, seconds in steps
        ]
        plain = torch.tensor(values, dtype=torch.float64)
        limited = _LARGE + 0.3 * (plain.abs() - _LARGE)
        return scale * plain.sign() * torch.minimum(plain.abs(), limited.clamp(min=_LARGE))

    logs = torch.tensor([math.log(getattr(start, name)) for name in names], dtype=torch.float64)
    current, damping = errors(logs), 1e-2
    for iteration in range(_ITERATIONS):
        columns = [
            (errors(logs + unit) - current) / _STEP for unit in _STEP * torch.eye(len(names))
        ]
        jacobian = torch.stack(columns, 1)
        curvature, slope = jacobian.T @ jacobian, jacobian.T @ current
        before = float(current @ current)
        while damping < 1e6:
            damped = curvature + damping * (curvature.diag() + 1e-4).diag()
            change = torch.linalg.solve(damped, -slope).clamp(-_MOST, _MOST)
            proposed = errors(logs + change)
            if float(proposed @ proposed) < before:
                break
            damping *= 3
        else:
            break
        logs, current, damping = logs + change, proposed, max(damping / 3, 1e-7)
        if report is not None:
            report(iteration, float(current.square().mean().sqrt()))
        if float(current @ current) > before * (1 - 1e-5):
            break
    return _efficiency(start, names, logs)


def _efficiency(
    start: DeviceEfficiency, names: Sequence[str], logs: torch.Tensor
) -> DeviceEfficiency:
    values = dict(zip(names, logs.exp().tolist(), strict=True))
    return replace(start, **{n: min(v, 1.0) if n in SHARES else v for n, v in values.items()})
