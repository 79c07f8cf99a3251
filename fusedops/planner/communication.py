"""Seconds of collectives by size: continuous, piecewise linear curves through measurements.

A collective has three regimes and sometimes more: a latency that hardly depends on the size, a
middle where the library changes its protocol, and the bandwidth of the links. ``fit_curve`` finds
where they meet.
``fusedops bench communication`` measures; its JSON is what ``CommunicationModel.load`` reads.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops._core import checks
from fusedops.launch.config_table import InputError

# Regimes of any collective; more where there are enough sizes for each.
USUAL_REGIMES, _SIZES_OF_REGIME = 3, 2
# Fewest regimes are taken whose mean error is below this.
_GOOD = 0.005
# Places of a knee between two measured sizes, in equal steps of the logarithm.
_PLACES = 4
# Errors above this count by their absolute value: one disturbed measurement moves no curve.
_ROBUST = 0.02
_ROUNDS = 6
_REFINEMENTS = 6
_OP = "fit_curve"


@dataclass(frozen=True)
class CommunicationCurve:
    """The seconds of a collective by its bytes.

    Attributes:
        latency: seconds of a collective of no bytes.
        slopes: seconds per byte of each regime, the one of the smallest sizes first.
        knees: bytes at which a regime ends and the next begins; one less than ``slopes``.

    Raises:
        ValueError: a number is negative, the knees do not ascend, or there are not as many.
    """

    latency: float
    slopes: tuple[float, ...]
    knees: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.knees) != len(self.slopes) - 1:
            checks.fail(_OP, "knees", f"{len(self.slopes) - 1} of them", len(self.knees))
        if list(self.knees) != sorted(self.knees):
            checks.fail(_OP, "knees", "ascending numbers", self.knees)
        for number in (self.latency, *self.slopes, *self.knees):
            if not 0 <= number < math.inf:
                checks.fail(_OP, "curve", "numbers from 0 on", number)

    def seconds(self, size: float) -> float:
        """Return the seconds of a collective of ``size`` bytes."""
        total, begin = self.latency, 0.0
        for slope, end in zip(self.slopes, (*self.knees, math.inf), strict=True):
            if size <= begin:
                break
            total += slope * (min(size, end) - begin)
            begin = end
        return total

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the last regime; infinite where time does not grow."""
        return 1 / self.slopes[-1] if self.slopes[-1] else math.inf


def fit_curve(sizes: Sequence[float], seconds: Sequence[float]) -> CommunicationCurve:
    """Return the curve through measured times, by their errors as logarithms.

    Of one, two and three regimes, and of more where there are two sizes for each, the fewest are
    taken whose mean error is below half a percent, or else those of the smallest error. Knees lie
    anywhere from the second smallest size to the second largest. A single disturbed measurement
    does not move the curve.

    Args:
        sizes: bytes of each measurement, in any order; several may have the same.
        seconds: of each.

    Raises:
        InputError: there are none, or a number is not positive.

    Example:
        >>> curve = fit_curve([1e3, 1e6, 2e6, 4e6], [1e-5, 1e-4, 2e-4, 4e-4])
        >>> round(curve.seconds(3e6), 6)
        0.0003
    """
    if not sizes or len(sizes) != len(seconds):
        raise InputError(f"a curve needs as many times as sizes, got {len(seconds)}, {len(sizes)}")
    for number in (*sizes, *seconds):
        if not 0 < number < math.inf:
            raise InputError(f"bytes and seconds of a collective must be positive, got {number}")
    x = torch.tensor(sizes, dtype=torch.float64)
    t = torch.tensor(seconds, dtype=torch.float64)
    distinct = sorted(set(sizes))
    best, least = _plain(x, t), math.inf
    knees: tuple[float, ...] = ()
    places = _knees(distinct)
    for regimes in range(1, max(USUAL_REGIMES, len(distinct) // _SIZES_OF_REGIME) + 1):
        if regimes <= USUAL_REGIMES:
            curve = _fit(x, t, list(itertools.combinations(places, regimes - 1)))
        else:  # all combinations would be too many
            curve = _fit(x, t, _with_one_more(knees, places))
            for index in range(regimes - 1):
                if curve is not None:
                    others = (*curve.knees[:index], *curve.knees[index + 1 :])
                    curve = _fit(x, t, _with_one_more(others, places)) or curve
        curve = _refined(x, t, curve)
        if curve is None:
            continue
        knees = curve.knees
        error = mean_error(curve, sizes, seconds)
        if error < least:
            best, least = curve, error
        if least < _GOOD:
            break
    return best


def mean_error(curve: CommunicationCurve, sizes: Iterable[float], times: Iterable[float]) -> float:
    """Return the mean of the absolute errors of a curve, as logarithms."""
    pairs = zip(sizes, times, strict=True)
    return statistics.fmean(abs(math.log(curve.seconds(x) / t)) for x, t in pairs)


def _knees(sizes: Sequence[float]) -> list[float]:
    if len(sizes) < 3:
        return []
    inner = [
        low * (high / low) ** (place / _PLACES)
        for low, high in itertools.pairwise(sizes[1:-1])
        for place in range(_PLACES)
    ]
    return [*inner, sizes[-2]]


def _with_one_more(knees: Sequence[float], places: Sequence[float]) -> list[tuple[float, ...]]:
    return [tuple(sorted((*knees, place))) for place in places if place not in knees]


def _refined(
    x: torch.Tensor, t: torch.Tensor, curve: CommunicationCurve | None
) -> CommunicationCurve | None:
    """Return the curve with its knees moved, by less and less, to where the error is least."""
    if curve is None or not curve.knees:
        return curve
    least, largest = float(x.min()), float(x.max())
    step = (largest / least) ** (1 / max(len(x) - 1, 1) / _PLACES)
    for _ in range(_REFINEMENTS):
        # Two knees move together, more of them one at a time: combinations would be too many.
        factors = (step**-0.5, 1.0, step**0.5)
        if len(curve.knees) < USUAL_REGIMES:
            moves = list(itertools.product(factors, repeat=len(curve.knees)))
        else:
            ones = [1.0] * len(curve.knees)
            moves = [
                (*ones[:index], factor, *ones[index + 1 :])
                for index in range(len(ones))
                for factor in factors
            ]
        moved = [
            tuple(knee * factor for knee, factor in zip(curve.knees, move, strict=True))
            for move in moves
        ]
        inside = [knees for knees in moved if least < knees[0] and knees[-1] < largest]
        curve = _fit(x, t, [knees for knees in inside if sorted(knees) == list(knees)]) or curve
        step = step**0.5
    return curve


def _fit(
    x: torch.Tensor, t: torch.Tensor, knees: list[tuple[float, ...]]
) -> CommunicationCurve | None:
    """Return the best curve with one of these knees whose time never falls; ``None``: none."""
    if not knees:
        return None
    places = torch.tensor(knees, dtype=torch.float64)
    bends = (x[None, :, None] - places[:, None, :]).clamp(min=0)
    columns = [torch.ones_like(x), x]
    basis = torch.cat([torch.stack(columns, 1).expand(len(knees), -1, -1), bends], 2)
    scaled = basis / t[None, :, None]
    # Columns of one size: bytes, and seconds of no bytes, are of very different magnitudes.
    norm = scaled.norm(dim=1, keepdim=True).clamp(min=1e-300)
    scaled = scaled / norm
    weights = torch.ones(len(knees), len(x), 1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        solved = torch.linalg.lstsq(weights * scaled, weights, driver="gelsd").solution
        errors = (scaled @ solved - 1).abs()
        weights = (_ROBUST / errors.clamp(min=_ROBUST)).sqrt()
    solved = (solved / norm.transpose(1, 2)).squeeze(2)
    slopes = solved[:, 1:].cumsum(1)
    rises = (solved[:, 0] >= 0) & (slopes >= 0).all(1)
    robust = torch.where(errors < _ROBUST, errors.square() / (2 * _ROBUST), errors - _ROBUST / 2)
    cost = robust.sum((1, 2)).where(rises, math.inf)
    chosen = int(cost.argmin())
    if not rises[chosen]:
        return None
    latency = float(solved[chosen, 0])
    return CommunicationCurve(latency, tuple(slopes[chosen].tolist()), knees[chosen])


def _plain(x: torch.Tensor, t: torch.Tensor) -> CommunicationCurve:
    """Return a curve that always exists: a constant, or a line through zero, the nearer one."""
    curves = (
        CommunicationCurve(float(t.median()), (0.0,)),
        CommunicationCurve(0.0, (float((t / x).median()),)),
    )
    return min(curves, key=lambda curve: mean_error(curve, x.tolist(), t.tolist()))


@dataclass(frozen=True)
class CommunicationModel:
    """The curves of a machine or a cluster.

    Attributes:
        curves: by what was measured, such as ``("all_reduce", "gloo", "2")``.
    """

    curves: dict[tuple[str, ...], CommunicationCurve]

    @classmethod
    def fit(cls, rows: Iterable[tuple[tuple[str, ...], float, float]]) -> CommunicationModel:
        """Return the curves of rows of key, bytes and seconds."""
        groups: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
        for key, size, seconds in rows:
            sizes, times = groups.setdefault(key, ([], []))
            sizes.append(size)
            times.append(seconds)
        return cls({key: fit_curve(*group) for key, group in groups.items()})

    @classmethod
    def load(cls, path: str | Path) -> CommunicationModel:
        """Read the curves of a JSON file of ``fusedops bench communication``.

        Keys are collective, backend and number of ranks.

        Raises:
            InputError: it cannot be read, or is no such file.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            curves: dict[tuple[str, ...], CommunicationCurve] = {}
            for row in record["curves"]:
                key = (row["collective"], row["backend"], str(row["ranks"]))
                slopes, knees = tuple(row["slopes"]), tuple(row["knees"])
                curves[key] = CommunicationCurve(float(row["latency"]), slopes, knees)
            return cls(curves)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{path} is no file of fusedops bench communication --json") from None
