"""The package of the kernels hub: written from fusedops' sources, loaded from a folder, used.

``make test-kernels-hub`` runs it with a Python in which ``kernels`` is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_package
import pytest

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).with_name("hub_checks.py")
SOURCES = sorted(
    path for name in hub_package.PACKAGES for path in (ROOT / "fusedops" / name).glob("*.py")
)
needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="kernels: make test-kernels-hub"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / hub_package.NAME
    hub_package.write_package(folder)
    return folder


def test_every_source_compiles_and_imports_nothing_of_fusedops(folder: Path) -> None:
    files = sorted((folder / "torch-ext" / hub_package.MODULE).rglob("*.py"))
    assert len(files) == len(SOURCES) + 2  # layers.py, __init__.py
    for path in files:
        text = path.read_text()
        compile(text, path, "exec")
        code = [line for line in text.splitlines() if not line.lstrip().startswith(">>>")]
        assert not any(
            line.split()[:2] in (["import", "fusedops"], ["from", "fusedops"]) for line in code
        ), path
        assert "torch.ops.fusedops." not in text and '"fusedops.kernels' not in text, path


TWO_VERSIONS = """
import importlib.util, sys, torch
for name, folder in (("one", sys.argv[1]), ("two", sys.argv[2])):
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
x = torch.randn(3, 8)
from one._core.library import _NAMESPACE as first
from two._core.library import _NAMESPACE as second
assert first != second and "fusedops" not in sys.modules
for package in ("one", "two"):
    torch.testing.assert_close(sys.modules[package].gelu(x), torch.nn.functional.gelu(x))
"""


def test_two_versions_load_in_one_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_package, "unique_namespace", lambda: "fusedops_kernels_other")
    hub_package.write_package(tmp_path / "other")
    packages = [str(path / "build" / "torch-cpu") for path in (folder, tmp_path / "other")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TWO_VERSIONS, *packages],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_namespace_depends_on_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hub_package.unique_namespace()
    source = tmp_path / "gelu.py"
    source.write_text("changed = True")
    monkeypatch.setattr(hub_package, "_sources", lambda: [source])
    assert before == before.lower() and hub_package.unique_namespace() != before


def test_another_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and is no package of the hub"):
        hub_package.write_package(tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"


def check(name: str, *arguments: object, **variables: str) -> str:
    """Run a check in a process without fusedops on its path, and return what it printed."""
    words = [sys.executable, str(CHECKS), name, *map(str, arguments)]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=CHECKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_native(folder: Path, target: Path) -> Path:
    """Return a copy of the package without the compiled library, as on another system."""
    shutil.copytree(folder, target)
    for path in (target / "build").glob("torch*-cxx11-*"):
        shutil.rmtree(path)
    return target


@needs_kernels
@pytest.mark.slow
def test_ops_on_the_cpu_are_those_of_torch(folder: Path) -> None:
    if not list((folder / "build").glob("torch*-cxx11-*")):
        pytest.skip("the native library is not built")
    printed = check("ops", folder, "cpp")
    assert len(printed.splitlines()) == 11 and "-cxx11-cpu-" in printed


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ops_without_the_compiled_library(folder: Path, tmp_path: Path, backend: str) -> None:
    package = without_native(folder, tmp_path / "package")
    printed = check("ops", package, backend, TRITON_INTERPRET=str(int(backend == "triton")))
    assert len(printed.splitlines()) == 11 and "/torch-cpu/" in printed


@needs_kernels
@pytest.mark.slow
def test_models_of_transformers_compute_the_same_with_the_package(folder: Path) -> None:
    assert len(check("transformers", folder).splitlines()) == 2
    assert check("mlps", folder).split() == ["SwiGLUMLP", "GeGLUMLP"]


@needs_kernels
@pytest.mark.slow
def test_the_compiled_variant_is_not_loaded_together_with_fusedops(folder: Path) -> None:
    assert "fusedops is imported already" in check("with_fusedops", folder, PYTHONPATH=str(ROOT))
