"""Where the compiled libraries for a torch lie, and why there are none.

A wheel has a folder ``lib/torch-X.Y`` for each minor version of torch that it serves; a checkout
has the libraries in ``lib`` itself, for the torch that they were built with. Nothing here loads a
library, and nothing imports torch.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

_CHECKOUT = (Path(__file__).resolve().parents[2] / "tools" / "native.py").exists()
IN_PLACE = "build it with `python tools/native.py build` (needs g++ 11 or newer)"
FROM_SOURCE = (
    "compile the source of the release with `pip install --force-reinstall --no-deps "
    "--no-build-isolation ./fusedops-*.tar.gz` (needs g++ 11 or newer)"
)
# How whoever has this installation makes a library that fits.
HOW_TO_BUILD = IN_PLACE if _CHECKOUT else FROM_SOURCE


def folder_for(libraries: Path, version: str) -> Path:
    """Return the folder below ``libraries`` for a version of torch, which need not exist.

    Releases of one minor version share a folder. What is no release has none in a wheel: its
    classes may be those of the version before.
    """
    release = re.match(r"(\d+\.\d+)\.\d+(\+|$)", version)
    own = libraries / f"torch-{release[1] if release else version}"
    return own if own.is_dir() else libraries


def served(libraries: Path) -> list[str]:
    """Return the minor versions of torch that a wheel has libraries for, oldest first."""
    names = (path.name.removeprefix("torch-") for path in libraries.glob("torch-*.*"))
    return sorted(names, key=lambda name: [int(number) for number in name.split(".")])


def fits_torch(built: str, version: str) -> bool:
    """Return whether a library of a stamp's ``torch`` (2.13, of a wheel) serves 2.13.1+cu130."""
    return built == version or re.match(rf"{re.escape(built)}\.\d+(\+|$)", version) is not None


def why_missing(libraries: Path, file_name: str, version: str) -> str:
    """Return one sentence on a library that is not there: what is the matter and what to do."""
    versions = served(libraries)
    if folder_for(libraries, version) != libraries:
        return f"wheels have no {file_name} (Triton's kernels run on GPUs): {HOW_TO_BUILD}"
    if versions:
        served_torches = " to ".join(dict.fromkeys((versions[0], versions[-1])))
        return (
            f"the compiled kernels of this installation serve torch {served_torches}, and this is "
            f"torch {version}: install another torch (`pip install 'torch=={versions[-1]}.*'`), or "
            "the wheel of another release"
        )
    if _CHECKOUT or libraries.is_dir():
        return f"{libraries / file_name} does not exist: {HOW_TO_BUILD}"
    system = unserved_system()
    if system is not None:
        return f"no wheel has compiled kernels for {system}: {HOW_TO_BUILD}"
    wheel = f"fusedops-*-manylinux_2_28_{platform.machine()}.whl"
    return (
        "this wheel is the one without compiled kernels: install that of this system "
        f"(`pip install --force-reinstall --no-deps ./{wheel}`), or {HOW_TO_BUILD}"
    )


def unserved_system() -> str | None:
    """Return what this system is if no wheel is made for it, else ``None``."""
    if sys.platform != "linux":
        return platform.system()
    if platform.libc_ver()[0] != "glibc":
        return "a C library other than glibc, as musl of Alpine"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"{platform.machine()} processors"
    return None


def wrong_system(stamp: dict[str, str]) -> str | None:
    """Return why a library of a stamp cannot be loaded on this system, or ``None``."""
    built = stamp.get("machine", platform.machine())
    if built != platform.machine():
        return f"was built for {built} processors, and this is {platform.machine()}"
    if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        return "was built for glibc, and this Python uses another C library (musl?)"
    return None
