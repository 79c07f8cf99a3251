"""The table of slow tests: read from JUnit files, summed by folder, the slowest first."""

from __future__ import annotations

from pathlib import Path

import durations


def test_durations_are_summed_by_folder_and_sorted(tmp_path: Path) -> None:
    cases = (
        ("tests.ops.test_a", "test_x[1|2]", 1.5),
        ("tests.ops.test_a", "test_y", 0.25),
        ("tests.train.test_b", "test_z", 4.0),
        ("", "tests.train.test_c", 0.0),  # a file that was skipped while it was collected
    )
    rows = "".join(
        f'<testcase classname="{file}" name="{name}" time="{time}"/>' for file, name, time in cases
    )
    path = tmp_path / "tests.xml"
    path.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert durations.tables(durations.read([path])).splitlines() == [
        "| folder | tests | seconds |",
        "|---|---:|---:|",
        "| train | 1 | 4 |",
        "| ops | 2 | 2 |",
        "| all | 3 | 6 |",
        "",
        "| seconds | file | test |",
        "|---:|---|---|",
        "| 4.0 | train/test_b.py | `test_z` |",
        "| 1.5 | ops/test_a.py | `test_x[1\\|2]` |",
        "| 0.2 | ops/test_a.py | `test_y` |",
    ]
