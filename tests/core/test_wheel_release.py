"""The wheels that setup.py builds for others, and the page of what was tried with them."""

from __future__ import annotations

import native
from release import page

ROOT = native.ROOT
COMMON = {"python": "3.12.1", "torch": "2.13.0+cu130", "libc": "glibc 2.36", "doctor": "passed"}
PASSED = {
    **COMMON,
    "asked_torch": "2.13.0",
    "asked_python": "3.12",
    "kernels": "avx2",
    "torch_s": 1.5,
    "fusedops_s": 0.07,
    "op": 1e-6,
    "model": 2e-6,
}
LEFT_OUT = {"asked_torch": "2.13.0", "asked_python": "3.14", "left_out": "no such Python\nhere"}


def test_the_page_has_a_row_for_each_environment() -> None:
    wheel = {"name": "a.whl", "bytes": 5_000_000, "installed": 9e6, "torches": ["torch-2.13"]}
    text = page.page({"machine": "M", "files": [wheel], "rows": [PASSED, LEFT_OUT]})
    assert "| `a.whl` | 5.0 MB | 9.0 MB | 2.13 |" in text
    assert "| 2.13.0+cu130 | 3.12.1 | 2.36 | passed | passed | avx2 | 2.0e-06 |" in text
    assert "| 2.13.0 | 3.14 | | no such Python | | | |" in text
    assert "takes 0.07 s" in text and "@" not in text.replace("fusedops@", "")


def test_the_sdist_lists_files_that_exist() -> None:
    listed = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    paths = [path for words in listed if words[0] in ("include", "graft") for path in words[1:]]
    assert {"csrc", "tools", "tests"} <= set(paths)
    assert [path for path in paths if not list(ROOT.glob(path))] == []
