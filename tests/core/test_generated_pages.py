"""Generated pages: docs/ops, docs/benchmarks.md with its history, docs/coverage.md."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import coverage_page
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEADER = (
    "op,case,dtype,direction,variant,speedup,speedup_q1,speedup_q3,trusted,limit_share,device,"
    "torch,commit,created\n"
)


def generator(monkeypatch: pytest.MonkeyPatch, *names: str) -> ModuleType:
    """Return the first of some modules of ``docs``; nobody finds them by these names afterwards."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module(names[0])
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return module


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return generator(monkeypatch, "gen_benchmarks", "benchmark_history", "blocks")


def rows(*lines: str) -> str:
    return HEADER + "".join(f"{line},cpu-x,2.13.0,abc,2026-11-01T10:00:00\n" for line in lines)


def test_a_record_gives_the_headline_row_of_ours_with_that_of_compile(page: ModuleType) -> None:
    text = rows(
        "gelu,8x8,float32,both,eager,1,1,1,True,0.4",
        "gelu,8x8,float32,both,compile,1.5,1.4,1.6,True,0.6",
        "gelu,8x8,float32,both,fusedops,2.00049,1.9,2.1,True,0.8",
        "gelu,8x8,float32,forward,fusedops,3,3,3,True,0.8",
        "gelu,16x16,float32,both,fusedops,4,4,4,True,0.8",
    )
    (row,) = page.history.parsed("gelu-float32.csv", text, {"gelu": "8x8"})
    assert (row.speedup, row.low, row.high) == ("2.000", "1.900", "2.100")
    assert (row.compiled, row.limit_share, row.commit) == ("1.500", "0.800", "abc")
    forward = rows("gelu,8x8,float32,forward,fusedops,3,3,3,True,0.8")
    (alone,) = page.history.parsed("gelu-float32.csv", forward, {"gelu": "8x8"})
    assert alone.direction == "forward" and "] forward" not in page._line([row])
    assert "(ops/gelu.md) forward | 8x8 | float32 | 3.00 |" in page._line([alone])


def test_disturbed_rows_and_other_files_give_nothing(page: ModuleType) -> None:
    text = rows("gelu,8x8,float32,both,fusedops,2,1.9,2.1,False,0.8")
    assert not list(page.history.parsed("gelu-float32.csv", text, {"gelu": "8x8"}))
    assert not list(page.history.parsed("optimizers.csv", "row,x\n", {"gelu": "8x8"}))
    assert not list(page.history.parsed("demo.json", "{}", {"gelu": "8x8"}))


def test_the_newest_measurement_is_shown_and_earlier_ones_behind_it(page: ModuleType) -> None:
    text = rows("gelu,8x8,float32,both,fusedops,2,1.9,2.1,True,0.8")
    (old,) = page.history.parsed("gelu-float32.csv", text, {"gelu": "8x8"})
    new = replace(old, created="2026-11-02T10:00:00", speedup="2.500")
    merged = page.history.merged([new], [old, new])
    assert merged == [old, new]
    (subject,) = page._subjects(merged, "op")
    line = page._line(subject)
    assert "| 2.50 |" in line and line.endswith("| 2026-11-02, `abc` | 2.00 (11-01) |")
    picture = page._picture("cpu-x", "op", [subject])
    assert picture.count("<circle") == 2 and ">2.50</text>" in picture


def test_the_committed_history_has_every_record(page: ModuleType) -> None:
    headlines = {
        name: next((case.label for case in spec.bench_cases if case.headline), "")
        for name, spec in page.all_specs().items()
    }
    records = set(page.history.current(headlines))
    assert records and records <= set(page.history.read()), "run `make docs` and commit"


@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("llama", "causal", {"attention": "registry", "residual": "", "feed-forward": "code"}),
        ("olmo", "causal", {"attention": "registry", "norm": "code", "feed-forward": "code"}),
        ("gptj", "causal", {"attention": "no", "norm": "table", "feed-forward": "code"}),
        ("falcon", "causal", {"attention": "code", "norm": "table", "feed-forward": "code"}),
        ("mpt", "causal", {"attention": "no"}),  # it returns its weights
        ("bart", "sequence to sequence", {"loss": "code"}),
        ("nemotron_h", "causal", {"norm": "code", "experts": "registry"}),
        ("mt5", "sequence to sequence", {"attention": "registry", "norm": "copy"}),
    ],
)
def test_a_row_says_how_each_rule_is_known(name: str, task: str, expected: dict[str, str]) -> None:
    result = coverage_page.coverage(
        name, coverage_page.small_model(name, coverage_page.TASKS[task][1]), task
    )
    assert {column: result.cell(column) for column in expected} == expected
    row = (
        f"| {name} | " + " | ".join(result.cell(column) for column in coverage_page.COLUMNS) + " |"
    )
    assert row in coverage_page.PAGE.read_text()


@pytest.mark.slow
def test_the_page_of_coverage_is_of_this_code() -> None:
    assert coverage_page.page() == coverage_page.PAGE.read_text()
