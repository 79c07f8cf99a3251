"""Recorded launches are those of Triton's own path, byte for byte, for other tensors too.

``tests/stand_in_driver.py`` stands for a GPU: Triton compiles for it, and its driver code runs down
to ``cuLaunchKernelEx``. What torch operators inside a plan compute is compared in value: there a
plan is made of the reference of an op, which launches nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_driver
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops._core import backends, env, extension, launch_plans
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter launches nothing", allow_module_level=True)
if extension.cpu_library() is not None:
    pytest.skip("the compiled library repeats plans", allow_module_level=True)

SPECS = all_specs()
FIRST = ("rms_norm", "attention", "attention_decode", "linear_act", "cross_entropy", "swiglu")
HEADER = 40  # bytes of function, grid, threads, shared memory, stream

Call = tuple[str, tuple[Any, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stand_in")


@pytest.fixture
def gpu(folder: Path) -> Iterator[stand_in_driver.Gpu]:
    with stand_in_driver.installed(folder) as gpu, gpu.plans(), torch.no_grad():
        fusedops.reset_counters()
        yield gpu
        gpu.fail(0)


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Let launchers run in Python, and keep what they allocate: no address comes twice."""
    kept = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            kept.append(func(*args, **(kwargs or {})))
            return kept[-1]

    original = backends._implementation

    def implementation(*args: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with Keep():
                return original(*args)(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch, fusedops.use_backend("triton"):
        patch.setattr(backends, "_implementation", implementation)
        yield


def calls_of(name: str, dtype: torch.dtype) -> list[Call]:
    """Return the operators, forward and backward, that the first sample of an op calls."""
    with fusedops.use_backend("torch"), torch.enable_grad():
        sample = fresh(SPECS[name].samples(torch.device("cpu"), dtype)[0])
        with RecordOps() as recorded:
            run(SPECS[name].op, sample)
    with_triton = []
    for func, args in recorded.calls:
        op = func._opname
        kernels = backends._KERNELS.get(op.removesuffix("_backward"))
        if kernels is not None and kernels.triton is not None:
            with_triton.append((op, args))
    return with_triton


def moved(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments at other addresses, laid out as they were."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        other = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return other.copy_(value)

    return tuple(map(move, args))


def operator(name: str) -> Any:
    return getattr(torch.ops.fusedops, name).default


def launches(gpu: stand_in_driver.Gpu, args: tuple[Any, ...], call: Callable[[], Any]) -> list[Any]:
    """Return what a call launches, with the number of an allocation for its address.

    The last element is the geometry of the results, with the numbers of theirs.
    """
    gpu.clear()
    result = call()
    results = result if isinstance(result, tuple) else (result,)
    known = {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    numbers: dict[int, int] = {}

    def named(address: int) -> Any:
        if address in known or address < 2**32:
            return address
        return ("allocation", numbers.setdefault(address, len(numbers)))

    found: list[Any] = []
    for text in gpu.launches():
        parameters = text[HEADER:]
        words = [parameters[i : i + 8] for i in range(0, len(parameters), 8)]
        found.append((text[:HEADER], [named(int.from_bytes(word, "little")) for word in words]))
    geometry = [
        None if each is None else (each.dtype, each.shape, each.stride()) for each in results
    ]
    return [*found, geometry]


def compare(gpu: stand_in_driver.Gpu, name: str, args: tuple[Any, ...]) -> int:
    """Compare the launches of a plan with those of Triton's path; return how many there are."""
    op = operator(name)
    for _ in range(2):
        op(*moved(args))
    other = moved(args)
    before = backends.counters().get((name, "triton"), 0)
    planned = launches(gpu, other, lambda: op(*other))
    assert sum(torch.ops.fusedops_native.planned_counts(name)) == 1, "there is no plan"
    assert backends.counters()[name, "triton"] == before + 1
    with in_python():
        wanted = launches(gpu, other, lambda: op(*other))
    assert planned == wanted
    return len(planned) - 1


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in SPECS],
)
def test_a_plan_launches_what_python_launches(gpu: stand_in_driver.Gpu, name: str) -> None:
    if name in ("adamw", "square_sums"):
        pytest.skip("lists of tensors have no plan")
    calls = calls_of(name, torch.bfloat16)
    assert sum(compare(gpu, op, args) for op, args in calls) > 0


@pytest.mark.parametrize("name", ["attention", "linear_act"])
def test_tensor_maps_are_encoded_as_in_python(gpu: stand_in_driver.Gpu, name: str) -> None:
    query = torch.randn(2, 200, 4, 64, dtype=torch.bfloat16).transpose(1, 2)  # heads inside
    calls: dict[str, tuple[Any, ...]] = {
        "attention": (query, query * 2, query * 3, *[None] * 4, 0.0, 0.1, -1, 0, 0.0, True),
        "linear_act": (*torch.randn(2, 256, 128, dtype=torch.bfloat16), None, "gelu", False),
    }
    assert compare(gpu, name, calls[name]) == 1
    (text,) = gpu.launches()
    assert len(text) > HEADER + 2 * 128, "no tensor map was launched"


def test_products_in_float32_obey_torch_and_have_no_plan(
    gpu: stand_in_driver.Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    (name, args), *_ = calls_of("linear_act", torch.float32)
    with caplog.at_level("DEBUG", "fusedops"):
        for _ in range(3):
            operator(name)(*args)
    assert sum(torch.ops.fusedops_native.planned_counts(name)) == 0
    assert "torch.backends.cuda.matmul.fp32_precision" in caplog.text
    compare(gpu, *calls_of("layer_norm", torch.float32)[0])


def test_one_tensor_for_two_arguments_has_a_plan_of_its_own(gpu: stand_in_driver.Gpu) -> None:
    name, args = calls_of("attention", torch.bfloat16)[0]
    query, key = args[0], args[1]
    same = (query, key, key, *args[3:])
    for _ in range(2):
        operator(name)(*same)  # its launcher sees one tensor
    compare(gpu, name, (query, key, torch.randn_like(key), *args[3:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.randn(x.shape[0] + 1, *x.shape[1:], dtype=x.dtype),
        lambda x: torch.randn(x.shape, dtype=torch.float16),
        lambda x: x.T.contiguous().T,
        lambda x: torch.randn(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),  # at 2 bytes more
    ],
    ids=["size", "dtype", "strides", "alignment"],
)
def test_another_signature_has_another_plan(
    gpu: stand_in_driver.Gpu, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    args = (x, [64], None, 1e-5, 0.0, "torch")
    name = "rms_norm"
    for _ in range(3):
        operator(name)(*args)
    assert torch.ops.fusedops_native.planned_counts(name) == [1, 0]
    other = (change(x), *args[1:])
    operator(name)(*other)
    assert torch.ops.fusedops_native.planned_counts(name) == [1, 0], "it took the other's plan"


@pytest.fixture
def references(gpu: stand_in_driver.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans be made of the ops' references: torch operators, which compute here."""

    def implementation(kernels: Any, backend: str, backward: bool) -> Callable[..., Any]:
        return kernels.backward if backward else kernels.forward

    monkeypatch.setattr(backends, "_implementation", implementation)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("adamw", "square_sums")])
def test_torch_operators_of_a_plan_compute_what_they_did(name: str, dtype: torch.dtype) -> None:
    """New numbers, old indices: of these a reference reads some on the host.

    References that read none have a plan.
    """
    for op, args in calls_of(name, dtype):
        for _ in range(2):
            operator(op)(*args)
        other = tuple(
            torch.randn_like(arg)
            if isinstance(arg, torch.Tensor) and arg.is_floating_point()
            else arg
            for arg in args
        )
        found = operator(op)(*other)
        if name in ("rms_norm", "layer_norm", "linear_glu", "swiglu", "rotary_embedding"):
            assert sum(torch.ops.fusedops_native.planned_counts(op)) > 0
        with fusedops.use_backend("torch"):
            wanted = operator(op)(*other)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_launch_that_fails_names_the_error(gpu: stand_in_driver.Gpu) -> None:
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    for _ in range(3):
        torch.ops.fusedops.gelu(x, "none")
    gpu.fail(700)
    with pytest.raises(RuntimeError, match="launch of a kernel failed: CUDA_ERROR_OF_THE_STAND_IN"):
        torch.ops.fusedops.gelu(x, "none")


def test_a_launch_of_no_programs_is_skipped(
    gpu: stand_in_driver.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Triton's launcher: the driver refuses a grid with a 0."""
    from fusedops.kernels import gelu

    def launcher(x: torch.Tensor, approximate: str) -> torch.Tensor:
        output = torch.empty_like(x)
        options = {"ACTIVATION": gelu.GELU_VARIANTS[approximate], **gelu._LAUNCH}
        for programs in (1, 0):
            gelu._forward_kernel[(programs,)](x, output, x.numel(), **options)
        return output

    monkeypatch.setattr(backends, "_implementation", lambda *_: launcher)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    for _ in range(3):
        gpu.clear()
        torch.ops.fusedops.gelu(x, "none")
        assert len(gpu.launches()) == 1
    assert sum(torch.ops.fusedops_native.planned_counts("gelu")) == 1


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (lambda x: x * x.sum().item(), "reads back"),
        (lambda x: x[x > 0], "reads back"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "unknown origin"),
        (lambda x: x, "was given"),
        (lambda x: (y := x + 1, y), "twice"),
    ],
    ids=["item", "shape of values", "constant", "argument", "twice"],
)
def test_what_cannot_be_repeated_is_not(
    gpu: stand_in_driver.Gpu, launcher: Callable[[torch.Tensor], Any], reason: str
) -> None:
    x = torch.randn(4, 3)
    result, plan = launch_plans.record((x,), launcher, 2 if reason == "twice" else 1)
    assert isinstance(plan, str)
    assert re.search(reason, plan)
    torch.testing.assert_close(result, launcher(x))
