"""Makes Triton's interpreter (3.6 to 3.9) as unkind as a GPU may be, for tests.

The interpreter runs the programs of a grid in the order of their numbers, in memory that is often
zero, and reads whatever lies beside a tensor. With this module, imported before kernels run, a
kernel raises ``Hazard`` (inside an ``InterpreterError``) that

* uses an address outside the tensor that its pointer was made from, or not aligned to its element;
* reads or writes, in one program, what another program of the launch writes, unless both write the
  same bits;
* reads what the same program wrote before with no ``tl.debug_barrier()`` between: another thread
  may have written it.

What else depends on luck shows in values: programs run in an order drawn anew for every launch;
what torch leaves uninitialised, and what a masked load without ``other`` leaves out, is NaN or the
largest integer. ``tl.dot`` wants the depth of 16 of matrix instructions. Atomics count as writes.
What the interpreter makes of bfloat16 and of masks is mended too.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


class Hazard(AssertionError):
    """A kernel did what a GPU need not forgive."""


@dataclass(frozen=True)
class Region:
    """The bytes between a tensor's first and last element."""

    name: str
    low: int
    high: int
    storage: int  # of which regions may overlap

    def __str__(self) -> str:
        return f"{self.name} ({self.high - self.low} bytes)"


@dataclass(frozen=True)
class Access:
    """What one program read or wrote at once: addresses of elements of ``size`` bytes."""

    number: int  # of the accesses of a launch
    program: int
    epoch: int  # how many barriers the program has passed
    line: str
    region: Region
    size: int
    addresses: np.ndarray
    bits: Any  # an array of the values written, or None

    def __str__(self) -> str:
        return f"{self.line} (program {self.program}, {self.region.name})"


@dataclass
class Launch:
    """One run of a grid: which program runs, in which order, and what they did."""

    kernel: str
    names: Iterator[str]  # of the arguments that are not yet converted
    regions: list[Region] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    program: int = 0
    epoch: int = 0
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)

    def line(self) -> str:
        """Return the line of the kernel that runs."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__ or "/triton/" in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


_launch = Launch("", iter(()))
_listed: list[Region] = []
_patched_for: set[int] = set()  # the globals whose Triton modules this launch has patched
_has_other = False  # whether the load that is being interpreted was given ``other``
_drawn = random.Random(0)
shuffle: Callable[[list[int]], None] = _drawn.shuffle
_arrange = shuffle


def restart() -> None:
    """Begin the sequence of orders again: a test then meets the same ones whenever it runs."""
    _drawn.seed(0)


@contextlib.contextmanager
def order(arrange: Callable[[list[int]], None]) -> Iterator[None]:
    """Run programs in the order that ``arrange`` brings the list of their numbers into."""
    global _arrange
    before, _arrange = _arrange, arrange
    try:
        yield
    finally:
        _arrange = before


@contextlib.contextmanager
def reachable(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let kernels use these tensors too, whose addresses they find in a table."""
    _listed.extend(_region("a listed tensor", tensor) for tensor in tensors)
    try:
        yield
    finally:
        _listed.clear()


def _around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put a function around ``owner.name``, which becomes its first argument."""
    original = getattr(owner, name)

    def install(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, wrapper)

    return install


@_around(GridExecutor, "__call__")
def _run(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    global _launch
    names = (name for name in self.arg_names if name not in self.constexprs)
    _launch = Launch(self.fn.__name__, names, list(_listed))
    _patched_for.clear()
    original(self, *args, **kwargs)
    _find_races(_launch)


_numpy_dtypes: dict[Any, Any] = {}


@_around(interpreter, "_get_np_dtype")
def _numpy_dtype(original: Any, dtype: Any) -> Any:
    # The interpreter makes a table of all types at each call, and each operation has several calls.
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return original(scalar)
    if scalar not in _numpy_dtypes:
        _numpy_dtypes[scalar] = original(scalar)
    return _numpy_dtypes[scalar]


@_around(interpreter, "_patch_lang")
def _patch_once(original: Any, function: Any) -> Any:
    # At each call of a device function the interpreter patches Triton's modules again. Here what a
    # launch has patched stays so until the launch ends.
    if id(function.__globals__) in _patched_for:
        return interpreter._LangPatchScope()
    _patched_for.add(id(function.__globals__))
    return original(function)


@_around(interpreter, "_implicit_cvt")
def _convert(original: Any, argument: Any) -> Any:
    converted, name = original(argument), next(_launch.names, "?")
    if isinstance(argument, torch.Tensor):
        converted.handle.region = _region(name, argument)
        _launch.regions.append(converted.handle.region)
    return converted


def _region(name: str, tensor: torch.Tensor) -> Region:
    low, size = tensor.data_ptr(), tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    count = tensor.numel() and 1 + sum((n - 1) * stride for n, stride in pairs)
    return Region(name, low, low + count * size, tensor.untyped_storage().data_ptr())


@_around(InterpreterBuilder, "set_grid_dim")
def _set_dim(original: Any, self: Any, *sizes: int) -> None:
    original(self, *sizes)
    _launch.order = list(range(sizes[0] * sizes[1] * sizes[2]))
    _arrange(_launch.order)


@_around(InterpreterBuilder, "set_grid_idx")
def _set_index(original: Any, self: Any, x: int, y: int, z: int) -> None:
    _, ny, nz = self.grid_dim
    number = _launch.program = _launch.order[(x * ny + y) * nz + z]
    _launch.epoch = 0
    original(self, number // (ny * nz), number // nz % ny, number % nz)


@_around(InterpreterBuilder, "create_barrier")
def _barrier(original: Any, self: Any) -> Any:
    _launch.epoch += 1
    return original(self)


@_around(TritonSemantic, "load")
def _load_whole(original: Any, self: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
    # The interpreter takes one element that is zero for None, and gives the builder no ``other``.
    global _has_other
    _has_other = other is not None
    return original(self, pointer, mask, other, *rest)


@_around(InterpreterBuilder, "create_masked_load")
def _load(
    original: Any, self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
) -> Any:
    _launch.reads += _accesses(pointers, mask)
    if other is None and not _has_other:
        dtype = pointers.get_element_ty()
        values = np.full(pointers.data.shape, _poison(dtype), interpreter._get_np_dtype(dtype))
        other = TensorHandle(values, dtype)
    return original(self, pointers, mask, other, *rest, **named)


@_around(InterpreterBuilder, "create_masked_store")
def _store(original: Any, self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    _launch.writes += _accesses(pointers, mask, value)
    return original(self, pointers, value, mask, *rest)


@_around(InterpreterBuilder, "create_atomic_rmw")
def _rmw(original: Any, self: Any, op: Any, *args: Any) -> Any:
    _launch.writes += _accesses(args[0], args[2], args[1])
    return original(self, op, *args)


# The interpreter keeps bfloat16 as raw uint16: its ``dot`` multiplies those integers, and its cast
# from float32 truncates where hardware rounds to nearest even.
def _as_float32(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bit patterns of float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


@_around(InterpreterBuilder, "create_dot")
def _dot(original: Any, self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
    return original(self, _as_float32(a), _as_float32(b), *rest)


@_around(InterpreterBuilder, "cast_impl")
def _cast(original: Any, self: Any, source: TensorHandle, target: Any) -> Any:
    to_bf16 = target.scalar == tl.bfloat16
    if source.dtype.scalar == tl.bfloat16 and not to_bf16:
        source = _as_float32(source)
        return source if target.scalar == tl.float32 else original(self, source, target)
    if source.dtype.scalar == tl.float32 and to_bf16:
        return TensorHandle(_narrow(source.data), tl.bfloat16)
    return original(self, source, target)


for _name in ("create_fp_ext", "create_fp_trunc", "create_fp_to_si", "create_fp_to_ui"):
    setattr(InterpreterBuilder, _name, lambda self, *args: self.cast_impl(*args))


@_around(InterpreterBuilder, "create_splat")
def _splat(original: Any, self: Any, shape: Any, source: TensorHandle) -> Any:
    # A comparison of two integers is an integer to the interpreter; the loads of 3.9 want a mask.
    if source.data.dtype == np.bool_:
        source = TensorHandle(source.data, tl.int1)
    return original(self, shape, source)


def _keep_region(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    regions = [arg.region for arg in args if hasattr(arg, "region")]
    if regions:
        result.region = regions[0]
    return result


for _name in ("addptr", "broadcast", "expand_dims", "reshape", "splat", "trans", "unsplat"):
    _around(InterpreterBuilder, f"create_{_name}")(_keep_region)


def _poison(dtype: Any) -> Any:
    if dtype == tl.bfloat16:
        return 0x7FC0
    kind = interpreter._get_np_dtype(dtype)
    return np.nan if kind.kind == "f" else kind.kind == "b" or np.iinfo(kind).max


def _accesses(pointers: Any, mask: Any, value: Any = None) -> list[Access]:
    """Return the checked accesses of a block of pointers: one, unless they mix several tensors'."""
    used = np.broadcast_to(mask.data, pointers.data.shape).astype(np.bool_)
    addresses = pointers.data[used]
    if addresses.size == 0:
        return []
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    bits = None
    if value is not None:
        values = np.ascontiguousarray(np.broadcast_to(value.data, pointers.data.shape)[used])
        bits = values.view(f"u{values.dtype.itemsize}").astype(np.uint64)
    line = _launch.line()
    if (addresses % size).any():
        raise Hazard(f"{_launch.kernel}, {line}: an address is not aligned to its {size} bytes")
    only: Any = getattr(pointers, "region", None)
    whole = Access(0, _launch.program, _launch.epoch, line, only, size, addresses, bits)
    found = []
    for region in _launch.regions if only is None else [only]:
        inside = (addresses >= region.low) & (addresses + np.uint64(size) <= region.high)
        if inside.any():
            number = len(_launch.reads) + len(_launch.writes)
            written = None if bits is None else bits[inside]
            part = {"region": region, "addresses": addresses[inside], "bits": written}
            found.append(replace(whole, number=number, **part))
        addresses, bits = addresses[~inside], None if bits is None else bits[~inside]
    if addresses.size:
        byte = int(addresses[0]) - (only.low if only else 0)
        where = f"{_launch.kernel}, {line}, program {_launch.program}"
        raise Hazard(f"{where}: byte {byte} is outside {only or 'all tensors'}")
    return found


def _find_races(launch: Launch) -> None:
    """Raise where the result depends on the order of programs, or of a program's threads."""
    for storage in {access.region.storage for access in launch.writes}:
        writes = [access for access in launch.writes if access.region.storage == storage]
        reads = [access for access in launch.reads if access.region.storage == storage]
        unit = min(access.size for access in (*writes, *reads))
        at = np.concatenate([_units(write, unit) for write in writes])
        parts = [write.addresses.size * (write.size // unit) for write in writes]
        which = np.repeat(np.arange(len(writes)), parts)
        bits = np.concatenate([np.repeat(each.bits, each.size // unit) for each in writes])
        order = np.argsort(at, kind="stable")
        at, which, bits = at[order], which[order], bits[order]
        program = np.array([write.program for write in writes])[which]
        twice = (at[1:] == at[:-1]) & (program[1:] != program[:-1]) & (bits[1:] != bits[:-1])
        if twice.any():
            k = int(twice.argmax())
            told = f"{writes[which[k]]} and {writes[which[k + 1]]}"
            raise Hazard(f"{launch.kernel}: {told} write different values to one address")
        places, first = np.unique(at, return_index=True)
        last = np.append(first[1:], at.size) - 1
        for read in reads:
            units = _units(read, unit)
            found = np.searchsorted(places, units).clip(max=places.size - 1)
            found = found[places[found] == units]
            for k in np.unique(which[np.concatenate([first[found], last[found]])]):
                write = writes[k]
                behind = write.epoch == read.epoch and write.number < read.number
                if write.program != read.program or behind:
                    raise Hazard(f"{launch.kernel}: {read} reads what {write} writes")


def _units(access: Access, unit: int) -> np.ndarray:
    return (access.addresses[:, None] + np.arange(0, access.size, unit).astype(np.uint64)).ravel()


interpreter.interpreter_builder.codegen_fns["min_dot_size"] = lambda left, right: (1, 1, 16)
# With warnings only: what torch has no deterministic form of is not asked for here.
torch.use_deterministic_algorithms(True, warn_only=True)
setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010 (no stub has it)
