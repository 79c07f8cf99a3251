"""Which library of a wheel is loaded, and what is said where none is: made folders, no build.

Also the page of releases, and what the sdist lists.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import fresh_process
import native
import native_wheel
import portable
import pytest
import torch
from native import BuildError
from release import page

from fusedops._core import env, extension, library_fit

LIBRARY = "libfusedops_cpu.so"
MINOR = native_wheel.minor_version(torch.__version__)


def made(folder: Path, *versions: str) -> Path:
    for version in versions:
        (folder / f"torch-{version}").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("version", "folder"),
    [
        ("2.11.0", "torch-2.11"),
        ("2.13.1+cu130", "torch-2.13"),
        ("2.130.0", "."),
        ("2.13.0a0+gitabc", "."),
        ("2.13.0.dev20261101", "."),
    ],
)
def test_releases_of_a_minor_version_share_a_folder(
    tmp_path: Path, version: str, folder: str
) -> None:
    made(tmp_path, "2.11", "2.13")
    assert library_fit.folder_for(tmp_path, version) == tmp_path / folder


@pytest.mark.parametrize(
    ("built", "version", "fits"),
    [
        ("2.13", "2.13.7", True),
        ("2.13", "2.13.0+cpu", True),
        ("2.13", "2.131.0", False),
        ("2.13", "2.13.0a0+git1", False),
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0+cu130", False),
    ],
)
def test_a_stamp_fits_a_torch(built: str, version: str, fits: bool) -> None:
    assert library_fit.fits_torch(built, version) == fits


SERVED = ("serve torch 2.9 to 2.13, and this is torch 2.99.0", "'torch==2.13.*'")
GLIBC, MUSL = ("glibc", "2.36"), ("", "")


@pytest.mark.parametrize(
    ("versions", "library", "version", "words"),
    [
        (("2.9", "2.11", "2.13"), LIBRARY, "2.99.0", (*SERVED, "the wheel of another release")),
        (("2.13",), LIBRARY, "2.99.0", ("serve torch 2.13, and",)),
        (("2.13",), "libfusedops_cuda.so", "2.13.0", ("have no libfusedops_cuda.so", "Triton")),
    ],
    ids=["several", "one", "cuda"],
)
def test_what_is_missing_is_said_with_what_is_there(
    tmp_path: Path, versions: tuple[str, ...], library: str, version: str, words: tuple[str, ...]
) -> None:
    said = library_fit.why_missing(made(tmp_path, *versions), library, version)
    assert all(each in said for each in words) and "\n" not in said


@pytest.mark.parametrize(
    ("system", "libc", "machine", "said"),
    [
        ("linux", MUSL, "x86_64", "musl"),
        ("linux", GLIBC, "riscv64", "riscv64 processors"),
        ("darwin", MUSL, "arm64", "Darwin"),
        ("linux", GLIBC, "aarch64", "manylinux_2_28_aarch64.whl`"),
    ],
)
def test_a_wheel_without_libraries_says_why_and_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    libc: tuple[str, str],
    machine: str,
    said: str,
) -> None:
    monkeypatch.setattr(library_fit, "_CHECKOUT", False)
    monkeypatch.setattr(library_fit, "HOW_TO_BUILD", library_fit.FROM_SOURCE)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: system.title())
    sentence = library_fit.why_missing(tmp_path / "lib", LIBRARY, "2.13.0")
    assert said in sentence and "pip install --force-reinstall" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("machine", "libc", "said"),
    [
        ("aarch64", GLIBC, "was built for x86_64 processors, and this is aarch64"),
        ("x86_64", MUSL, "another C library (musl?)"),
        ("x86_64", GLIBC, None),
    ],
)
def test_a_library_of_another_system_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, machine: str, libc: tuple[str, str], said: str | None
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    reason = library_fit.wrong_system({"machine": "x86_64"})
    assert (reason is None) if said is None else (reason is not None and said in reason)


IMPORT = """
import sys
import torch
import fusedops
y = fusedops.layer_norm(torch.arange(4.0).reshape(1, 4), (4,))
print(round(y.sum().item(), 4), fusedops.resolve("layer_norm", y, (4,)).backend)
"""


def run_import(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return fresh_process.run(IMPORT, check=True, FUSEDOPS_LIBRARY=str(folder), **variables)


def own_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "fusedops" in line]


def test_the_import_says_in_one_line_that_kernels_are_missing(tmp_path: Path) -> None:
    done = run_import(made(tmp_path, "2.9"))
    assert done.stdout.split() == ["0.0", "torch"]
    (line,) = own_lines(done)
    assert line == done.stderr.splitlines()[0]
    assert (
        line.startswith("fusedops runs without its C++ kernels") and "serve torch 2.9, and" in line
    )
    other_rank = run_import(tmp_path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert own_lines(other_rank) == [], "one process of a machine says it"
    assert own_lines(run_import(tmp_path, FUSEDOPS_DISABLE_NATIVE="1")) == [], "it was asked for"


@pytest.mark.skipif(not extension.library_path(LIBRARY).exists(), reason="no compiled kernels")
def test_the_library_of_the_minor_version_is_loaded(tmp_path: Path) -> None:
    built = extension.library_path(LIBRARY)
    made(tmp_path, "2.9", MINOR)
    folder = tmp_path / f"torch-{MINOR}"
    (folder / LIBRARY).symlink_to(built)
    stamp = json.loads(built.with_suffix(".json").read_text())
    (folder / "libfusedops_cpu.json").write_text(json.dumps({**stamp, "torch": MINOR}))
    assert run_import(tmp_path).stdout.split() == ["0.0", "cpp"]


def test_a_file_that_is_no_library_is_one_line(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_text("no library\n")
    done = run_import(tmp_path)
    assert done.stdout.split() == ["0.0", "torch"]
    (line,) = own_lines(done)
    assert "does not load with torch" in line and "build" in line


@pytest.mark.parametrize("version", ["2.13", "2.13.0a0+git1", "2.13.0.dev1"])
def test_a_wheel_is_not_built_for_what_is_no_release(version: str) -> None:
    with pytest.raises(BuildError, match="is no release"):
        native_wheel.minor_version(version)
    assert native_wheel.minor_version("2.13.1+cu130") == "2.13"


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of Linux")
def test_a_library_linked_with_the_stand_ins_needs_old_versions_only(tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    source.write_text(
        """
        #include <cmath>
        #include <condition_variable>
        #include <cstdio>
        #include <exception>
        #include <memory>
        #include <sys/stat.h>
        extern "C" double compute(double x) {
          struct stat status;
          if (fstat(0, &status) < -1) return 0.0;
          const auto shared = std::make_shared<double>(2.0);
          std::exception_ptr error, copy;
          try {
            throw *shared;
          } catch (...) {
            error = std::current_exception();
          }
          copy = error;
          error = nullptr;
          try {
            std::rethrow_exception(copy);
          } catch (double value) {
            return std::exp(x) + std::pow(value, x);
          }
        }
        """
    )
    flags = portable.stand_ins(tmp_path / "stand-ins", "g++")
    library = tmp_path / "library.so"
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wl,--no-undefined"]
    subprocess.run(["g++", *options, source, "-o", library, *flags], check=True)
    table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True)
    versions = {word.strip("()") for word in table.stdout.split() if word.startswith("(G")}
    assert versions, table.stdout
    for version in versions:
        prefix, _, number = version.partition("_")
        assert tuple(map(int, number.split("."))) <= portable.LIMITS[prefix], version
    code = (
        "import ctypes, math\n"
        f"f = ctypes.CDLL({str(library)!r}).compute\n"
        "f.restype, f.argtypes = ctypes.c_double, [ctypes.c_double]\n"
        "assert f(1.5) == math.exp(1.5) + 2.0**1.5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_link_fails_where_an_old_system_has_no_such_symbol(tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    source.write_text("#include <stdlib.h>\nunsigned f() { return arc4random(); }\n")  # glibc 2.36
    if subprocess.run(["g++", "-c", source, "-o", tmp_path / "a.o"]).returncode:
        pytest.skip("this system has no such symbol either")
    flags = portable.stand_ins(tmp_path / "stand-ins", "g++")
    command = ["g++", "-shared", "-fPIC", source, "-o", tmp_path / "a.so", *flags]
    done = subprocess.run([*command, "-Wl,--no-undefined"], capture_output=True, text=True)
    assert done.returncode and "arc4random" in done.stderr


def test_the_folder_of_a_checkout_is_lib_itself() -> None:
    assert extension.library_path(LIBRARY).parent == env.library_folder()


PASSED = {"asked_torch": "2.13.0", "asked_python": "3.12", "torch": "2.13.0+cu130"}
PASSED |= {"python": "3.12.1", "libc": "glibc 2.36", "doctor": "passed", "kernels": "avx2"}
TIMES = {"torch_s": 1.5, "fusedops_s": 0.07, "op": 1e-6, "model": 2e-6}
LEFT_OUT = {"asked_torch": "2.13.0", "asked_python": "3.14", "left_out": "no such Python\nhere"}


def test_the_page_of_releases_has_a_row_for_each_environment() -> None:
    wheel = {"name": "a.whl", "bytes": 5_000_000, "installed": 9e6, "torches": ["torch-2.13"]}
    text = page.page({"machine": "M", "files": [wheel], "rows": [PASSED | TIMES, LEFT_OUT]})
    assert "| `a.whl` | 5.0 MB | 9.0 MB | 2.13 |" in text
    assert "| 2.13.0+cu130 | 3.12.1 | 2.36 | passed | passed | avx2 | 2.0e-06 |" in text
    assert "| 2.13.0 | 3.14 | | no such Python | | | |" in text
    assert "takes 0.07 s" in text and "@" not in text.replace("fusedops@", "")


def test_the_sdist_lists_files_that_exist() -> None:
    listed = [line.split() for line in (native.ROOT / "MANIFEST.in").read_text().splitlines()]
    paths = [path for words in listed if words[0] in ("include", "graft") for path in words[1:]]
    assert {"csrc", "tools", "tests"} <= set(paths)
    assert [path for path in paths if not list(native.ROOT.glob(path))] == []
