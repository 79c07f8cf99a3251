"""Fetches what a build needs of a torch: headers and libraries, without what it depends on."""

from __future__ import annotations

import zipfile
from pathlib import Path

from release import distributions

_LIBRARIES = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libgomp.so.1")


def unpacked(tools: Path, version: str, work: Path) -> Path:
    """Return a folder that holds a package ``torch``, enough of it to compile and link.

    Raises:
        ReleaseError: the version cannot be fetched.
    """
    folder = work / "torches" / version
    if (folder / "torch" / "version.py").exists():
        return folder
    print(f"fetching torch {version}: half a gigabyte", flush=True)
    downloads = work / "downloads"
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads]
    distributions.run([tools / "python", *command, f"torch=={version}"])
    wheel = max(downloads.glob(f"torch-{version}[-+]*.whl"), key=lambda path: path.stat().st_mtime)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            below = name.removeprefix("torch/")
            if below.startswith("include/") or below in (f"lib/{each}" for each in _LIBRARIES):
                archive.extract(name, folder)
        archive.extract("torch/__init__.py", folder)
        archive.extract("torch/version.py", folder)  # the last: it says that all is there
    wheel.unlink()
    return folder
