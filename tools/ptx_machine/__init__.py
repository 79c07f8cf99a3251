"""Executes PTX on the CPU: what Triton and nvcc compile for a GPU, without one.

    from ptx_machine import Program
    Program(text).run(grid=(4, 1, 1), threads=128, arguments=[x, y, 1000], tensors=[x, y])

The machine (C++, in this folder) executes warps of 32 lanes in an order that a seed decides. Global
memory is that of tensors on the host; every access is compared with them. Shared memory begins
unwritten, and reads and writes of it by two warps must have a barrier between them. What is wrong
raises ``MachineError`` with kernel, block, warp, lanes, line of the PTX and line of Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parents[1] / "build" / "ptx_machine"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-Wall")


class MachineError(RuntimeError):
    """A kernel does what a GPU does not promise, or what the machine does not know."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the machine."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.ptx_parse.restype = ctypes.c_void_p
    return loaded


def library_path() -> Path:
    """Return the machine's library, compiled if its sources have changed."""
    sources = sorted(FOLDER.glob("*.cpp"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*sources, *sorted(FOLDER.glob("*.h"))]:
        digest.update(path.read_bytes())
    target = BUILD / f"{digest.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # one of several processes compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(sources, target)
    return target


def _compile(sources: Sequence[Path], target: Path) -> None:
    objects = [BUILD / f"{path.stem}.o" for path in sources]
    running = [
        subprocess.Popen(["g++", *FLAGS, "-c", path, "-o", to])
        for path, to in zip(sources, objects, strict=True)
    ]
    failures = [process.wait() for process in running]
    if any(failures):
        message = "the machine does not compile: see the messages of g++ above"
        pytest = sys.modules.get("pytest")
        if pytest is not None:  # each test would compile it again
            pytest.exit(message)
        raise MachineError(message)
    made = target.with_suffix(".tmp")
    subprocess.run(["g++", *FLAGS, "-shared", *objects, "-o", made], check=True)
    made.replace(target)


class Program:
    """A kernel of a PTX module.

    Raises:
        MachineError: the text has an instruction that the machine does not know, with its line.
    """

    def __init__(self, text: str) -> None:
        self._library = library()
        message = ctypes.create_string_buffer(4096)
        handle = self._library.ptx_parse(text.encode(), message, len(message))
        if not handle:
            raise MachineError(message.value.decode())
        self._handle = ctypes.c_void_p(handle)
        self.parameters: list[tuple[int, int]] = []  # bytes and offset of each
        for index in range(self._library.ptx_num_parameters(self._handle)):
            size, offset = ctypes.c_int(), ctypes.c_int()
            self._library.ptx_parameter(
                self._handle, index, ctypes.byref(size), ctypes.byref(offset)
            )
            self.parameters.append((size.value, offset.value))

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.ptx_free(self._handle)

    def executed_lines(self) -> set[int]:
        """Return the lines of the PTX that ran in at least one lane so far."""
        lines = (ctypes.c_int * 100_000)()
        count = self._library.ptx_executed_lines(self._handle, lines, len(lines))
        return set(lines[:count])

    def run(
        self,
        *,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[bytes],
        tensors: Sequence[torch.Tensor],
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        """Execute all blocks.

        Args:
            grid: blocks in x, y and z.
            threads: of a block.
            arguments: the bytes of each parameter; those behind the last are zero.
            tensors: whose memory the kernel may access.
            shared: bytes of dynamic shared memory.
            seed: decides the order of blocks and warps, and when copies land.

        Raises:
            MachineError: the kernel does something that is wrong.
        """
        size = max((offset + size for size, offset in self.parameters), default=0)
        memory = bytearray(size)
        for (length, offset), argument in zip(self.parameters, arguments, strict=False):
            if len(argument) != length:
                raise MachineError(f"a parameter of {length} bytes gets {len(argument)}")
            memory[offset : offset + length] = argument
        ranges = memory_of(tensors)
        count = len(ranges)
        message = ctypes.create_string_buffer(4096)
        failed = self._library.ptx_run(
            self._handle,
            (ctypes.c_int * 3)(*grid),
            (ctypes.c_int * 3)(threads, 1, 1),
            shared,
            (ctypes.c_uint8 * max(size, 1)).from_buffer(memory or bytearray(1)),
            size,
            (ctypes.c_uint64 * count)(*(memory.begin for memory in ranges)),
            (ctypes.c_uint64 * count)(*(memory.end for memory in ranges)),
            (ctypes.c_uint64 * count)(*(memory.unit for memory in ranges)),
            (ctypes.c_char_p * count)(*(memory.name.encode() for memory in ranges)),
            count,
            ctypes.c_uint64(seed),
            message,
            len(message),
        )
        if failed:
            raise MachineError(message.value.decode())


@dataclass
class Memory:
    """The memory of a storage; accesses are watched in units of its smallest elements."""

    begin: int
    end: int
    unit: int
    name: str


def memory_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    """Return the memory of each storage of ``tensors``."""
    storages: dict[int, Memory] = {}
    for index, tensor in enumerate(tensors):
        storage: Any = tensor.untyped_storage()
        begin, unit = storage.data_ptr(), tensor.element_size()
        name = f"argument {index}: {list(tensor.shape)} {str(tensor.dtype)[6:]}"
        memory = Memory(begin, begin + storage.nbytes(), unit, name)
        memory = storages.setdefault(begin, memory)
        memory.unit = min(memory.unit, unit)
    return list(storages.values())
