"""Writes the package of fusedops' ops for the kernels hub of Hugging Face, from fusedops' sources.

    python tools/hub_package.py build/hub/fusedops-kernels      # docs/kernels_hub.md

The folder has the layout of kernel-builder: ``build.toml``, and the sources below ``torch-ext``.
Below ``build`` are the variants that the loader of ``kernels`` takes: one for each backend with
Triton and reference alone, and one with the compiled CPU library of this checkout, for the torch
that it was built with. Nothing in it is written by hand but ``hub_layers.py`` and what is below.

A package of the hub is loaded from any folder, together with others and with other versions of
itself. Its imports are therefore relative, and its operators have a namespace with a digest of the
sources in its name. The compiled library has the namespace of fusedops in it: that variant refuses
to be loaded where fusedops is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "fusedops-kernels"
MODULE = "fusedops_kernels"
VERSION = 1
LICENSE = "Apache-2.0"
PACKAGES = ("_core", "kernels", "ops")
BACKENDS = ("cpu", "cuda")
LIBRARY = "libfusedops_cpu"
BUILD = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 6
license = "{LICENSE}"
backends = [{", ".join(f'"{name}"' for name in BACKENDS)}]

[torch-noarch]
pyext = ["json", "py"]
"""
# Before INIT in the variant of the compiled library, in which the namespace is fixed.
ALONE = """import sys

if "fusedops" in sys.modules:
    raise ImportError(
        "fusedops is imported already, and has the operators of this package: use fusedops.patch, "
        "or do not import fusedops in a process that loads its hub package"
    )

"""
INIT = '''"""Ops of fusedops: fused transformer kernels for CPUs and for Triton."""

from . import layers
from ._core.backends import use_backend
from ._core.library import tag_compiled_code
from .ops import *  # noqa: F403
from .ops import __all__ as _ops

__all__ = ["layers", "use_backend", *_ops]

tag_compiled_code()
'''
README = f"""---
license: apache-2.0
tags: [kernels]
---

# {NAME}

Fused transformer ops for CPUs and Triton. Written by `tools/hub_package.py` of fusedops: changes
belong there. `docs/kernels_hub.md` of fusedops has an example.
"""


def write_package(folder: Path) -> list[Path]:
    """Write the package, replacing what is in the folder, and return its variants.

    Raises:
        FileExistsError: the folder has something else in it.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "build.toml").exists():
        raise FileExistsError(f"{folder} is not empty and is no package of the hub")
    final, folder = folder, folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    _write_sources(folder / "torch-ext" / MODULE, unique_namespace())
    (folder / "build.toml").write_text(BUILD)
    (folder / "README.md").write_text(README)
    variants = [_variant(folder, f"torch-{backend}", backend) for backend in BACKENDS]
    stamp = ROOT / "fusedops" / "lib" / f"{LIBRARY}.json"
    if stamp.exists():
        variants.append(_native_variant(folder, stamp))
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    return [final / variant.relative_to(folder) for variant in variants]


def _sources() -> list[Path]:
    folders = [ROOT / "fusedops" / package for package in PACKAGES]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def unique_namespace() -> str:
    """Return the namespace of the operators: two versions may be loaded in one process."""
    digest = hashlib.sha256()
    for path in (*_sources(), ROOT / "tools" / "hub_layers.py"):
        digest.update(path.read_bytes())
    return f"{MODULE}_{digest.hexdigest()[:8]}"


def _write_sources(target: Path, namespace: str) -> None:
    for path in _sources():
        written = target / path.parent.name / path.name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(relocated(path.read_text(), depth=1, namespace=namespace))
    layers = (ROOT / "tools" / "hub_layers.py").read_text()
    (target / "layers.py").write_text(relocated(layers, depth=0, namespace=namespace))
    (target / "__init__.py").write_text(ALONE + INIT if namespace == "fusedops" else INIT)


def relocated(text: str, *, depth: int, namespace: str) -> str:
    """Return a source file of fusedops with relative imports and with another namespace.

    ``depth`` is in how many folders of the package it is.

    Raises:
        ValueError: a line names fusedops in a way that this does not know.
    """
    dots = "." * (depth + 1)
    text = re.sub(r"^(\s*)from fusedops\.", rf"\1from {dots}", text, flags=re.MULTILINE)
    text = re.sub(r"^(\s*)from fusedops import", rf"\1from {dots} import", text, flags=re.MULTILINE)
    text = re.sub(
        r'triton="fusedops\.(kernels\.\w+)"',
        r'triton=__name__.rpartition(".ops.")[0] + ".\1"',
        text,
    )
    text = text.replace('_NAMESPACE = "fusedops"', f'_NAMESPACE = "{namespace}"')
    text = re.sub(r"torch\.ops\.fusedops\b", f"torch.ops.{namespace}", text)
    text = text.replace('"fusedops.RoutingPlan"', f'"{namespace}.RoutingPlan"')
    for line in text.splitlines():
        if re.match(r"\s*(import|from) fusedops\b", line) or '"fusedops.kernels' in line:
            raise ValueError(f"tools/hub_package.py does not know how to relocate: {line.strip()}")
    return text


def _variant(folder: Path, name: str, backend: str, namespace: str | None = None) -> Path:
    """Write a variant from the sources and return its folder."""
    target = folder / "build" / name
    _write_sources(target, namespace or unique_namespace())
    metadata = {
        "id": f"{MODULE}_{name.replace('-', '_')}_{VERSION}",
        "name": NAME,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return target


def _native_variant(folder: Path, stamp: Path) -> Path:
    """Write the variant of the compiled library, which fits one torch and one system."""
    torch = json.loads(stamp.read_text())["torch"].split("+")[0].split(".")
    system = f"{platform.machine()}-{platform.system().lower()}"
    target = _variant(folder, f"torch{torch[0]}{torch[1]}-cxx11-cpu-{system}", "cpu", "fusedops")
    (target / "lib").mkdir()
    for path in (stamp, stamp.with_suffix(".so")):
        shutil.copy2(path, target / "lib")
    return target


def main() -> int:
    """Write the package that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        variants = write_package(folder)
    except FileExistsError as error:
        print(f"hub_package: error: {error}", file=sys.stderr)
        return 2
    for variant in variants:
        size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
        print(f"{variant}: {size / 2**20:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
