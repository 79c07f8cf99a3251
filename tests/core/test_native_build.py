"""The native build: no vector code leaks into the plain path, stale builds are noticed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fresh_process
import native
import pytest
from localize import LocalizeError, localize, weak_symbols

from fusedops._core import extension

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only"),
]

# Both files use the same inline function of the standard library; unless it is localised, the
# linker keeps the copy of whichever object comes first.
SUM = """
#include <numeric>
#include <vector>
extern "C" float NAME(const float* x, long n) {
  std::vector<float> copy(x, x + n);
  for (long i = 0; i < n; ++i) copy.push_back(x[i] * 2.0f);
  return std::accumulate(copy.begin(), copy.end(), 0.0f);
}
"""


def printed_by(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_object(folder: Path, name: str, source: str, *flags: str) -> Path:
    path, output = folder / f"{name}.cpp", folder / f"{name}.o"
    path.write_text(source)
    options = ("-std=c++20", "-O2", "-fPIC", "-fno-inline", *flags)
    printed_by("g++", *options, "-c", path, "-o", output)
    return output


def link(folder: Path, name: str, *objects: Path) -> Path:
    output = folder / f"{name}.so"
    printed_by("g++", "-shared", *objects, "-o", output)
    return output


def weak_code(path: Path) -> dict[str, int]:
    """Return weak function -> size of its code in bytes."""
    rows = printed_by("nm", "--defined-only", "--print-size", path).splitlines()
    columns = (row.split() for row in rows)
    return {row[3]: int(row[1], 16) for row in columns if len(row) == 4 and row[2] == "W"}


def test_localize_keeps_vector_code_out_of_the_plain_path(tmp_path: Path) -> None:
    flags = native.ISA_FLAGS["AVX512"]
    vector = compile_object(tmp_path, "vector", SUM.replace("NAME", "vector_sum"), *flags)
    plain = compile_object(tmp_path, "plain", SUM.replace("NAME", "plain_sum"))
    assert weak_code(plain).keys() & weak_code(vector).keys(), "they must share weak functions"
    safe = tmp_path / "vector.local.o"
    localize(vector, safe, "AVX512")
    assert weak_symbols(safe) == []
    library = link(tmp_path, "safe", safe, plain)
    assert weak_code(library) == weak_code(plain), "the linker took the plain copies"


def test_kernels_of_avx2_copy_a_vector_by_one_register(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.knows_wide_copies():
        pytest.skip("the compiler has no such options")
    monkeypatch.setenv("FUSEDOPS_ISAS", "all")
    edges = native.edges_of("cpu", native.build_folder())
    avx2 = [edge for edge in edges if ".AVX2." in edge.output and edge.rule == "cxx"]
    assert avx2 and all(set(native.WIDE_COPIES) <= set(edge.flags) for edge in avx2)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('#include <cstdlib>\nint setting = std::atoi(std::getenv("HOME"));', "static initialiser"),
        (
            "namespace fusedops { inline int calls = 0; int count() { return ++calls; } }",
            "once per instruction set",
        ),
    ],
)
def test_localize_refuses_what_must_exist_once(tmp_path: Path, source: str, says: str) -> None:
    path = compile_object(tmp_path, "refused", source + "\n", "-mavx2", "-fno-gnu-unique")
    with pytest.raises(LocalizeError, match=says):
        localize(path, tmp_path / "out.o", "AVX2")


def test_objects_of_the_library_export_no_weak_symbol() -> None:
    objects = sorted(native.build_folder().glob("cpu/*.local.o"))
    if not objects:
        pytest.skip("the library was not built in this checkout")
    assert [path.name for path in objects if weak_symbols(path)] == []


def test_one_openmp_runtime_in_the_process() -> None:
    if not native.library_path("cpu").exists():
        pytest.skip("the library was not built in this checkout")
    code = (
        "import torch\n"
        f"torch.ops.load_library({str(native.library_path('cpu'))!r})\n"
        "maps = [line.split() for line in open('/proc/self/maps')]\n"
        "print(*{m[-1] for m in maps if 'libgomp' in m[-1] or 'libomp' in m[-1]}, sep='\\n')\n"
    )
    printed = fresh_process.run(code, check=True).stdout
    assert len(printed.split()) == 1, printed


def test_stamp_changes_with_sources_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CSRC", tmp_path)
    (tmp_path / "a.cpp").write_text("int a;")
    first = native.stamp("cpu")
    assert native.stamp("cpu") == first
    (tmp_path / "a.cpp").write_text("int b;")
    second = native.stamp("cpu")
    assert second["sources"] != first["sources"]
    monkeypatch.setattr(native, "find_torch", lambda: native.Torch("9.9", None, tmp_path))
    assert native.stamp("cpu")["torch"] == "9.9"


def test_a_header_is_known_by_what_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vectors.h").write_text("#include <vector>")
    one, two = (tmp_path / folder / "vectors.h" for folder in ("one", "two"))
    first = native.header_digest(one, ["-mavx2"])
    assert native.header_digest(two, ["-mavx2"]) == first, "of the same text in another checkout"
    assert native.header_digest(one, ["-mfma"]) != first
    monkeypatch.setattr(native, "_compiler_version", lambda: "g++ of another version")
    assert native.header_digest(one, ["-mavx2"]) != first
    monkeypatch.undo()
    two.write_text("#include <string>")
    assert native.header_digest(two, ["-mavx2"]) != first


def small_project(folder: Path) -> Path:
    """Lay out a project whose only native sources are functions of the standard library."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(native.ROOT / name, folder)
    shutil.copytree(native.ROOT / "tools", folder / "tools")
    sources = {
        "README.md": "fusedops\n",
        "csrc/one.cpp": "#include <cmath>\nint one() { return 1; }\n",
        "csrc/cpu/numbers/two.isa.cpp": "#include <cmath>\nnamespace CPU_CAPABILITY {"
        " int two() { return 2; } double exponential(double x) { return std::exp(x); } }\n",
        "fusedops/__init__.py": "",
    }
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return folder


IN_PLACE = ("build_ext", "--inplace")


def run_setup(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


def test_build_ext_in_place_then_nothing_to_do(tmp_path: Path) -> None:
    folder = small_project(tmp_path)
    first = run_setup(folder, *IN_PLACE)
    assert first.returncode == 0, first.stderr
    library = folder / "fusedops" / "lib" / "libfusedops_cpu.so"
    everything = printed_by("nm", library)
    assert "_Z3onev" not in printed_by("nm", "-D", "--defined-only", library), "not exported"
    for isa in native.isa_variants():
        assert f"_ZN{len(isa)}{isa}3twoEv" in everything
    written = library.stat().st_mtime_ns
    assert run_setup(folder, *IN_PLACE).returncode == 0
    assert library.stat().st_mtime_ns == written


# The assembler of binutils 2.35, as far as tiles are concerned.
OLD_ASSEMBLER = """#!/bin/sh
for source; do :; done
if grep -Eq 'tdpbf16ps|tile(zero|release|loadd|stored)|ldtilecfg' "$source"; then
  echo "Error: no such instruction" >&2
  exit 1
fi
exec /usr/bin/as "$@"
"""


@pytest.mark.parametrize("knows_tiles", [True, False])
def test_an_assembler_without_tiles_leaves_them_out(tmp_path: Path, knows_tiles: bool) -> None:
    folder = small_project(tmp_path)
    (folder / "csrc" / "cpu" / "numbers" / "two.isa.cpp").write_text(
        "#if !defined(FUSEDOPS_WITHOUT_TILES)\n"
        'void release() { asm volatile("tilerelease"); }\n'
        "#endif\n"
    )
    compiler = "g++"
    if not knows_tiles:
        assembler = tmp_path / "bin" / "as"
        assembler.parent.mkdir()
        assembler.write_text(OLD_ASSEMBLER)
        assembler.chmod(0o755)
        compiler = str(tmp_path / "bin" / "old-g++")
        Path(compiler).write_text(f'#!/bin/sh\nexec g++ -B{assembler.parent}/ "$@"\n')
        Path(compiler).chmod(0o755)
    done = run_setup(folder, *IN_PLACE, CXX=compiler, FUSEDOPS_ISAS="AVX512")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "without AMX tiles" in line]
    assert len(told) == (0 if knows_tiles else 1)
    library = folder / "fusedops" / "lib" / "libfusedops_cpu.so"
    assert ("tilerelease" in printed_by("objdump", "-d", library)) == knows_tiles


@pytest.mark.parametrize(
    ("compiler", "source", "message"),
    [
        ("no-such-compiler", "int one() { return 1; }", "cannot be compiled.*TORCHES=none"),
        ("g++", "int one() { return 1 }", "fusedops: compiling .* failed"),
    ],
)
def test_a_wheel_is_not_made_without_its_kernels(
    tmp_path: Path, compiler: str, source: str, message: str
) -> None:
    folder = small_project(tmp_path)
    (folder / "csrc" / "one.cpp").write_text(f"{source}\n")
    for words in (["bdist_wheel"], IN_PLACE):
        done = run_setup(folder, *words, CXX=compiler)
        assert done.returncode == 1 and not list(folder.glob("dist/*"))
        assert re.search(message, done.stderr, re.DOTALL) and "Traceback" not in done.stderr


def test_a_build_without_the_headers_of_python_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(native, "is_current", lambda name: True)
    assert not any("host" in path.name for path in native.build())
    assert "apt install python3-dev" in capsys.readouterr().err
    (tmp_path / "Python.h").touch()
    assert any("host" in path.name for path in native.build())
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_an_editable_build_without_a_compiler_runs_the_reference(tmp_path: Path) -> None:
    folder = small_project(tmp_path)
    done = run_setup(folder, *IN_PLACE, CXX="no-such-compiler", FUSEDOPS_TORCHES="none")
    assert done.returncode == 0 and not (folder / "fusedops" / "lib").exists()


def test_a_library_of_other_sources_is_told(tmp_path: Path) -> None:
    library = tmp_path / "libfusedops_cpu.so"
    library.touch()
    current = native.sources_digest()
    told = [
        extension._is_stale(library, {"sources": sources})
        for built in (0, time.time() + 60)
        for sources in ("other", current)
        if os.utime(library, (built, built)) is None
    ]
    assert told == [True, False, False, False]
    assert not extension._is_stale(library, {})
