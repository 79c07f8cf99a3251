"""Builds the libraries of a wheel for one torch: any processor, any Python, older systems.

    PYTHONPATH=FOLDER_WITH_TORCH python tools/native_wheel.py OUTPUT [--kernels OBJECTS]

They come into ``OUTPUT/torch-2.13``, for example, and serve every release of that minor version
(``fusedops/_core/extension.py`` chooses). Operators, autograd nodes and the dispatcher are classes
of torch whose layout changes with it, and are compiled for each. The kernels (``*.isa.cpp``) call
half a dozen functions of torch and hold nine tenths of the compiler's time: with ``--kernels`` they
are taken from the objects of another torch's build, and the linker checks that the functions exist.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import native
import portable

sys.path.pop(0)


def minor_version(version: str) -> str:
    """Return ``2.13`` of ``2.13.0+cpu``; a version before a release stands for itself.

    Raises:
        native.BuildError: the version is not a release.
    """
    numbers = version.partition("+")[0].split(".")
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        raise native.BuildError(
            f"torch {version} is no release: a wheel serves all releases of a minor version"
        )
    return ".".join(numbers[:2])


def build(output: Path, kernels: Path | None) -> Path:
    """Build for the torch on Python's path; return the folder of the libraries.

    Args:
        output: gets the folder ``torch-X.Y``.
        kernels: ``native.build_folder()`` of a build whose kernels are linked here too.

    Raises:
        native.BuildError: no torch, no compiler, or the compiler failed.
    """
    os.environ.setdefault("FUSEDOPS_ISAS", "all")
    version = minor_version(native.find_torch().version)
    folder = native.build_folder()
    native.LIBRARIES = output / f"torch-{version}"
    flags = portable.stand_ins(native.ROOT / "build" / "portable", native.compiler())
    for name in ("cpu", "host"):
        edges = native.edges_of(name, folder)
        if kernels is not None:
            edges = _with_kernels_of(kernels, edges, folder)
        link = edges[-1]
        # Apart from the libraries that are built in place. The stand-ins come before the system's.
        wheel = folder / "wheel" / Path(link.output).name
        wheel.parent.mkdir(exist_ok=True)
        edges[-1] = dataclasses.replace(
            link, output=str(wheel), flags=(*flags, *link.flags, "-Wl,--strip-all")
        )
        with native.locked(name):
            native.execute(folder, f"{name}_wheel", edges, verbose=False)
            stamp = {**native.stamp(name), "torch": version, "cuda": ""}
            native.install(wheel, native.library_path(name), stamp)
    return native.LIBRARIES


def _with_kernels_of(other: Path, edges: list[native.Edge], folder: Path) -> list[native.Edge]:
    """Return the steps without those of kernels, linking the objects in ``other`` instead."""

    def is_kernel(path: str) -> bool:
        return ".isa.cpp." in Path(path).name or Path(path).name.startswith("vectors.h")

    rest = [edge for edge in edges if not is_kernel(edge.output)]
    objects = tuple(
        str(other / Path(source).relative_to(folder)) if is_kernel(source) else source
        for source in rest[-1].sources
    )
    return [*rest[:-1], dataclasses.replace(rest[-1], sources=objects)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    try:
        build(options.output.resolve(), options.kernels and options.kernels.resolve())
    except native.BuildError as problem:
        sys.exit(f"fusedops: {problem}")


if __name__ == "__main__":
    main()
