"""``fusedops bench compare``: what it calls slower, and what it refuses."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_records import invoke, record, row

from fusedops.bench.compare import compare, parse_share
from fusedops.bench.results import BenchRecord, load_json, save_csv, save_json, save_parts, to_csv
from fusedops.terminal.files import UserError


def run_compare(tmp_path: Path, before: BenchRecord, after: BenchRecord, *options: str) -> Any:
    save_json(tmp_path / "a.json", before)
    save_json(tmp_path / "b.json", after)
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    return invoke("bench", "compare", *paths, *options)


def test_json_round_trip(tmp_path: Path) -> None:
    before = record(row(), row("eager", host_us=3.25))
    save_json(tmp_path / "a.json", before)
    assert load_json(tmp_path / "a.json") == before


SLOWER = "slower: gelu 16x16 float32 forward fusedops: 100.0 -> 120.0 us (+20.0%"
NONE = "no row became slower"
MISSING = "only in the first record: gelu 9x9 float32 forward fusedops"
DOUBTFUL = "not judged, disturbed while measured: gelu"
EAGER = row("eager")
# Rows before and after, options, the exit code, and what is printed.
VERDICTS: dict[str, tuple[list[Any], list[Any], tuple[str, ...], int, str]] = {
    "slower": ([row(), EAGER], [row(median=120), EAGER], (), 1, SLOWER),
    "within the spread": ([row()], [row(median=120, spread=0.3)], (), 0, NONE),
    "allowed": ([row()], [row(median=120)], ("--fail-if-slower", "25%"), 0, NONE),
    "not allowed": ([row()], [row(median=120)], ("--fail-if-slower", "0.1"), 1, SLOWER),
    "faster": ([row()], [row(median=50)], (), 0, "faster: gelu"),
    "eager alone": ([row(), EAGER], [row(), row("eager", median=150)], (), 0, "+50%"),
    "disturbed": ([row()], [row(median=500, trusted=False)], (), 0, DOUBTFUL),
    "missing": ([row(), row(case="9x9")], [row()], (), 0, MISSING),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_slower_fails_and_is_listed(name: str, tmp_path: Path) -> None:
    before, after, options, code, printed = VERDICTS[name]
    done = run_compare(tmp_path, record(*before), record(*after), *options)
    assert done.exit_code == code and printed in done.output


def test_faster_within_the_spread_is_not_listed(tmp_path: Path) -> None:
    within_spread = record(row(median=80, spread=0.3))
    assert "faster: gelu" not in run_compare(tmp_path, record(row()), within_spread).output


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
    table = list(csv.DictReader(io.StringIO(to_csv(record(row())))))
    assert len(table) == 1
    assert table[0]["median_us"] == "100" and table[0]["tflop_per_s"] == ""
    assert table[0]["torch"] == "2.13.0" and table[0]["device"] == "cpu-zen5"
    assert table[0]["commit"] == "0123456789ab+"


def test_results_go_to_one_file_per_op_and_dtype(tmp_path: Path) -> None:
    rows = (row(), row(dtype="bfloat16"), row(op="mlp"))
    written = save_parts(tmp_path, record(*rows), "{}-{}.csv", save_csv)
    names = ["gelu-float32.csv", "gelu-bfloat16.csv", "mlp-float32.csv"]
    assert written == [tmp_path / "cpu-zen5" / name for name in names]
    assert all(len(path.read_text().splitlines()) == 2 for path in written)
