"""A GPU that is not there, for Triton: kernels compile for it and launches are noted.

    with stand_in_driver.installed(folder) as gpu:
        kernel[grid](...)              # CPU tensors; nothing is computed
        gpu.launches()                 # each launch as bytes
        with gpu.plans(): ...          # the compiled router plans calls on CPU tensors

Triton's own driver code runs, down to ``cuLaunchKernelEx`` of a library that
``stand_in_driver.cpp`` is compiled to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import native
import torch

_SOURCE = Path(__file__).with_suffix(".cpp")
_SIZES = {"u64": 8, "u32": 4, "u16": 2, "u8": 1, "f32": 4, "f64": 8, "b64": 8, "b32": 4, "b8": 1}


class Gpu:
    """What was launched on the stand-in."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.stand_in_launch.restype = ctypes.POINTER(ctypes.c_char)

    def launches(self) -> list[bytes]:
        """Return function, grid, threads, shared memory, stream and parameters of each launch."""
        size = ctypes.c_int()
        found = []
        for index in range(self._library.stand_in_launches()):
            text = self._library.stand_in_launch(index, ctypes.byref(size))
            found.append(ctypes.string_at(text, size.value))
        return found

    def clear(self) -> None:
        """Forget the launches."""
        self._library.stand_in_clear()

    def fail(self, code: int) -> None:
        """Let each launch return this CUresult; 0: none fails."""
        self._library.stand_in_fail(code)

    @contextlib.contextmanager
    def plans(self) -> Iterator[None]:
        """Let the compiled router make plans of calls on CPU tensors."""
        names = ("stream", "plan_launch", "encode", "error")
        functions = [getattr(self._library, f"stand_in_{name}") for name in names]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        set_driver = torch.ops.fusedops_native.set_launch_driver
        torch.ops.fusedops_native.forget_plans()
        set_driver(addresses, torch.device("cpu"))
        try:
            yield
        finally:
            set_driver([], torch.device("cuda"))
            torch.ops.fusedops_native.forget_plans()

    def describe(self, function: int, ptx: str) -> None:
        """Tell how large a kernel's parameters are, from the declaration in its PTX."""
        entry = ptx[ptx.index(".entry") :]
        declared = re.findall(
            r"\.param (?:\.align \d+ )?\.(\w+)[^,\n]*?_param_\d+(?:\[(\d+)\])?",
            entry[: entry.index("{")],
        )
        sizes = [int(count) if count else _SIZES[kind] for kind, count in declared]
        self._library.stand_in_describe(
            ctypes.c_uint64(function), len(sizes), (ctypes.c_int * len(sizes))(*sizes)
        )


@functools.cache
def _library(folder: Path) -> ctypes.CDLL:
    """Compile the stand-in, and load it as the libcuda.so.1 that others link to."""
    import triton.backends.nvidia.driver as nvidia

    path = folder / "libcuda.so.1"
    command = [native.compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", str(_SOURCE)]
    command += [f"-I{nvidia.include_dirs[0]}", "-Wl,-soname,libcuda.so.1", "-o", str(path)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[Gpu]:
    """Stand for an H100 inside the block; CPU tensors count as its own.

    The folder gets the compiled library and Triton's own driver code.
    """
    from triton import knobs
    from triton.backends.nvidia.driver import CudaDriver
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    gpu = Gpu(_library(folder))
    load = CompiledKernel._init_handles

    def init_handles(kernel: Any) -> None:
        load(kernel)
        gpu.describe(kernel.function, kernel.asm["ptx"])

    with contextlib.ExitStack() as stack:
        stack.enter_context(knobs.nvidia.scope())
        knobs.nvidia.libcuda_path = str(folder)
        active = CudaDriver()
        active.get_current_device = lambda: 0
        active.get_current_stream = lambda device: 0x5EED
        active.get_device_capability = lambda device: (9, 0)
        stack.enter_context(mock.patch.object(driver, "_active", active))
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", init_handles))
        stack.enter_context(_as_gpu())
        gpu.clear()
        yield gpu


def _as_gpu() -> contextlib.ExitStack:
    """Let fusedops run Triton kernels on CPU tensors, with the tiles of a GPU."""
    from fusedops._core import backends, checks, extension
    from fusedops.kernels import _attention_launch, _descriptors, _launch, attention_decode

    replaced = (
        (extension, "triton_missing", lambda: None),
        (checks, "readable", lambda tensor: False),
        (backends, "env", SimpleNamespace(triton_interpreted=lambda: True)),
        (_descriptors, "available", lambda device: True),
        (_attention_launch, "generation_of", lambda device: 90),
        (attention_decode, "generation_of", lambda device: 90),
        (_launch, "num_programs", lambda device: 2 * 132),
    )
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.dict(backends._ORDER, {"cpu": ("triton", "torch")}))
    for module, name, value in replaced:
        stack.enter_context(mock.patch.object(module, name, value))
    return stack
