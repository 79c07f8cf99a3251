"""Every launch of a Triton kernel as a GPU sees it, without one: arguments, guards, compilation.

The launchers run on fake tensors of a second GPU. A fake has no values: what would wait for the
device raises. Each launch goes through Triton's own ``run`` up to the compiler's front end, with
the types and specialisations of its arguments, and with all numbers 1: a size of 1 is a constant of
Python there, and a tensor like all sizes in the interpreter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops._core import architecture, backends, env, extension
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import fresh, run

triton = pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

GPU = torch.device("cuda", 1)
SPECS = list(all_specs().values())
CAPABILITY = 90
LIMITS = (2**31 - 1, 65535, 65535)

_current = 0  # the current GPU
_launches = 0


class _Guard:
    """Stands for ``torch.cuda.device``."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index

    def __enter__(self) -> None:
        global _current
        self.before, _current = _current, self.index

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self.before


class _Driver:
    """Stands for Triton's, which asks torch for the current GPU."""

    def get_current_device(self) -> int:
        return _current

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)


def _compile(source: Any, *, target: Any, options: dict[str, Any], **_: Any) -> Any:
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


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        from triton.runtime.jit import MockTensor

        global _launches
        _launches += 1
        assert _current == GPU.index, f"{self.__name__} is launched on another GPU"
        for size, limit in itertools.zip_longest(grid, LIMITS, fillvalue=1):
            assert 0 < size <= limit, f"{self.__name__}: grid {grid}"

        def mocked(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            assert value.device == GPU, f"{self.__name__} gets a tensor on {value.device}"
            return MockTensor(value.dtype, value.shape)

        args = tuple(mocked(arg) for arg in args)
        kwargs = {name: mocked(arg) for name, arg in kwargs.items()}
        original(self, *args, grid=grid, warmup=True, **kwargs)
        numbers = {each.name for each in self.params if not each.is_constexpr}
        by_name = dict(zip(self.arg_names, args, strict=False)) | kwargs
        ones = {
            name: 1 if name in numbers and type(value) is int else value
            for name, value in by_name.items()
        }
        original(self, grid=grid, warmup=True, **ones)

    return launch


class _NoCopies(TorchDispatchMode):
    """Refuses copies from the host's memory to a GPU, which wait for it or are forgotten in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        host = [each for each in tensors if each.device.type == "cpu" and each.dim() > 0]
        if isinstance(result, torch.Tensor) and result.device.type == "cuda":
            assert not host, f"{func} brings a tensor from the host"
        return result


class _WithoutGuards(TorchFunctionMode):
    """Does what Python's bindings do under a guard of the GPU, which a torch for CPUs lacks."""

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
        func = {torch.arange: aten.arange, torch.Tensor.__invert__: aten.bitwise_not}.get(
            func, func
        )
        return func(*args, **(kwargs or {}))

    def _item(self, found: torch.Tensor, indices: Any) -> torch.Tensor:
        aten, dim = torch.ops.aten, 0
        for index in indices if isinstance(indices, tuple) else (indices,):
            if isinstance(index, int):
                found = aten.select(found, dim, index)
                continue
            if isinstance(index, slice):
                found = aten.slice(found, dim, index.start, index.stop, index.step or 1)
            elif index is None:
                found = aten.unsqueeze(found, dim)
            elif isinstance(index, torch.Tensor):
                found = aten.index(found, [*[None] * dim, index])
            else:
                raise NotImplementedError(f"index {index}")
            dim += 1
        return found


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand for a machine with two GPUs, of which the first is current."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from fusedops.kernels import _attention_launch, _launch

    facts = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", _Guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "_active", _Driver())
    monkeypatch.setattr(triton.compiler, "compile", _compile)
    monkeypatch.setattr(JITFunction, "run", _checked(JITFunction.run))
    yield
    _launch.num_programs.cache_clear()
    _attention_launch.generation_of.cache_clear()
    architecture.compute_capability.cache_clear()


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))


def launch_everything(spec: Spec, sample: Sample) -> None:
    """Launch the forward and the backward of all that a call runs."""
    with _Record() as recorded, fusedops.use_backend("torch"):
        run(spec.op, sample)
    launch(recorded.calls)


def launch(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Launch what was recorded."""
    for name, args in calls:
        backward = name.endswith("_backward")
        kernels = backends._KERNELS.get(name.removesuffix("_backward"))
        if kernels is None or kernels.triton is None:
            continue
        with FakeTensorMode():
            fakes = tuple(_fake(arg) for arg in args)
            if backends._unsupported_triton(kernels, GPU, fakes, backward) is None:
                with _WithoutGuards(), _NoCopies():
                    backends._implementation(kernels, "triton", backward)(*fakes)


def _fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


@functools.cache
def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    return all_specs()[name].samples(torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    "count", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["first", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_launch_is_one_that_a_gpu_takes(
    spec: Spec, dtype: torch.dtype, count: int | None
) -> None:
    before = _launches
    for sample in samples(spec.name, dtype)[:count]:
        launch_everything(spec, fresh(sample))
    assert _launches > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["grouped_mm", "moe_mlp"])
def test_gradients_that_are_added_to_buffers_are_launched(name: str, dtype: torch.dtype) -> None:
    """No sample has buffers: generic tests compare gradients, and there the weights get none."""
    sample = fresh(samples(name, dtype)[0])
    weights = [each for each in sample.args if isinstance(each, torch.Tensor) and each.dim() == 3]
    into = [torch.zeros_like(each, dtype=torch.float32) for each in weights]
    given = {"grad_weights_into": into} if name == "moe_mlp" else {"grad_weight_into": into[0]}
    before = _launches
    with _Record() as recorded, fusedops.use_backend("torch"):
        all_specs()[name].op(*sample.args, **{**sample.kwargs, **given}).sum().backward()
    launch([call for call in recorded.calls if call[0] == f"{name}_add_gradients"])
    assert _launches > before


@pytest.mark.parametrize("told", ["nothing", "fp32_precision", "allow_tf32", "high"])
def test_float32_products_are_exact_unless_torch_is_told_otherwise(told: str) -> None:
    from fusedops.kernels import _launch

    try:
        if told == "fp32_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        elif told == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif told == "high":
            torch.set_float32_matmul_precision("high")
        assert _launch.precision(torch.float32) == ("ieee" if told == "nothing" else "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _launch.precision(torch.float32) == "ieee"
