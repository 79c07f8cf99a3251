"""Builds the CUDA C++ kernels for the host, where tests run and watch them without a GPU.

    python tools/cuda_on_host.py     # prints the library's path

The sources under csrc/cuda are compiled by g++ as they are. What they find in place of nvcc, of the
GPU and of torch's CUDA headers is in ``tools/cuda_on_host``:

| file | holds |
|---|---|
| ``device.h`` | the words of CUDA C++ that the kernels use; read ahead of each ``.cu`` |
| ``machine.*`` | threads as fibers, barriers, shuffles, the limits of a launch |
| ``memory.cpp`` | bounds, races, shared memory that nothing has written |
| ``sanitizer.cpp`` | what g++ calls before each load and store of a kernel |
| ``tensors.cpp`` | torch's memory, with known bounds |
| ``bindings.h``, ``c10`` | operators ``fusedops_cuda_on_host::*`` on CPU tensors |
| ``faults.cu`` | kernels that each do one thing wrong, for the test of the watch itself |

What a GPU alone tells is not seen: timing, the rounding of its special functions and of contracted
multiply-adds, registers (``cuda_report.py`` keeps those).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import native

HOST = native.ROOT / "tools" / "cuda_on_host"
MACHINE = ("machine.cpp", "memory.cpp", "sanitizer.cpp", "tensors.cpp")
# These ask torch's CUDA allocator, which is not here.
LEFT_OUT = ("arena_allocator.cpp", "gpu_arena.cpp", "step_arena.cpp")
COMMON_FLAGS = (
    "-O1",
    "-g1",  # lines for the messages
    "-U_FORTIFY_SOURCE",  # which forbids to jump between stacks
    "-ffp-contract=off",
    f"-I{HOST}",
)
# `extern thread_local` memory, which shared memory is, has no initialiser to look for elsewhere.
SHARED = "-fno-extern-tls-init"
# Functions for these kinds are in sanitizer.cpp.
WATCHED = "-fsanitize=thread,alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow"


def kernel_names() -> list[str]:
    """Return the names of the CUDA C++ kernels, forward and backward, as the sources have them."""
    bindings = (*(native.CSRC / "cuda").glob("*.cpp"), *(native.CSRC / "common").glob("*.h"))
    texts = [path.read_text() for path in sorted(bindings)]
    return [name for text in texts for name in re.findall(r'm\.impl\("(\w+)"', text)]


def build(*, verbose: bool = False) -> Path:
    """Build the library if its sources changed, and return its path.

    Raises:
        CannotBuildError: there is no compiler or no CUDA toolkit (of which the headers are read).
        BuildError: the compiler failed.
    """
    home = native.cuda_home()
    if home is None:
        raise native.CannotBuildError(
            "the CUDA toolkit, whose headers the kernels read, is not here"
        )
    folder = native.build_folder() / "cuda_on_host"
    with native.locked("cuda_on_host"):
        edges = _edges(folder, (*COMMON_FLAGS, f"-isystem{home}/include"))
        native.execute(folder, "cuda_on_host", edges, verbose=verbose)
    return Path(edges[-1].output)


def _edges(folder: Path, flags: tuple[str, ...]) -> list[native.Edge]:
    folder.mkdir(parents=True, exist_ok=True)
    header = HOST / "bindings.h"
    precompiled = folder / header.name
    # Read by ccache in place of the .gch, as in native.py.
    Path(f"{precompiled}.gch.sum").write_text(native.header_digest(header, flags))
    edges = [native.Edge("precompile", f"{precompiled}.gch", (str(header),), flags)]
    kernel = (*flags, WATCHED, SHARED, "-xc++", "-include", str(HOST / "device.h"))
    binding = (*flags, "-include", str(precompiled))
    kernels = [source for source in native.sources("cuda") if source.name not in LEFT_OUT]
    for source in [*kernels, HOST / "faults.cu", *(HOST / each for each in MACHINE)]:
        output = str(folder / f"{source.name}.o")
        if source.suffix == ".cu":
            edges.append(native.Edge("cxx", output, (str(source),), kernel))
        elif source.parent == HOST:
            edges.append(native.Edge("cxx", output, (str(source),), flags))
        else:
            needs = (f"{precompiled}.gch",)
            edges.append(native.Edge("cxx", output, (str(source),), binding, needs))
    objects = tuple(edge.output for edge in edges if edge.rule == "cxx")
    library = str(folder / "libfusedops_cuda_on_host.so")
    return [*edges, native.Edge("link", library, objects, tuple(native.link_flags("cpu")))]


if __name__ == "__main__":
    try:
        print(build(verbose="-v" in sys.argv))
    except native.BuildError as problem:
        sys.exit(f"fusedops: {problem}")
