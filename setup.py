"""Builds and installs fusedops against the torch that is already installed.

    pip install -e . --no-build-isolation       # needs torch; compiles the libraries with g++
    python3 setup.py build_ext --inplace        # the same without pip and without network

Project metadata is in pyproject.toml, the build itself in tools/native.py. Where the libraries
cannot be compiled the installation still succeeds, with a note, and the ops run on the PyTorch
reference.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent

NO_TORCH = """\
fusedops compiles against the torch that you have, and {python} has none.
  1. install torch, for example: pip install torch==2.13.0
  2. pip install -e . --no-build-isolation
(Without --no-build-isolation pip builds in an empty environment, which never has torch.)"""


def _native():
    """Return tools/native.py as a module; it is no part of the installed package."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "tools" / "native.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _note(text: str) -> None:
    print(f"fusedops: {text}", file=sys.stderr, flush=True)
    try:  # pip shows a build's output only on failure; the terminal shows the note in any case
        with open("/dev/tty", "w") as terminal:
            print(f"fusedops: {text}", file=terminal)
    except OSError:
        pass


class BuildNative(build_ext):
    """Compile the libraries in place; for a wheel, copy them into it."""

    def run(self) -> None:
        """Build, or say in one note why not."""
        native = _native()
        if importlib.util.find_spec("torch") is None:
            sys.exit(NO_TORCH.format(python=sys.executable))
        in_place = self.inplace or getattr(self, "editable_mode", False)
        if not in_place:  # a wheel may be installed on another machine
            os.environ.setdefault("FUSEDOPS_ISAS", "all")
        try:
            paths = native.build()
        except native.BuildError as error:
            _note(
                f"NOTE: the compiled kernels were not built ({error}). fusedops works without "
                "them, slowly: its ops run on the PyTorch reference. Later: "
                "python3 setup.py build_ext --inplace"
            )
            return
        if not in_place:
            target = Path(self.build_lib) / "fusedops" / "lib"
            self.mkpath(str(target))
            for path in paths:
                self.copy_file(str(path), str(target / path.name))
                self.copy_file(str(path.with_suffix(".json")), str(target))

    def get_outputs(self) -> list[str]:
        """Return no file: run() places the libraries itself."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Return no file, as get_outputs()."""
        return {}


class NativeDistribution(Distribution):
    """A distribution that is never pure Python, so that a wheel carries the platform's tag."""

    def has_ext_modules(self) -> bool:
        """Return True."""
        return True


setup(
    distclass=NativeDistribution,
    ext_modules=[Extension("fusedops._libraries", sources=[])],
    cmdclass={"build_ext": BuildNative},
)
