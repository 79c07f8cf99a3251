"""``tools/lint_includes.py``: an include of a higher folder of ``csrc`` is reported."""

from __future__ import annotations

from pathlib import Path

import lint_includes


def test_csrc_includes_run_one_way() -> None:
    assert lint_includes.errors(lint_includes.ROOT / "csrc") == []


def test_an_upward_include_and_an_unknown_folder_are_reported(tmp_path: Path) -> None:
    for folder in ("common", "cpu/gemm", "cpu/norm", "other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "common/dtype.h").write_text("#include <cmath>\n")
    (tmp_path / "cpu/gemm/gemm.h").write_text('#include "../../common/dtype.h"\n')
    (tmp_path / "cpu/norm/norm.h").write_text('#include "../gemm/gemm.h"\n#include "missing.h"\n')
    (tmp_path / "other/file.h").write_text("")
    assert lint_includes.errors(tmp_path) == [
        f"{tmp_path}/cpu/norm/norm.h: cpu/norm must not include ../gemm/gemm.h of cpu/gemm",
        f"{tmp_path}/other/file.h: other has no row in tools/lint_includes.py",
    ]
