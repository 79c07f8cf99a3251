"""``fusedops bench compare``: what it calls slower, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusedops.bench.compare import compare, parse_share
from fusedops.bench.results import BenchRecord, BenchRow, load_json, save_json, save_results, to_csv
from fusedops.cli.main import app
from fusedops.terminal.files import UserError


def row(variant: str = "fusedops", median: float = 100.0, **changes: Any) -> BenchRow:
    spread = changes.pop("spread", 0.01)
    base = BenchRow(
        op="gelu",
        case="16x16",
        dtype="float32",
        direction="forward",
        variant=variant,
        backend="cpp",
        allocator="tuned",
        speedup=2.0,
        speedup_q1=1.9,
        speedup_q3=2.1,
        median_us=median,
        q1_us=median * (1 - spread),
        q3_us=median * (1 + spread),
        samples=20,
        discarded=1,
        trusted=True,
        gb_per_s=10.0,
        tflop_per_s=None,
        limit_share=0.5,
        in_cache=False,
        host_us=None,
        peak_bytes=1024,
        error_max_ulps=0.5,
        error_mean_ulps=0.25,
    )
    return replace(base, **changes)


def record(*rows: BenchRow, **machine: Any) -> BenchRecord:
    here = {"slug": "cpu-zen5", "device": "cpu", "name": "AMD EPYC", "threads": 2} | machine
    return BenchRecord(
        machine=here,
        versions={"torch": "2.13.0"},
        git={"commit": "0123456789abcdef", "changed": True},
        settings={"allocator": "tuned"},
        limits={"copy": {"rate": 1e10, "way": "copy_", "others": {}}, "matmul": {}},
        rows=rows,
        notes=("a note",),
        created="2026-01-01T00:00:00+00:00",
    )


def run_compare(tmp_path: Path, before: BenchRecord, after: BenchRecord, *options: str) -> Any:
    save_json(tmp_path / "a.json", before)
    save_json(tmp_path / "b.json", after)
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    return CliRunner().invoke(app, ["bench", "compare", *paths, *options])


def test_json_round_trip(tmp_path: Path) -> None:
    before = record(row(), row("eager", host_us=3.25))
    save_json(tmp_path / "a.json", before)
    assert load_json(tmp_path / "a.json") == before


def test_slower_beyond_spread_exits_1_and_is_listed(tmp_path: Path) -> None:
    done = run_compare(tmp_path, record(row(), row("eager")), record(row(median=120), row("eager")))
    assert done.exit_code == 1
    assert "slower: gelu 16x16 float32 forward fusedops: 100.0 -> 120.0 us (+20.0%" in done.output


def test_slower_within_spread_or_allowance_exits_0(tmp_path: Path) -> None:
    within_spread = record(row(median=120, spread=0.3))
    assert run_compare(tmp_path, record(row()), within_spread).exit_code == 0
    slower = record(row(median=120))
    assert run_compare(tmp_path, record(row()), slower, "--fail-if-slower", "25%").exit_code == 0
    assert run_compare(tmp_path, record(row()), slower, "--fail-if-slower", "0.1").exit_code == 1


def test_faster_exits_0_and_is_listed(tmp_path: Path) -> None:
    done = run_compare(tmp_path, record(row()), record(row(median=50)))
    assert done.exit_code == 0 and "faster: gelu" in done.output
    within_spread = record(row(median=80, spread=0.3))
    assert "faster: gelu" not in run_compare(tmp_path, record(row()), within_spread).output


def test_eager_becoming_slower_is_no_failure_but_drift(tmp_path: Path) -> None:
    verdict = compare(record(row("eager")), record(row("eager", median=150)), allowed=0.05)
    assert verdict.slower == () and verdict.drift == pytest.approx(0.5)
    done = run_compare(
        tmp_path, record(row(), row("eager")), record(row(), row("eager", median=150))
    )
    assert done.exit_code == 0 and "+50%" in done.output


def test_disturbed_rows_are_not_judged() -> None:
    verdict = compare(record(row()), record(row(median=500, trusted=False)), allowed=0.05)
    assert verdict.slower == () and len(verdict.doubtful) == 1


def test_missing_rows_are_named(tmp_path: Path) -> None:
    done = run_compare(tmp_path, record(row(), row(case="9x9")), record(row()))
    assert "only in the first record: gelu 9x9 float32 forward fusedops" in done.output


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (record(row(), name="Xeon"), "machine"),
        (record(row(), threads=4), "threads"),
        (replace(record(row()), settings={"allocator": "system"}), "allocator"),
        (record(row(dtype="bfloat16")), "dtype"),
    ],
)
def test_different_conditions_are_refused_unless_told(
    tmp_path: Path, other: BenchRecord, word: str
) -> None:
    done = run_compare(tmp_path, record(row()), other)
    assert done.exit_code == 2
    assert f"differ in {word}" in done.stderr and "--allow-different" in done.stderr
    assert run_compare(tmp_path, record(row()), other, "--allow-different").exit_code == 0


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(UserError, match="no row in common"):
        compare(record(row()), record(row(op="mlp")), allowed=0.05)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_share_is_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["five", "", "-1%", "nan", "inf"])
def test_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fail-if-slower"):
        parse_share(text)


@pytest.mark.parametrize(
    "text", ['{"rows": 1}', "[]", '{"rows": [], "format": 99}', '{"rows": [{}], "format": 1}']
)
def test_json_that_is_no_record_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json "):
        load_json(tmp_path / "a.json")


def test_csv_has_versions_in_each_row(tmp_path: Path) -> None:
    import csv
    import io

    table = list(csv.DictReader(io.StringIO(to_csv(record(row())))))
    assert len(table) == 1
    assert table[0]["median_us"] == "100" and table[0]["tflop_per_s"] == ""
    assert table[0]["torch"] == "2.13.0" and table[0]["device"] == "cpu-zen5"
    assert table[0]["commit"] == "0123456789ab+"


def test_results_go_to_one_file_per_op_and_dtype(tmp_path: Path) -> None:
    rows = (row(), row(dtype="bfloat16"), row(op="mlp"))
    written = save_results(tmp_path, record(*rows))
    names = ["gelu-float32.csv", "gelu-bfloat16.csv", "mlp-float32.csv"]
    assert written == [tmp_path / "cpu-zen5" / name for name in names]
    assert all(len(path.read_text().splitlines()) == 2 for path in written)
