"""A GPU whose kernels the machine executes: Triton compiles, launches and gets real values.

    with executing(90) as gpu:
        kernel[grid](x, y, x.numel(), BLOCK=1024)  # tensors of the CPU
    print(gpu.kernels)

Triton's own runtime and launcher (C) specialise the arguments, compile for the GPU that is asked
for, make tensor maps of descriptors, and load and launch. They are linked to a stand-in of the CUDA
driver (``triton/libcuda.cpp``), which gives each launch to the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ptx_machine import BUILD, FOLDER, MachineError, Program

_FORMATS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}

_LOAD = ctypes.CFUNCTYPE(ctypes.c_uint64)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
)
_LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED

_devices = itertools.count(1000)
_handles = itertools.count(1)  # of modules
_programs: dict[int, Program] = {}  # by the handle of their module; of drivers in use
_running: list[Driver] = []  # that load or launch something now


def argument(kind: str, value: Any) -> bytes:
    """Return the bytes of a parameter of a type of Triton's signatures."""
    if kind.startswith("*"):
        address = value.data_ptr() if hasattr(value, "data_ptr") else value or 0
        return struct.pack("Q", address)
    if kind == "nvTmaDesc":
        return bytes(value)
    if kind in ("fp16", "bf16"):
        dtype = torch.float16 if kind == "fp16" else torch.bfloat16
        return torch.tensor(value, dtype=dtype).view(torch.int16).numpy().tobytes()
    return struct.pack(_FORMATS[kind], value)


class Driver:
    """Stands for Triton's driver of a GPU.

    Args:
        capability: 80 for sm_80.
        seed: of the machine's order; each launch gets another.
    """

    def __init__(self, capability: int, seed: int = 0) -> None:
        self.capability = capability
        self.seed = seed
        self.tensors: list[torch.Tensor] = []  # memory that kernels find by addresses in memory
        self.kernels: list[str] = []  # the names of those that were executed
        self.change: Callable[[str], str] = str  # what happens to PTX before it is executed
        self.programs: dict[str, Program] = {}  # by that PTX
        self.error: Exception | None = None  # of the last launch
        self._launch_of: tuple[str, list[torch.Tensor]] = "", []
        self._texts: dict[bytes, str] = {}  # machine code, as Triton loads it -> its PTX
        self._functions: list[Any] = []  # what was compiled
        self._modules: list[int] = []  # their handles
        self._device = next(_devices)  # Triton keeps kernels by it, which keep their driver
        _, native = _launcher()
        self.utils = SimpleNamespace(**vars(native))  # the functions of Triton's launcher
        self.utils.load_binary = self._load
        self.utils.get_device_properties = lambda device: {
            "max_shared_mem": SHARED_MEMORY[capability]
        }

    def get_current_device(self) -> int:
        """Return a number that no other driver has."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return the GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def keeping_text(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiler that also keeps the PTX of what it compiles."""

        def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
            kernel = compile(*args, **kwargs)
            self._texts[kernel.kernel] = kernel.asm["ptx"]
            self._functions.append(args[0].fn)
            return kernel

        return compile_and_keep

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> Any:
        text = self.change(self._texts[binary])
        self.programs[text] = program = Program(text)
        self._modules.append(next(_handles))
        _programs[self._modules[-1]] = program
        stand_in, utils = _launcher()
        _running.append(self)
        try:
            stand_in(_loaded, _launch, SHARED_MEMORY[self.capability])
            return utils.load_binary(name, binary, shared, device)
        finally:
            _running.pop()

    def close(self) -> None:
        """Let go of the programs, here and in Triton's own cache of this device."""
        for handle in self._modules:
            del _programs[handle]
        for function in self._functions:
            function.device_caches.pop(self._device, None)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what Triton's runtime calls to launch a kernel."""
        from triton.backends.nvidia import driver as nvidia

        launch = nvidia.CudaLauncher(source, metadata)

        def call(*arguments: Any) -> None:
            # Before the kernel's: grid, stream, function, metadata of both, and two hooks.
            self._launch_of = metadata.name, [*_tensors_in(arguments[9:]), *self.tensors]
            _running.append(self)
            try:
                launch(*arguments)
            except Exception:
                error, self.error = self.error, None
                raise error or MachineError("Triton's launcher failed") from None
            finally:
                _running.pop()

        return call

    def run(self, program: Program, **launch: Any) -> None:
        """Execute a launch on the machine."""
        name, tensors = self._launch_of
        seed = self.seed + len(self.kernels)
        program.run(**launch, tensors=tensors, seed=seed)
        self.kernels.append(name)


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, TensorDescriptor):
            yield value.base
        elif isinstance(value, tuple):
            yield from _tensors_in(value)


@_LOAD
def _loaded() -> int:
    return _running[-1]._modules[-1]


@_LAUNCH
def _launch(function: int, grid: Any, threads: int, shared: int, parameters: Any) -> int:
    driver, program = _running[-1], _programs[function]
    try:
        values = [
            ctypes.string_at(parameters[i], size) for i, (size, _) in enumerate(program.parameters)
        ]
        driver.run(program, grid=grid[:3], threads=threads, shared=shared, arguments=values)
    except Exception as error:
        driver.error = error
        return _LAUNCH_FAILED
    return 0


@functools.cache
def _launcher() -> tuple[Any, Any]:
    """Return what sets the callbacks of the stand-in, and Triton's utilities linked to it."""
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    if torch.cuda.is_available():
        raise MachineError("this process has a GPU: set CUDA_VISIBLE_DEVICES= for the machine")
    source = FOLDER / "triton" / "libcuda.cpp"
    folder = BUILD / "libcuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    with open(folder / "lock", "w") as lock:  # one of several processes compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = source, FOLDER / "tensor_map.h"
        newest = max(path.stat().st_mtime for path in sources)
        if not library.exists() or library.stat().st_mtime < newest:
            include = [f"-I{path}" for path in nvidia.include_dirs]
            made = library.with_suffix(".tmp")
            command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
            subprocess.run([*command, *include, source, "-o", made], check=True)
            made.replace(library)
            link = folder / "libcuda.so"
            link.unlink(missing_ok=True)
            link.symlink_to(library.name)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    with mock.patch.object(knobs.nvidia, "libcuda_path", str(folder)):
        return loaded.stand_in, nvidia.CudaUtils()


@contextlib.contextmanager
def executing(capability: int, seed: int = 0) -> Iterator[Driver]:
    """Execute Triton's kernels on the machine, with tensors of the CPU.

    Args:
        capability: 90 compiles for sm_90.
        seed: of the order of blocks and warps, and of when copies land.

    Raises:
        MachineError: from a launch, if the kernel does something that is wrong, with the line.
    """
    from triton import compiler
    from triton.runtime.driver import driver

    gpu = Driver(capability, seed)
    with (
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(compiler, "compile", gpu.keeping_text(compiler.compile)),
        contextlib.closing(gpu),
    ):
        yield gpu
