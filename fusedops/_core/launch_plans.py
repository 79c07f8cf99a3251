"""Records what a Triton launcher does, so that the compiled router repeats it without Python.

A launcher is a function of shapes, strides, dtypes, alignment and plain numbers: for arguments of
one signature it makes the same allocations and launches the same kernels with the same numbers.
``record`` runs it once under a dispatch mode and writes these down as integers, which
``csrc/launch_plan.cpp`` reads and repeats; the router keeps them by signature.

What cannot be repeated blindly is not recorded, and Python serves such calls as before: values that
were read back to the host and shapes that depend on values, global state (``depends_on``), scratch
memory, clusters, kernels that Triton interprets.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops._core import env
from fusedops._core.dtypes import SCALAR_TYPES

_ALLOCATE, _VIEW, _CALL, _LAUNCH = range(4)
_ADDRESS, _CONSTANT, _MAP = range(3)
_NONE, _TENSOR, _INT, _DOUBLE, _BOOL, _INTS, _BOOLS, _TENSORS, _DEVICE, _TEXT = range(10)
_LAYOUTS = {torch.strided: 0}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROED = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_UNFORESEEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Integers of a plan, and the texts that they name: torch operators, and arguments of these.
Plan = tuple[list[int], list[str]]

_active = threading.local()
_kept: dict[int, Any] = {}  # kernels by function: Triton may unload the code of one that is gone
_PATCHING = threading.RLock()


class NotRepeatable(Exception):
    """A launcher did something that a plan has no step for; the message names it."""


def depends_on(what: str) -> None:
    """Say that a launcher read ``what``, global state: what it does now may be wrong later."""
    recorder = getattr(_active, "recorder", None)
    if recorder is not None:
        recorder.refuse(f"it depends on {what}")


def record(
    args: Sequence[Any], launcher: Callable[..., Any], num_returns: int
) -> tuple[Any, Plan | str]:
    """Run a launcher and return its result, with its plan or why there is none.

    ``args`` are those of the registered op in the order of its schema, by which it returns
    ``num_returns`` tensors.
    """
    if env.triton_interpreted():
        return launcher(*args), "Triton interprets its kernels"
    recorder = _Recorder(args)
    with _noting_launches(recorder), recorder:
        result = launcher(*args)
    try:
        return result, recorder.plan(result, num_returns)
    except NotRepeatable as error:
        return result, str(error)


class _Recorder(TorchDispatchMode):
    """Notes what is allocated, viewed and called of torch, and kernels' launches.

    Every tensor that a launcher meets is a place in a slot: an argument's, or one of an allocation.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()
        self._tensors: list[Any] = list(args)  # by slot; alive, so that no id comes twice
        self._places: dict[int, tuple[int, int]] = {}  # id -> slot, bytes behind its address
        for slot, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                self._places.setdefault(id(arg), (slot, 0))
        self._num_args = len(args)
        self._views: list[torch.Tensor] = []  # alive as well
        self._steps: list[list[int]] = []
        self._texts: list[str] = []
        self._refusal: str | None = None
        self._nested = False

    def refuse(self, reason: str) -> None:
        """Give up, but let the launcher go on."""
        self._refusal = self._refusal or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._nested = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._nested = False
        try:
            self._note(func, args, kwargs or {}, result)
        except NotRepeatable as error:
            self.refuse(str(error))
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        if _UNFORESEEN & set(func.tags) or not all(
            isinstance(tensor, torch.Tensor) for tensor in results
        ):
            raise NotRepeatable(f"it reads back what {func} returns")
        if func in _ALLOCATIONS or func in _ZEROED:
            self._allocate(result, zeroed=func in _ZEROED)
        elif func.is_view and all(_share_memory(tensor, args[0]) for tensor in results):
            slot, _ = self._place(args[0])
            start = _first_byte(self._tensors[slot])
            for view in results:
                self._places.setdefault(id(view), (slot, _first_byte(view) - start))
                self._views.append(view)
        else:
            self._call(func, args, kwargs, results)

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]
    ) -> None:
        """Note a call of a torch operator, with every argument of its schema."""
        if any(result.device != self._device() for result in results):
            raise NotRepeatable(f"{func} copies to another device")
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        values = [
            number
            for argument in arguments
            for number in self._encoded(given.get(argument.name, argument.default_value))
        ]
        # An operator in place returns a tensor that has its slot.
        slots = [-1 if id(result) in self._places else self._add(result) for result in results]
        name = ".".join(filter(None, (func._schema.name, func._schema.overload_name)))
        self._steps.append([_CALL, self._text(name), len(arguments), *values, len(slots), *slots])

    def _text(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def _encoded(self, value: Any) -> list[int]:
        """Return the integers of an argument of a torch operator."""
        if value is None:
            return [_NONE]
        if isinstance(value, torch.Tensor):
            return [_TENSOR, self._materialized(value)]
        if isinstance(value, bool):
            return [_BOOL, int(value)]
        if isinstance(value, float):
            return [_DOUBLE, _bits("fp64", value)]
        if isinstance(value, torch.device):
            return [_DEVICE, _DEVICES[value.type], -1 if value.index is None else value.index]
        tables: tuple[Any, ...] = (SCALAR_TYPES, _LAYOUTS, _MEMORY_FORMATS)
        for table in tables:
            if type(value) is type(next(iter(table))) and value in table:
                return [_INT, table[value]]
        if isinstance(value, int):
            return [_INT, value]
        if isinstance(value, str):
            return [_TEXT, self._text(value)]
        if isinstance(value, tuple | list):
            if value and all(isinstance(element, torch.Tensor) for element in value):
                return [_TENSORS, len(value), *(self._materialized(element) for element in value)]
            if value and all(type(element) is bool for element in value):
                return [_BOOLS, len(value), *map(int, value)]
            if all(type(element) is int for element in value):
                return [_INTS, len(value), *value]
        raise NotRepeatable(f"it calls a torch operator with {value!r}")

    def launch(self, kernel: Any, arguments: dict[str, Any], grid: Sequence[int]) -> None:
        """Note a launch of a compiled kernel, with its arguments by name and one to three sizes.

        Triton's launcher skips one of no programs, which the driver refuses; so does a plan.
        """
        if self._nested or 0 in grid:
            return
        try:
            self._steps.append(self._launched(kernel, arguments, grid))
        except NotRepeatable as error:
            self.refuse(str(error))

    def _launched(self, kernel: Any, arguments: dict[str, Any], grid: Sequence[int]) -> list[int]:
        facts = kernel.metadata
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid"):
            if getattr(facts, name, 0):
                raise NotRepeatable(f"{facts.name} has {name}")
        if getattr(facts, "launch_pdl", False) or facts.num_ctas != 1:
            raise NotRepeatable(f"{facts.name} is launched in clusters or with another kernel")
        maps = iter(getattr(facts, "tensordesc_meta", None) or ())
        parameters: list[list[int]] = []
        for name, kind in kernel.src.signature.items():
            if kind == "constexpr":
                continue
            value = arguments[name]
            if kind.startswith("tensordesc"):
                parameters += self._descriptor(value, next(maps, None))
            elif kind.startswith("*"):
                parameters.append([_ADDRESS, *self._place(value)])
            else:
                parameters.append([_CONSTANT, _bits(kind, value)])
        parameters += [[_CONSTANT, 0]] * 2  # the scratch memory of kernels and of profilers
        _kept[kernel.function] = kernel
        sizes = [*grid, 1, 1][:3]
        launch = [kernel.function, *sizes, 32 * facts.num_warps, facts.shared, len(parameters)]
        return [_LAUNCH, *launch, *(number for parameter in parameters for number in parameter)]

    def _descriptor(self, descriptor: Any, facts: Any) -> list[list[int]]:
        """Return the parameters of a tensor descriptor: its map, then shape and strides."""
        if facts is None or facts.get("fp4_padded") or facts.get("is_im2col"):
            raise NotRepeatable("it has a tensor descriptor of another kind than tiles")
        if getattr(descriptor, "round_f32_to_tf32", False):
            raise NotRepeatable("it has a tensor descriptor that rounds to tf32")
        size = facts["elem_size"]
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        bytes_between = [stride * size for stride in strides[:-1]]
        # Behind the outermost dim comes nothing: the driver does not read this one.
        outermost = shape[0] * (bytes_between[0] if bytes_between else size)
        numbers = [_MAP, *self._place(descriptor.base)]
        numbers += [_host_dtype(facts["elem_type"]), facts["swizzle"]]
        numbers.append(int(descriptor.padding == "nan"))
        for values in (shape, [outermost, *bytes_between], list(facts["block_size"])):
            numbers += [len(values), *reversed(values)]
        return [numbers, *([_CONSTANT, value] for value in (*shape, *strides))]

    def _place(self, tensor: Any) -> tuple[int, int]:
        place = self._places.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None
        if place is None:
            raise NotRepeatable("a kernel gets a tensor of unknown origin")
        return place

    def _allocate(self, tensor: torch.Tensor, *, zeroed: bool) -> int:
        if tensor.device != self._device() or tensor.dtype not in SCALAR_TYPES:
            raise NotRepeatable(f"it allocates {tensor.dtype} on {tensor.device}")
        self._steps.append([_ALLOCATE, slot := self._add(tensor), SCALAR_TYPES[tensor.dtype]])
        self._steps[-1] += [int(zeroed), *_geometry(tensor)]
        return slot

    def _materialized(self, tensor: Any) -> int:
        """Return a slot whose tensor is this one, geometry and all."""
        slot, offset = self._place(tensor)
        root = self._tensors[slot]
        if root is tensor:
            return slot
        if root.dtype != tensor.dtype:
            raise NotRepeatable(f"it views {root.dtype} as {tensor.dtype}")
        view = self._add(tensor)
        self._steps.append([_VIEW, view, slot, offset // tensor.element_size()])
        self._steps[-1] += _geometry(tensor)
        return view

    def _add(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        self._places[id(tensor)] = (len(self._tensors) - 1, 0)
        return len(self._tensors) - 1

    def _device(self) -> torch.device:
        return next(tensor.device for tensor in self._tensors if isinstance(tensor, torch.Tensor))

    def plan(self, result: Any, num_returns: int) -> Plan:
        """Return the plan; raise ``NotRepeatable`` where there can be none.

        ``result`` is what the launcher returned: a tensor, or a tuple of tensors and ``None``.
        """
        if self._refusal is not None:
            raise NotRepeatable(self._refusal)
        results = result if isinstance(result, tuple) else (result,) * num_returns
        if len(results) != num_returns:
            raise NotRepeatable(f"it returns {len(results)} results, not {num_returns}")
        slots = [-1 if tensor is None else self._materialized(tensor) for tensor in results]
        present = [slot for slot in slots if slot >= 0]
        if len(set(present)) != len(present) or any(slot < self._num_args for slot in present):
            raise NotRepeatable("it returns a tensor twice, or one that it was given")
        device = self._device()
        head = [_DEVICES[device.type], -1 if device.index is None else device.index]
        steps = [number for step in self._steps for number in step]
        code = [*head, len(self._tensors), len(self._steps), *steps, len(slots), *slots]
        return code, self._texts


_DEVICES = {"cpu": 0, "cuda": 1}  # c10::DeviceType


def _share_memory(tensor: torch.Tensor, other: Any) -> bool:
    """Return whether a tensor is a view of another: ``to`` and its like may copy as well."""
    return (
        isinstance(other, torch.Tensor)
        and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def _first_byte(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its memory; ``data_ptr`` is 0 for an empty one."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _geometry(tensor: torch.Tensor) -> list[int]:
    return [tensor.dim(), *tensor.shape, tensor.dim(), *tensor.stride()]


def _bits(kind: str, value: Any) -> int:
    """Return a kernel's number as the signed integer whose 8 bytes begin with it."""
    if kind in ("fp32", "f32"):
        return int.from_bytes(struct.pack("<f", value), "little")
    if kind == "fp64":
        return int.from_bytes(struct.pack("<d", value), "little", signed=True)
    if kind[0] in "iu" and kind[1:].isdigit():
        return (int(value) + 2**63) % 2**64 - 2**63
    raise NotRepeatable(f"a kernel takes a number of type {kind}")


def _host_dtype(dtype: int) -> int:
    """Return a CUtensorMapDataType from Triton's number for its side of the kernel."""
    from triton.backends.nvidia import driver

    return int(driver.TMA_DTYPE_DEVICE_TO_HOST[dtype])


@contextlib.contextmanager
def _noting_launches(recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder of each kernel that this thread launches inside the block."""
    from triton.runtime.jit import JITFunction

    mine = threading.get_ident()
    with _PATCHING:
        launch = JITFunction.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
            if threading.get_ident() == mine and not warmup:
                names = dict(zip(self.arg_names, args, strict=False)) | kwargs
                recorder.launch(kernel, names, grid(names) if callable(grid) else grid)
            return kernel

        JITFunction.run = run
        _active.recorder = recorder
        try:
            yield
        finally:
            _active.recorder = None
            JITFunction.run = launch
