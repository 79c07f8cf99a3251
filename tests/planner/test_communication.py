"""Curves of collectives: what they go through, what disturbs them, and the files they come from."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from fusedops.bench.tables import csv_text, load_rows
from fusedops.cli.bench.communication import _fit
from fusedops.launch.config_table import InputError
from fusedops.planner.communication import (
    CommunicationCurve,
    CommunicationModel,
    fit_curve,
    mean_error,
)
from fusedops.terminal.files import UserError

SIZES = [2.0**power for power in range(10, 30)]
CURVES = {
    "one regime": CommunicationCurve(2e-5, (1e-10,)),
    "two": CommunicationCurve(1e-5, (1e-9, 1e-10), (3e5,)),
    "three": CommunicationCurve(1.5e-5, (1e-12, 8e-10, 5e-11), (4e4, 5e6)),
    "no latency": CommunicationCurve(0.0, (1e-10,)),
}


def fitted(curve: CommunicationCurve, sizes: list[float]) -> CommunicationCurve:
    return fit_curve(sizes, [curve.seconds(size) for size in sizes])


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_every_other_size_predicts_the_rest(curve: CommunicationCurve) -> None:
    model = fitted(curve, SIZES[::2])
    worst = max(abs(math.log(model.seconds(x) / curve.seconds(x))) for x in SIZES[1:-1:2])
    assert worst < 0.03


def test_a_curve_is_continuous_and_never_falls() -> None:
    curve = CURVES["three"]
    assert curve.seconds(0) == curve.latency
    for knee in curve.knees:
        assert curve.seconds(knee * (1 + 1e-9)) == pytest.approx(curve.seconds(knee), rel=1e-6)
    assert curve.bandwidth == pytest.approx(2e10)
    assert curve.seconds(2e9) - curve.seconds(1e9) == pytest.approx(1e9 * 5e-11)


def test_one_disturbed_measurement_moves_nothing() -> None:
    curve = CURVES["two"]
    times = [curve.seconds(size) for size in SIZES]
    times[1] *= 4
    assert abs(math.log(fit_curve(SIZES, times).seconds(SIZES[2]) / times[2])) < 0.02


def test_noise_of_some_percent_stays_noise() -> None:
    noise = random.Random(3)
    for name, curve in CURVES.items():
        times = [curve.seconds(size) * math.exp(noise.gauss(0, 0.03)) for size in SIZES]
        error = mean_error(fit_curve(SIZES, times), SIZES, [curve.seconds(x) for x in SIZES])
        assert error < 0.03, name


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_sizes_are_enough(count: int) -> None:
    curve = fitted(CURVES["one regime"], SIZES[-count:])
    wanted = CURVES["one regime"].seconds(SIZES[-1])
    assert curve.seconds(SIZES[-1]) == pytest.approx(wanted, rel=1e-3)


def test_falling_times_become_a_constant() -> None:
    curve = fit_curve([1e3, 2e3, 4e3], [3e-5, 2e-5, 1e-5])
    assert all(slope >= 0 for slope in curve.slopes) and curve.seconds(1e3) > 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([], []), ([1.0], []), ([0.0], [1.0]), ([1.0], [math.nan])]
)
def test_impossible_measurements_are_refused(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(InputError):
        fit_curve(sizes, seconds)


@pytest.mark.parametrize(
    "arguments", [(-1.0, (1.0,)), (0.0, (1.0, 2.0)), (0.0, (1.0, 2.0, 3.0), (2.0, 1.0))]
)
def test_impossible_curves_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="must be"):
        CommunicationCurve(*arguments)


def test_a_model_is_read_from_the_json_of_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    curve = {"collective": "all_reduce", "backend": "gloo", "ranks": 2, "latency": 1e-5}
    path.write_text(json.dumps({"curves": [curve | {"slopes": [1e-9], "knees": []}]}))
    model = CommunicationModel.load(path)
    assert model.curves["all_reduce", "gloo", "2"].seconds(1e4) == pytest.approx(2e-5)
    for text in ("{", "[]", '{"curves": [{}]}'):
        path.write_text(text)
        with pytest.raises(InputError, match="links.json"):
            CommunicationModel.load(path)


def test_the_command_predicts_the_rows_of_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = CURVES["two"]
    rows = [
        {"gpu": gpu, "op": "sum", "bytes": size, "time_us": factor * 1e6 * curve.seconds(size)}
        for gpu, factor in (("A", 1), ("B", 3))
        for size in SIZES
    ]
    odd, even, out = (tmp_path / name for name in ("odd.csv", "even.csv", "out.csv"))
    odd.write_text(csv_text(rows[1::2], rows[0]))
    even.write_text(csv_text(rows[::2], rows[0]))
    _fit(odd, even, out)
    predicted = load_rows(out)
    assert [row["bytes"] for row in predicted] == [str(row["bytes"]) for row in rows[::2]]
    for row in predicted:
        assert float(row["predicted_us"]) == pytest.approx(float(row["time_us"]), rel=0.03)
    assert "20 measured rows: median error" in capsys.readouterr().out

    even.write_text("gpu,op,bytes\nC,sum,4\n")
    _fit(odd, even, out)
    assert "no row that was fitted has these gpu, op" in out.read_text()


def test_the_command_refuses_a_row_without_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,bytes,time_us\nall_reduce,4,soon\n")
    with pytest.raises(UserError, match="time_us = 'soon'"):
        _fit(path, None, None)
