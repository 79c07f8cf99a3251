"""docs/coverage.md says what ``patch`` does to each model type."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("coverage_page", ROOT / "tools" / "coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("llama", "causal", {"attention": "table", "norm": "table", "feed-forward": "table"}),
        ("olmo", "causal", {"attention": "registry", "norm": "code", "feed-forward": "copy"}),
        ("gptj", "causal", {"attention": "no", "norm": "table", "feed-forward": "code"}),
        ("falcon", "causal", {"attention": "code", "norm": "table", "feed-forward": "code"}),
        ("mt5", "sequence to sequence", {"attention": "copy", "norm": "copy"}),
    ],
)
def test_a_row_says_how_each_rule_is_known(
    tool: Any, name: str, task: str, expected: dict[str, str]
) -> None:
    result = tool.coverage(name, tool.small_model(name, tool.TASKS[task][1]))
    assert {column: result.cell(column) for column in expected} == expected
    row = f"| {name} | " + " | ".join(result.cell(column) for column in tool.COLUMNS) + " |"
    assert row in tool.PAGE.read_text()


@pytest.mark.slow
def test_the_page_is_of_this_code(tool: Any) -> None:
    assert tool.page() == tool.PAGE.read_text()
