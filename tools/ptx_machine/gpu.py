"""A GPU whose kernels the machine executes: Triton compiles, launches and gets real values.

    with executing(90) as gpu:
        kernel[grid](x, y, x.numel(), BLOCK=1024)  # tensors of the CPU
    print(gpu.kernels)

Triton's own runtime specialises the arguments, compiles for the GPU that is asked for, and expands
tensor descriptors. The machine takes the place of the driver's load and launch.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ptx_machine import Program

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

_devices = itertools.count(1000)
_texts: dict[bytes, str] = {}  # machine code, as Triton loads it -> its PTX


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


def tensor_map(
    address: int,
    swizzle: int,
    element_bytes: int,
    element_type: int,
    block: Sequence[int],
    shape: Sequence[int],
    strides: Sequence[int],
    padding: int,
) -> bytes:
    """Return what stands for ``cuTensorMapEncodeTiled``: ``TensorMap`` of ``async.cpp``."""
    if address % 16 or any(stride * element_bytes % 16 for stride in strides[:-1]):
        raise ValueError(f"a tensor map wants 16 bytes: address {address:#x}, strides {strides}")

    def five(values: Sequence[int]) -> list[int]:
        return [*values, *[0] * (5 - len(values))]

    sizes = (*five(block), *five(shape), *five(strides))
    packed = struct.pack(
        "<QBBBB10I5Q", address, swizzle, element_bytes, len(shape), padding, *sizes
    )
    return packed.ljust(128, b"\0")


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
        self._device = next(_devices)  # Triton keeps kernels by it, which keep their driver
        self.utils = SimpleNamespace(
            load_binary=self._load,
            fill_tma_descriptor_tiled=tensor_map,
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
        )

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
            _texts[kernel.kernel] = kernel.asm["ptx"]
            return kernel

        return compile_and_keep

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        text = self.change(_texts[binary])
        program = self.programs[text] = Program(text)
        return program, program, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what Triton's runtime calls to launch a kernel."""
        from triton.backends.nvidia import driver as nvidia
        from triton.tools.tensor_descriptor import TensorDescriptor

        descriptors = getattr(metadata, "tensordesc_meta", None)
        kinds = nvidia.expand_signature(source.signature.values(), descriptors)

        def launch(*base: Any) -> None:
            (x, y, z, program, described), values = base[:5], base[-1]
            pairs = [
                (kind, value)
                for kind, value in zip(kinds, values, strict=True)
                if kind != "constexpr"
            ]
            tensors = [value for _, value in pairs if isinstance(value, torch.Tensor)]
            program.run(
                grid=(x, y, z),
                threads=32 * metadata.num_warps,
                arguments=[argument(kind, value) for kind, value in pairs],
                tensors=[*tensors, *described, *self.tensors],
                shared=metadata.shared,
                seed=self.seed + len(self.kernels),
            )
            self.kernels.append(metadata.name)

        expanded = nvidia.wrap_handle_tensordesc(launch, source.signature, descriptors)

        def call(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            # Behind the program: metadata of kernel and launch, and two hooks.
            described = [value.base for value in rest[4:] if isinstance(value, TensorDescriptor)]
            expanded(x, y, z, program, described, rest[4:])

        return call


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
    ):
        yield gpu
