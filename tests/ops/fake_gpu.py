"""Launches of Triton kernels as a GPU of any capability sees them, without one.

Launchers run on fake tensors of a second GPU. A fake has no values: what would wait for the
device raises. A launch goes through Triton's own ``run`` with the types and specialisations of its
arguments, up to where the compiler would begin: ``present`` takes what does that instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops._core import backends, extension
from fusedops._core.capability import compute_capability
from fusedops.specs import Sample
from fusedops.specs.comparison import run
from fusedops.specs.recorder import RecordOps
from fusedops.testing.stand_in_cuda import answers
from fusedops.testing.stand_in_device import StandIn

GPU = torch.device("cuda", 1)
LIMITS = (2**31 - 1, 65535, 65535)
Compile = Callable[..., Any]
# Kernel, arguments by name, grid.
Observe = Callable[[Any, dict[str, Any], tuple[int, ...]], None]


# Of ``torch.cuda``: what launchers and Triton ask, on a machine with two GPUs.
ASKED = (
    *("Event", "current_device", "current_stream", "device", "get_device_capability"),
    *("get_device_properties", "is_current_stream_capturing"),
)
_num_launches = 0


def launches() -> int:
    """Return how many kernels have been launched so far in this process."""
    return _num_launches


class _Driver:
    """Stands for Triton's, which asks torch for the current GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def front_end(source: Any, *, target: Any, options: dict[str, Any], **_: Any) -> Any:
    """Run the compiler's front end, which is what knows the kernel's language."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    assert module.verify()
    return SimpleNamespace(module=module)


def mocked(value: Any) -> Any:
    """Return what a launch is given for a tensor: its dtype, shape and alignment."""
    from triton.runtime.jit import MockTensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Mock(MockTensor):
        def data_ptr(self) -> int:
            return value.storage_offset() * value.element_size()

    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=mocked(value.base))
    if not isinstance(value, torch.Tensor):
        return value
    assert value.device == GPU, f"a launch gets a tensor on {value.device}"
    return Mock(value.dtype, value.shape)


def _checked(original: Callable[..., Any], observe: Observe | None, ones: bool) -> Compile:
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        global _num_launches
        _num_launches += 1
        assert torch.cuda.current_device() == GPU.index, (
            f"{self.__name__} is launched on another GPU"
        )
        for size, limit in itertools.zip_longest(grid, LIMITS, fillvalue=1):
            assert 0 < size <= limit, f"{self.__name__}: grid {grid}"
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if observe is not None:
            observe(self, given, tuple(grid))
        given = {name: mocked(value) for name, value in given.items()}
        original(self, grid=grid, warmup=True, **given)
        if ones:
            numbers = {parameter.name for parameter in self.params if not parameter.is_constexpr}
            of_one = {name: 1 for name in numbers if type(given.get(name)) is int}
            original(self, grid=grid, warmup=True, **given | of_one)

    return launch


@contextlib.contextmanager
def present(
    capability: int = 90,
    *,
    compile: Compile = front_end,
    observe: Observe | None = None,
    ones: bool = False,
) -> Iterator[None]:
    """Stand for a machine with two GPUs, of which the first is current.

    Args:
        capability: of both, 90 for 9.0.
        compile: stands for ``triton.compiler.compile``.
        observe: called with the kernel, its arguments by name and the grid of each launch.
        ones: whether each launch is compiled a second time, with all numbers 1: a size of 1 is a
            constant of Python there, and a tensor like all sizes in the interpreter.
    """
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from fusedops.kernels import _attention_launch, _descriptors, _launch, _pointer_table

    of_cuda = answers(2, divmod(capability, 10))
    first_gpu = StandIn(torch.device("cuda", 0), record=lambda event: None)
    caches = (
        _launch.num_programs.cache_clear,
        _attention_launch.generation_of.cache_clear,
        _descriptors.available.cache_clear,
        compute_capability.cache_clear,
        *_clears(_pointer_table),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(first_gpu.as_current())
        for owner, name, value in (
            (extension, "triton_missing", lambda: None),
            *((torch.cuda, name, of_cuda[name]) for name in ASKED),
            (driver, "_active", _Driver(capability)),
            (triton.compiler, "compile", compile),
            (JITFunction, "run", _checked(JITFunction.run, observe, ones)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for clear in caches:
            stack.callback(clear)
            clear()
        yield


def _clears(module: Any) -> list[Callable[[], None]]:
    """Return what empties everything that a module keeps: there are fakes in it afterwards."""
    own = [var for name, var in vars(module).items() if not name.startswith("__")]
    dicts = [each.clear for each in own if isinstance(each, dict)]
    return dicts + [each.cache_clear for each in own if hasattr(each, "cache_clear")]


class _NoCopies(TorchDispatchMode):
    """Refuses copies from the host's memory to a GPU, which wait for it or are forgotten in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        host = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim() > 0]
        if isinstance(result, torch.Tensor) and result.device.type == "cuda":
            assert not host, f"{func} brings a tensor from the host"
        return result


class _WithoutGuards(TorchFunctionMode):
    """Does what Python's bindings do under a guard of the GPU, which a torch for CPUs lacks."""

    _same = {
        torch.arange: torch.ops.aten.arange,
        torch.empty_like: torch.ops.aten.empty_like,
        torch.Tensor.copy_: torch.ops.aten.copy_,
        torch.Tensor.__invert__: torch.ops.aten.bitwise_not,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is torch.Tensor.contiguous:
            whole = args[0].is_contiguous()
            return args[0] if whole else aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is torch.Tensor.__setitem__ and isinstance(args[1], torch.Tensor):
            return aten.index_put_(args[0], [args[1]], args[2])
        if func is torch.Tensor.__setitem__:
            return aten.copy_(self._item(args[0], args[1]), args[2])
        if func is torch.Tensor.__getitem__:
            return self._item(args[0], args[1])
        if func is torch.Tensor.__iter__:
            return iter(aten.unbind(args[0]))
        return self._same.get(func, func)(*args, **(kwargs or {}))

    def _item(self, found: torch.Tensor, indices: Any) -> torch.Tensor:
        aten, dim = torch.ops.aten, 0
        for index in indices if isinstance(indices, tuple) else (indices,):
            if isinstance(index, int):
                found = aten.select(found, dim, index)
                continue
            if isinstance(index, slice):
                found = aten.slice(found, dim, index.start, index.stop, index.step or 1)
            elif isinstance(index, torch.Tensor):
                found = aten.index(found, [*[None] * dim, index])
            else:
                assert index is None, f"index {index}"
                found = aten.unsqueeze(found, dim)
            dim += 1
        return found


class _HostIsReal(TorchFunctionMode):
    """Runs what is on the host as it is, and makes fakes of what goes to a GPU.

    Tables of addresses and sizes are made on the host, where launchers look at them.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        kwargs.pop("pin_memory", None)
        leaves = pytree.tree_leaves((args, kwargs))
        faked = any(isinstance(leaf, FakeTensor) or leaf == GPU for leaf in leaves)
        with self.fakes if faked else contextlib.nullcontext():
            return func(*args, **kwargs)


_OF_LISTS = FakeTensorMode(allow_non_fake_inputs=True)


def calls_of(
    function: Callable[[], Any], backend: str = "torch"
) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the calls of registered operators that a function makes on the CPU."""
    with RecordOps() as recorded, fusedops.use_backend(backend):
        function()
    return [(operator._opname, args) for operator, args in recorded.calls]


def launch_everything(op: Callable[..., Any], sample: Sample) -> None:
    """Launch the forward and the backward of all that a call runs."""
    launch(calls_of(lambda: run(op, sample)))


def launch(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Launch what was recorded, where a Triton kernel runs it."""
    for name, args in calls:
        backward = name.endswith("_backward")
        kernels = backends._KERNELS.get(name.removesuffix("_backward"))
        if kernels is None or kernels.triton is None:
            continue
        lists = any(isinstance(arg, list) and arg and torch.is_tensor(arg[0]) for arg in args)
        # What launchers over lists keep from one call to the next must be of one mode.
        mode = _OF_LISTS if lists else FakeTensorMode()
        with mode:
            fakes = pytree.tree_map(_fake, args)
        with _HostIsReal(mode) if lists else mode:
            if backends._unsupported_triton(kernels, GPU, fakes, backward) is None:
                with _WithoutGuards(), contextlib.nullcontext() if lists else _NoCopies():
                    backends._implementation(kernels, "triton", backward)(*fakes)


def _fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    length = offset + last + 1 if value.numel() else offset
    memory = torch.empty_strided((length,), (1,), dtype=value.dtype, device=GPU)
    return torch.ops.aten.as_strided(memory, value.shape, value.stride(), offset)
