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
from fusedops.planner.device import SHARES, Device, DeviceEfficiency, MeasuredLayer
from fusedops.planner.shapes import StepShape
from fusedops.planner.step_time import step_time

_STEP = 1e-3  # of a logarithm, for derivatives
_MOST = 0.4  # by which a logarithm may change in one iteration
_LARGE = 0.25
_ITERATIONS = 40
_LARGEST_FACTOR = 1.5  # of a measured layer; its inverse is the smallest
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


def measured_layers(steps: Sequence[Step], efficiency: DeviceEfficiency) -> list[MeasuredLayer]:
    """Return what measured steps tell of single layers, beyond the efficiencies.

    Steps whose layers have the same shape are one ``MeasuredLayer``. A step is linear in the time
    of its layers' computation: what of its error no constant explains is put down to that.

    Args:
        steps: what ran, on which device, and its measured seconds; steps with layers of two kinds
            are left out.
        efficiency: the device's.
    """
    groups: dict[tuple[object, ...], list[tuple[StepShape, float]]] = {}
    for shape, device, seconds in steps:
        if len(shape.kinds()) == 1:
            plain = replace(device, efficiency=efficiency, layers=())
            key = (shape.kind, shape.place)
            groups.setdefault(key, []).append((shape, _layer_factor(shape, plain, seconds)))
    layers = []
    for group in groups.values():
        shape = group[0][0]
        sizes = {
            name: getattr(shape, name)
            for name in ("tokens", "hidden", "inner", "heads", "tp") + ("experts", "dtype", "flash")
        }
        mean = math.exp(sum(math.log(factor) for _, factor in group) / len(group))
        layers.append(MeasuredLayer(**sizes, factor=mean, steps=len(group)))
    return sorted(layers, key=lambda layer: (layer.hidden, layer.tp, layer.tokens))


def _layer_factor(shape: StepShape, device: Device, seconds: float) -> float:
    """Return the factor of the layers' computation with which a step takes these seconds."""
    one = MeasuredLayer(
        tokens=shape.tokens,
        hidden=shape.hidden,
        inner=shape.inner,
        heads=shape.heads,
        tp=shape.tp,
        experts=shape.experts,
        dtype=shape.dtype,
        flash=shape.flash,
        factor=_LARGEST_FACTOR,
        steps=10**9,
    )
    least = step_time(shape, device).seconds
    most = step_time(shape, replace(device, layers=(one,))).seconds
    if most <= least:
        return 1.0
    factor = 1 + (_LARGEST_FACTOR - 1) * (seconds - least) / (most - least)
    return min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, factor))


def _efficiency(
    start: DeviceEfficiency, names: Sequence[str], logs: torch.Tensor
) -> DeviceEfficiency:
    values = dict(zip(names, logs.exp().tolist(), strict=True))
    return replace(start, **{n: min(v, 1.0) if n in SHARES else v for n, v in values.items()})
