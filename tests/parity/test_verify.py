"""``verify`` passes right parallel code, and finds a bug of each kind in code that is not."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_parallel

from fusedops import parity

TOKENS = tuple(name for name in parity.WORKLOADS if name != "documents")
MODELS = {"plain": tiny_parallel.plain, "dropout": tiny_parallel.with_dropout}

# A bug, and a mesh and options with which it shows.
BUGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "bias per rank": ({"tp": 2}, {}),
    "copy": ({"tp": 2}, {}),
    "norms": ({"tp": 2}, {"sp": True}),
    "shared heads": ({"tp": 4}, {}),
    "dropout per rank": ({"tp": 2}, {"sp": True}),
    "read early": ({"tp": 2}, {}),
    "keys not reduced": ({"cp": 2}, {}),
    "positions": ({"cp": 2}, {}),
    "no sum over cp": ({"cp": 2}, {}),
    "no sum over dp": ({"dp": 2}, {}),
    "mean of means": ({"dp": 2}, {}),
    "stale recompute": ({"dp": 2}, {"recompute": True}),
    "overwritten": ({"dp": 2}, {"microbatches": 2}),
    "loss scale": ({"dp": 2}, {"zero": True}),
    "norm per rank": ({"tp": 2}, {}),
    "buffer reused": ({"dp": 2}, {"offload": True}),
}


def test_right_code_passes() -> None:
    report = parity.verify(
        MODELS,
        [{"tp": 2}, {"dp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}],
        parallelize=tiny_parallel.parallelize,
        options={"sp": [False, True], "zero": [False, True]},
        workloads=TOKENS,
        cases=8,
    )
    assert report, report
    assert len(report.passed) + len(report.refused) == 8


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_its_script_runs(bug: str, tmp_path: Path) -> None:
    mesh, options = BUGS[bug]
    with pytest.raises(parity.ParityError, match="should be") as caught:
        parity.verify(
            MODELS,
            [{"dp": 2, **mesh}, mesh],
            parallelize=functools.partial(tiny_parallel.parallelize, bug=bug),
            options={name: [value] for name, value in options.items()},
            workloads=TOKENS,
            cases=8,
        )
    script = tmp_path / "again.py"
    script.write_text(str(caught.value).partition("\n\n")[2])
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "ParityError" in ran.stderr and "should be" in ran.stderr
