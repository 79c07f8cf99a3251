"""The wheels that setup.py builds for others, and the page of what was tried with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import native
import portable
import pytest
import torch
from release import page
from test_native_build import small_project

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


def wheel_of(folder: Path, torches: str) -> Path:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel"],
        cwd=folder,
        env={**os.environ, "FUSEDOPS_TORCHES": torches},
        check=True,
        capture_output=True,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_wheel_without_libraries_fits_every_system(tmp_path: Path) -> None:
    wheel = wheel_of(small_project(tmp_path, host=True), "none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_a_wheel_has_a_library_for_each_torch(tmp_path: Path) -> None:
    folders = []
    for version in ("2.13.0", "2.14.1"):  # of the headers and libraries of the installed one
        folder = tmp_path / version / "torch"
        folder.mkdir(parents=True)
        for path in Path(torch.__file__).parent.glob("*"):
            if path.name in ("include", "lib", "__init__.py"):
                (folder / path.name).symlink_to(path)
        (folder / "version.py").write_text(f"__version__ = '{version}+cpu'\ncuda = None\n")
        folders.append(str(folder.parent))
    project = tmp_path / "project"
    project.mkdir()
    wheel = wheel_of(small_project(project, host=True), os.pathsep.join(folders))
    assert "-cp311-abi3-" in wheel.name
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "/lib/" in name}
    assert names == {
        f"fusedops/lib/torch-{minor}/libfusedops_{name}"
        for minor in ("2.13", "2.14")
        for name in ("cpu.so", "cpu.json", "host.abi3.so", "host.abi3.json")
    }
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    for library in (tmp_path / "unpacked").rglob("*.so"):
        table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True).stdout
        used = {word.strip("()") for word in table.split() if word.startswith("(GLIBC_")}
        newest = max(tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in used)
        assert newest <= portable.LIMITS["GLIBC"], library
    objects = sorted((project / "build").rglob("two.isa.cpp.*.o"))
    assert len({path.parts[-4] for path in objects}) == 1, "kernels are compiled for one torch"
