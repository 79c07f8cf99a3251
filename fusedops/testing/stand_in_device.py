"""A GPU that is not there: tensors in host memory that say that they are on ``cuda``.

Inside of ``StandIn`` a tensor that is made on ``cuda`` has host memory and a label, and what is
computed from it has the label too. ``tensor.device`` and ``torch.cuda`` (``stand_in_cuda``) answer
as on a machine with GPUs, and operators compute on the CPU: values are real, and a training step
takes the branches, streams and copies that it takes on a GPU. What costs time there, or does not
work there, is recorded as a ``DeviceEvent``.

Not covered: what kernels do, and the threads of autograd: its nodes run on the thread that calls
``backward``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_CPU = torch.device("cpu")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# Callers that an event does not name: torch, this package of tools, and what passes calls on.
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.join(_PACKAGE, "parallel", "comm") + os.sep,
    os.path.join(_PACKAGE, "_core", "device_tensors.py"),
    os.path.join(_PACKAGE, "_core", "collectives.py"),
    os.path.join(_PACKAGE, "runtime") + os.sep,
    "<",
)


@dataclass(frozen=True)
class DeviceEvent:
    """Something that a step does with its device.

    Attributes:
        kind: ``"wait"``: the host waits for the device or for another host; ``"copy"``: an
            asynchronous copy between host and device; ``"stream"``: a stream is ordered after
            another one; ``"misplaced"``: an operator gets tensors of the host and of the device.
        what: the operator or function.
        where: ``file:line`` of the caller outside of torch.
        nbytes: that are copied.
    """

    kind: str
    what: str
    where: str
    nbytes: int = 0


def _storage(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor, of a DTensor that of its local shard.

    It keeps what this file notes on it: ``stand_in_device`` and ``is_pinned_stand_in``.
    """
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the stand-in device of a tensor, ``None`` for one in host memory."""
    return getattr(_storage(tensor), "stand_in_device", None)


def _place(tensor: torch.Tensor, device: torch.device | None) -> None:
    """Set the device of a tensor's memory; ``None`` is the host."""
    storage = _storage(tensor)
    if storage is not None:
        storage.stand_in_device = device


def _pin(tensor: torch.Tensor) -> None:
    _storage(tensor).is_pinned_stand_in = True


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(_storage(tensor), "is_pinned_stand_in", False)


class StandIn:
    """The device of one rank in one of the rank's threads.

    Args:
        device: as ``torch.device("cuda", 1)``.
        record: called with each event.

    Attributes:
        device: as the argument.
        streams: those that are current, the innermost last.
        has_exchanged: whether an operator called Python code of the rank.
        operator_device: of the operands of the operator that runs; ``None`` on the host.
        calls: functions of torch that Python has called and that run.
    """

    def __init__(self, device: torch.device, record: Callable[[DeviceEvent], None]) -> None:
        self.device = device
        self.streams: list[Any] = []
        self.has_exchanged = False
        self.operator_device: torch.device | None = None
        self.calls = 0
        self._record = record

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give the calling thread the device."""
        with self.as_current(), _Operators(), _Functions():
            yield

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Let ``torch.cuda`` answer for the device on the calling thread, and nothing else."""
        _thread.device = self
        try:
            yield
        finally:
            _thread.device = None

    def copy_of(self) -> StandIn:
        """Return one for another thread of the rank."""
        return StandIn(self.device, self._record)

    def run_exchange(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Call the kernel of an operator that communicates: Python of the rank, with modes off."""
        with torch._C._EnableTorchFunction(), _Operators(), _Functions():
            device, self.operator_device = self.operator_device, None
            try:
                return kernel(*args)
            finally:
                self.has_exchanged, self.operator_device = True, device

    def record(self, kind: str, what: str, nbytes: int = 0) -> None:
        """Record an event of the code that runs."""
        self._record(DeviceEvent(kind, what, caller(), nbytes))

    def named(self, device: Any) -> torch.device | None:
        """Return the stand-in device that an argument means, ``None`` for another device."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return None
        return self.device if device.index is None else device

    def transfer(self, tensor: torch.Tensor, to: torch.device | None, *, is_async: bool) -> None:
        """Record a copy of a tensor from host to device or, if ``to`` is ``None``, to the host."""
        what = "copy to host" if to is None else "copy to device"
        kind, note = ("copy", "") if is_async else ("wait", " from or to memory that is not pinned")
        self.record(kind, what + note, tensor.numel() * tensor.element_size())


_thread = threading.local()


def current() -> StandIn | None:
    """Return the device of the rank whose thread calls."""
    return getattr(_thread, "device", None)


def rank_device() -> StandIn:
    """Return the device of the rank whose thread calls; raise where there is none."""
    device = current()
    if device is None:
        raise RuntimeError("torch.cuda: only ranks have a stand-in device, got a call outside")
    return device


def caller() -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            base = os.path.dirname(_PACKAGE) if name.startswith(_PACKAGE) else os.getcwd()
            return f"{os.path.relpath(name, base)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Operators whose value the host needs, in addition to those that a tag of torch names.
_READS = {"aten::equal", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::bincount"}
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = {"aten::copy_", "aten::_foreach_copy_"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


@functools.cache
def _takes_groups(func: Any) -> bool:
    """Return whether an operator communicates: such a one may also take counts of the host."""
    names = {argument.name for argument in func._schema.arguments}
    return func.namespace.startswith("c10d") or not names.isdisjoint(("group", "groups"))


class _Operators(TorchDispatchMode):
    """Gives results the device of their operands, and records what operators cost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, operands)):
            return NotImplemented  # its own operators on the local shards come here
        with torch._C.DisableTorchFunction():
            stand_in = rank_device()
            device = _checked(stand_in, func, operands, args, kwargs)
            stand_in.has_exchanged = False
            before, stand_in.operator_device = stand_in.operator_device, device
            try:
                result = func(*args, **kwargs)
            finally:
                stand_in.operator_device = before
            if device is None or stand_in.has_exchanged:  # its Python has placed the results
                return result
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and all(leaf is not x for x in operands):
                    _place(leaf, device)
        return result


def _checked(
    stand_in: StandIn, func: Any, operands: list[torch.Tensor], args: Any, kwargs: Any
) -> torch.device | None:
    """Record what an operator costs; return the device of its results."""
    name = func._schema.name
    if name in _COPIES:
        _record_copies(stand_in, args, kwargs)
        return None
    if not operands:
        # Outside of Python's calls autograd makes zeros for gradients that nobody computed.
        in_backward = torch._C._current_graph_task_id() >= 0
        return stand_in.device if in_backward and not stand_in.calls else None
    devices = [device_of(operand) for operand in operands]
    device = next((place for place in devices if place is not None), None)
    if device is None:
        return None
    if name in _INDEXED:
        _record_index(stand_in, name, args)
    elif name in _READS or any(tag in func.tags for tag in _TAGS):
        stand_in.record("wait", name)
    elif not _takes_groups(func):
        for operand, place in zip(operands, devices, strict=True):
            # A scalar of the host is an argument of a kernel.
            if place is None and operand.dim() > 0 and not operand.is_meta:
                stand_in.record("misplaced", name)
                break
    return device


def _record_copies(stand_in: StandIn, args: Any, kwargs: Any) -> None:
    targets, sources, *rest = args
    non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
    if isinstance(targets, torch.Tensor):
        targets, sources = [targets], [sources]
    for target, source in zip(targets, sources, strict=True):
        to, of = device_of(target), device_of(source)
        if source.numel() == 0 or (to is None) == (of is None):
            continue
        is_pinned = _is_pinned(target if to is None else source)
        stand_in.transfer(source, to, is_async=non_blocking and is_pinned)


def _record_index(stand_in: StandIn, name: str, args: Any) -> None:
    indices = [index for index in args[1] if index is not None]
    has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    # One value is written where a mask is set, without the indices.
    is_fill = name != "aten::index" and args[2].numel() == 1
    if any(device_of(index) is None for index in indices):
        stand_in.record("wait", f"{name} with indices in host memory")
    elif has_mask and not is_fill:
        stand_in.record("wait", f"{name} with a mask")


class _Functions(TorchFunctionMode):
    """Answers for the device where Python asks, and makes tensors on it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(func, *args, **kwargs)
        stand_in, pin = rank_device(), kwargs.pop("pin_memory", False)
        device = None
        is_placed = (
            kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta"
        )
        if is_placed:
            device = stand_in.named(kwargs["device"])
            kwargs["device"] = _CPU if device is not None else kwargs["device"]
        stand_in.calls += 1
        try:
            result = func(*args, **kwargs)
        finally:
            stand_in.calls -= 1
        if pin:
            _pin(result)
        if is_placed:
            if func in (torch.tensor, torch.as_tensor) and device is not None:
                is_there = isinstance(args[0], torch.Tensor) and device_of(args[0])
                if not is_there:
                    stand_in.record("wait", f"torch.{func.__name__} of host values on a device")
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    _place(leaf, device)
        return result


def _to(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Do what ``Tensor.to`` does; first a device, ``None``, a dtype or a tensor."""
    rest = list(args)
    device: Any = kwargs.pop("device", None)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
        device = device_of(other) or other.device
        rest.insert(0, other.dtype)
    elif rest and isinstance(rest[0], torch.device | str | int | None):
        device = rest.pop(0)
    if rest and isinstance(rest[0], torch.dtype):
        kwargs["dtype"] = rest.pop(0)
    kwargs.update(zip(("non_blocking", "copy"), rest, strict=False))
    return _moved(tensor, device, **kwargs)


def _moved(
    tensor: torch.Tensor,
    device: Any,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    stand_in = rank_device()
    if tensor.is_meta or (device is not None and torch.device(device).type == "meta"):
        is_stand_in = device is not None and stand_in.named(device) is not None
        return torch.Tensor.to(tensor, device=_CPU if is_stand_in else device, copy=copy, **kwargs)
    of = device_of(tensor)
    to = of if device is None else stand_in.named(device)
    moves = (to is None) != (of is None)
    if moves and tensor.numel() > 0:
        # An asynchronous copy to the host gets pinned memory from torch.
        is_async = non_blocking and (to is None or _is_pinned(tensor))
        stand_in.transfer(tensor, to, is_async=is_async)
    result = torch.Tensor.to(tensor, copy=copy or moves, **kwargs)
    if moves:
        _place(result, to)
    return result


def _pin_memory(func: Any, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if device_of(tensor) is not None:
        raise RuntimeError("pin_memory: the tensor must be in host memory, got one on a device")
    pinned = tensor.clone()
    _pin(pinned)
    return pinned


def _read(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if device_of(tensor) is not None:
        rank_device().record("wait", f"Tensor.{func.__name__}")
    return func(tensor, *args, **kwargs)


def _deepcopy(func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    result = func(tensor, *args)
    _place(result, device_of(tensor))
    return result


def seeing_device(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback of torch that sees the device: torch calls it with the mode off."""

    def call(*args: Any) -> Any:
        with torch._C._EnableTorchFunction(), _Functions():
            return callback(*args)

    return call


def _backward(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Call autograd with the mode on, for hooks and for nodes in Python."""
    kwargs.update(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False))
    gradient = kwargs.pop("gradient", None)
    with _Functions():
        torch.autograd.backward(tensor, gradient, **kwargs)


_T: Any = torch.Tensor
# Called with the function and its arguments.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.device.__get__: lambda func, tensor, *_: device_of(tensor) or func(tensor),
    _T.is_cuda.__get__: lambda func, tensor, *_: device_of(tensor) is not None,
    _T.is_cpu.__get__: lambda func, tensor, *_: device_of(tensor) is None and func(tensor),
    _T.get_device: lambda func, tensor: getattr(device_of(tensor), "index", func(tensor)),
    _T.to: _to,
    _T.cuda: lambda _, tensor, device="cuda", **kw: _moved(tensor, device, **kw),
    _T.cpu: lambda _, tensor, **kw: _moved(tensor, "cpu", **kw),
    _T.pin_memory: _pin_memory,
    _T.is_pinned: lambda _, tensor, *__: _is_pinned(tensor),
    _T.tolist: _read,
    _T.numpy: _read,
    _T.record_stream: lambda *_: rank_device().record("stream", "Tensor.record_stream"),
    _T.__deepcopy__: _deepcopy,
    _T.backward: _backward,
}
