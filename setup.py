"""Builds and installs fusedops against the torch that is already installed.

    pip install -e . --no-build-isolation       # needs torch; compiles the libraries with g++
    python3 tools/native.py build               # the libraries alone, without pip and setuptools

Project metadata is in pyproject.toml, the build itself in tools/native.py. Without a compiler, or
if it fails, the installation fails.

``FUSEDOPS_TORCHES`` makes a wheel for others (tools/release does): folders, with ``:`` between
them, that hold a package ``torch`` each, for which libraries are built that any processor and older
systems can load; or ``none`` for a wheel or an installation without libraries, which fits every
system, and whose ops run on the PyTorch reference.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
TORCHES = os.environ.get("FUSEDOPS_TORCHES", "")

NO_TORCH = """\
fusedops compiles against the torch that you have, and {python} has none.
  1. install torch, for example: pip install torch==2.13.0
  2. pip install -e . --no-build-isolation
(Without --no-build-isolation pip builds in an empty environment, which never has torch.)"""

NO_COMPILER = """\
fusedops: the kernels cannot be compiled here ({error}).
Install g++ 11 or newer, or the wheel of a release. With FUSEDOPS_TORCHES=none the installation, or
the wheel, has no kernels for the CPU: ops run on the PyTorch reference, slowly, and on Triton."""


def _native():
    """Return tools/native.py as a module; it is no part of the installed package."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "tools" / "native.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Compile the libraries in place; for a wheel, copy them into it."""

    def run(self) -> None:
        """Build, or end with the reason why not."""
        if TORCHES == "none":
            return
        in_place = self.inplace or getattr(self, "editable_mode", False)
        libraries = Path(self.build_lib) / "fusedops" / "lib"
        if TORCHES and not in_place:
            _build_for_torches(TORCHES, libraries)
            return
        native = _native()
        if importlib.util.find_spec("torch") is None:
            sys.exit(NO_TORCH.format(python=sys.executable))
        if not in_place:  # a wheel may be installed on another machine
            os.environ.setdefault("FUSEDOPS_ISAS", "all")
        try:
            paths = native.build()
        except native.CannotBuildError as error:
            sys.exit(NO_COMPILER.format(error=error))
        except native.BuildError as error:
            sys.exit(f"fusedops: {error}")
        if not in_place:
            self.mkpath(str(libraries))
            for path in paths:
                self.copy_file(str(path), str(libraries / path.name))
                self.copy_file(str(path.with_suffix(".json")), str(libraries))

    def get_outputs(self) -> list[str]:
        """Return no file: run() places the libraries itself."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Return no file, as get_outputs()."""
        return {}


def _build_for_torches(folders: str, libraries: Path) -> None:
    """Build the libraries of a wheel, each torch in a process of its own."""
    kernels: list[str] = []  # objects of the first torch's build serve all
    for folder in folders.split(os.pathsep) if folders != "none" else []:
        environment = {**os.environ, "PYTHONPATH": folder}
        tool = str(ROOT / "tools" / "native_wheel.py")
        command = [sys.executable, tool, str(libraries), *kernels]
        if subprocess.run(command, env=environment).returncode:
            sys.exit(f"fusedops: no wheel: the build for the torch in {folder} failed; see above")
        if not kernels:
            code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import native"
            command = [sys.executable, "-c", f"{code}; print(native.build_folder())"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            kernels = ["--kernels", done.stdout.strip()]


class Wheel(bdist_wheel):
    """A wheel for every Python from 3.11 on: the libraries keep to Python's limited API."""

    def finalize_options(self) -> None:
        """Set the tag ``cp311-abi3``."""
        self.py_limited_api = "cp311"
        super().finalize_options()

    def run(self) -> None:
        """Build the libraries first: a wheel without them fits every system."""
        if self.distribution.has_libraries:
            self.run_command("build_ext")
        self.root_is_pure = not self.distribution.has_libraries
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of Python, of its ABI, and of the platform."""
        return super().get_tag() if self.distribution.has_libraries else ("py3", "none", "any")


class NativeDistribution(Distribution):
    """A distribution with libraries, so that a wheel carries the platform's tag."""

    has_libraries = TORCHES != "none"

    def has_ext_modules(self) -> bool:
        """Return True, unless there are no libraries."""
        return self.has_libraries


setup(
    distclass=NativeDistribution,
    ext_modules=[] if TORCHES == "none" else [Extension("fusedops._libraries", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
