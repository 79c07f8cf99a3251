"""Builds the CUDA C++ kernels for the machine: nvcc compiles them, the machine executes their PTX.

    PYTHONPATH=tools python -m ptx_machine.nvcc     # prints the library's path

nvcc compiles the kernels under csrc/cuda as it does for a GPU, to PTX and to the host's code. What
that finds in place of CUDA's runtime library and of torch's CUDA headers is in the folder ``cuda``:

| file | holds |
|---|---|
| ``runtime.*`` | the functions of the runtime library, which give launches to the machine |
| ``tensors.cpp`` | torch's memory, with known bounds |
| ``bindings.h``, ``c10`` | operators ``fusedops_ptx_machine::*`` on CPU tensors |
| ``faults.cu`` | kernels that each do one thing wrong, for the test of the machine |
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import native

from ptx_machine import library_path

CUDA = Path(__file__).resolve().parent / "cuda"
CAPABILITIES = (80, 90)
# These ask torch's CUDA allocator, which is not here.
LEFT_OUT = ("arena_allocator.cpp", "gpu_arena.cpp", "step_arena.cpp")
# The PTX alone, as text.
NVCC_FLAGS = (
    *(f"-gencode=arch=compute_{each},code=compute_{each}" for each in CAPABILITIES),
    "-lineinfo",
    "--no-compress",
)


def kernel_names() -> list[str]:
    """Return the names of the CUDA C++ kernels, forward and backward, as the sources have them."""
    bindings = (*(native.CSRC / "cuda").glob("*.cpp"), *(native.CSRC / "common").glob("*.h"))
    texts = [path.read_text() for path in sorted(bindings)]
    return [name for text in texts for name in re.findall(r'm\.impl\("(\w+)"', text)]


def build(*, verbose: bool = False) -> Path:
    """Build the library if its sources changed, and return its path.

    Raises:
        CannotBuildError: there is no compiler or no CUDA toolkit.
        BuildError: the compiler failed.
    """
    home = native.cuda_home()
    if home is None:
        raise native.CannotBuildError("the CUDA toolkit, which compiles the kernels, is not here")
    folder = native.build_folder() / "ptx_machine"
    with native.locked("ptx_machine"):
        edges = _edges(folder, (f"-I{CUDA}", f"-isystem{home}/include"))
        native.execute(folder, "ptx_machine", edges, verbose=verbose)
    return Path(edges[-1].output)


def _edges(folder: Path, flags: tuple[str, ...]) -> list[native.Edge]:
    folder.mkdir(parents=True, exist_ok=True)
    header = CUDA / "bindings.h"
    precompiled = folder / header.name
    # Read by ccache in place of the .gch, as in native.py.
    Path(f"{precompiled}.gch.sum").write_text(native.header_digest(header, flags))
    edges = [native.Edge("precompile", f"{precompiled}.gch", (str(header),), flags)]
    binding = (*flags, "-include", str(precompiled))
    kernels = [source for source in native.sources("cuda") if source.name not in LEFT_OUT]
    for source in [*kernels, *CUDA.glob("*.cu"), *CUDA.glob("*.cpp")]:
        output = str(folder / f"{source.name}.o")
        if source.suffix == ".cu":
            edges.append(native.Edge("nvcc", output, (str(source),), NVCC_FLAGS))
        elif source.parent == CUDA:
            edges.append(native.Edge("cxx", output, (str(source),), flags))
        else:
            needs = (f"{precompiled}.gch",)
            edges.append(native.Edge("cxx", output, (str(source),), binding, needs))
    objects = tuple(edge.output for edge in edges if edge.rule != "precompile")
    machine = library_path()
    link = (str(machine), f"-Wl,-rpath,{machine.parent}", *native.link_flags("cpu"))
    library = str(folder / "libfusedops_ptx_machine.so")
    return [*edges, native.Edge("link", library, objects, link)]


if __name__ == "__main__":
    try:
        print(build(verbose="-v" in sys.argv))
    except native.BuildError as problem:
        sys.exit(f"fusedops: {problem}")
