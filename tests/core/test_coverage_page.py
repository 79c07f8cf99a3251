"""docs/coverage.md says what ``patch`` does to each model type."""

from __future__ import annotations

import coverage_page
import pytest


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
def test_the_page_is_of_this_code() -> None:
    assert coverage_page.page() == coverage_page.PAGE.read_text()
