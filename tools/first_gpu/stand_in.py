"""A GPU that leaves launches out, for the rehearsal: all else is the code that a GPU runs.

``FIRST_GPU_STAND_IN`` names a library that stands for ``libcuda.so.1`` (``stand_in_cuda.cpp``);
Triton's own driver and launcher load it. Tensors lie on the CPU. A Triton kernel's launcher gets
fakes of them on a GPU, compiles, and launches through Triton to that library; the values then are
the reference's. ``FIRST_GPU_PLANTED`` has errors to make: ``[[part of an item's name, kind],
...]``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# Kinds that the library makes of the next launch, as CUDA numbers them; -1 never ends.
CUDA_ERRORS = {"illegal access": 700, "assert": 710, "hang": -1}
KINDS = (*CUDA_ERRORS, "compile", "python", "memory", "signal")
CAPABILITY = 90
TESTS = ("tests/ops/test_all_ops.py", "tests/ops/test_hot_configurations.py")


def read_planted(path: Path) -> list[list[str]]:
    """Return the errors that a file asks for.

    Raises:
        ValueError: a kind is none of ``KINDS``.
    """
    errors = json.loads(path.read_text())
    for _, kind in errors:
        if kind not in KINDS:
            raise ValueError(f"{path}: {kind!r} is no kind of error; known: {', '.join(KINDS)}")
    return errors


def install_if_asked(*, driver: bool = True) -> None:
    """Stand in for a GPU in this process if the environment asks for it.

    Args:
        driver: whether Triton launches too, to the library.
    """
    path = os.environ.get("FIRST_GPU_STAND_IN")
    if path is not None:
        _install(Path(path), driver)


def present() -> bool:
    """Return whether the environment asks for the stand-in."""
    return "FIRST_GPU_STAND_IN" in os.environ


def planted() -> str | None:
    """Return the kind of error that is to be made in the item that runs."""
    item = os.environ.get("FIRST_GPU_ITEM", "")
    errors = json.loads(os.environ.get("FIRST_GPU_PLANTED", "[]"))
    return next((kind for part, kind in errors if part in item), None)


def fail_on_the_host() -> None:
    """Make the planted error of an item if it is none of CUDA's."""
    kind = planted()
    if kind == "python":
        raise TypeError("planted")
    if kind == "signal":
        os.kill(os.getpid(), 11)
    if kind == "memory":
        blocks = []
        while True:
            blocks.append(bytearray(os.urandom(1 << 20)) * 64)


def _install(path: Path, driver: bool) -> None:
    os.environ["TRITON_LIBCUDA_PATH"] = str(path.parent)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.stand_in_note(ctypes.c_bool(False))
    _present_torch(library)
    _plant_compile_errors()
    if driver:
        _launch_on_fakes(library)


def _present_torch(library: ctypes.CDLL) -> None:
    """Let torch say that there is a GPU, and wait for the library."""

    def synchronize(device: Any = None) -> None:
        if code := library.cuCtxSynchronize():
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'').decode()}")

    major, minor = divmod(CAPABILITY, 10)
    facts = SimpleNamespace(
        name="stand-in", multi_processor_count=132, total_memory=1 << 37, major=major, minor=minor
    )
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.synchronize = synchronize
    cuda.get_device_capability = lambda device=None: (major, minor)
    cuda.get_device_properties = lambda device=None: facts
    cuda.set_per_process_memory_fraction = lambda fraction, device=None: None

    import hot_samples

    from fusedops.specs import all_specs

    # "cuda" means the CPU here.
    make_hot = hot_samples.made
    hot_samples.made = lambda call, dtype, device: make_hot(call, dtype, torch.device("cpu"))
    for name, spec in all_specs().items():

        def samples(_: Any, dtype: torch.dtype, make: Any = spec.samples) -> Any:
            return make(torch.device("cpu"), dtype)

        all_specs()[name] = dataclasses.replace(spec, samples=samples)


def _plant_compile_errors() -> None:
    import triton

    compile_really = triton.compiler.compile

    def compile(source: Any, *args: Any, **kwargs: Any) -> Any:
        if planted() == "compile":
            raise triton.runtime.errors.PTXASError("planted")
        return compile_really(source, *args, **kwargs)

    triton.compiler.compile = compile


def _in_memory(value: Any) -> Any:
    """Return a tensor in memory for a fake one: a launch looks at its address."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=_in_memory(value.base))
    if not isinstance(value, torch.Tensor):
        return value
    count = value.untyped_storage().nbytes() // value.element_size()
    place = value.shape, value.stride(), value.storage_offset()
    with unset_fake_temporarily():
        return torch.empty(count, dtype=value.dtype).as_strided(*place)


def _launch_on_fakes(library: ctypes.CDLL) -> None:
    """Let Triton's launchers run for CPU tensors: on fakes, and then the reference."""
    import fake_gpu
    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from fusedops._core import backends

    run = JITFunction.run

    def launch(kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        library.stand_in_plant(CUDA_ERRORS.get(planted() or "", 0))
        given = {name: _in_memory(value) for name, value in arguments.items()}
        run(kernel, grid=grid, warmup=False, **given)

    present = fake_gpu.present(CAPABILITY, compile=triton.compiler.compile, observe=launch)
    present.__enter__()
    stand_in: Any = CudaDriver.__new__(CudaDriver)
    stand_in.get_device_capability = torch.cuda.get_device_capability
    stand_in.get_current_device = driver.active.get_current_device
    stand_in.get_current_stream = driver.active.get_current_stream
    driver._active = stand_in  # the launcher asks the active driver for the next two
    stand_in.utils, stand_in.launcher_cls = CudaUtils(), CudaLauncher
    inside = False
    unsupported, implementation = backends._unsupported_triton, backends._implementation

    def unsupported_here(kernels: Any, device: Any, args: Any, backward: bool) -> str | None:
        return unsupported(kernels, fake_gpu.GPU, args, backward)

    def implementation_here(kernels: Any, backend: str, backward: bool) -> Any:
        if backend != "triton" or inside:
            return implementation(kernels, backend, backward)

        def stands_in(*args: Any) -> Any:
            nonlocal inside
            fail_on_the_host()
            inside = True
            try:
                fake_gpu.launch([(kernels.name + "_backward" * backward, args)])
            finally:
                inside = False
            return implementation(kernels, "torch", backward)(*args)

        return stands_in

    backends._unsupported_triton = unsupported_here
    backends._implementation = implementation_here
    keep.append(present)


keep: list[Any] = []  # what must not be closed before the process ends
