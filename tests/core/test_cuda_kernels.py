"""The CUDA C++ kernels as nvcc compiles them, executed on a CPU (tools/ptx_machine/nvcc.py).

Every call runs with its blocks and warps in several orders. What a launch must not do stops it with
an error: see ``FAULTS``. What may differ by is the error budget of every op.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import native
import pytest
import torch
from comparing import assert_same_bits, assert_within_budget
from ptx_machine import nvcc

import fusedops
from fusedops._core import backends, extension
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import (
    ComparisonResult,
    difference_from_truth,
    floating,
    fresh,
    incoming,
    run,
)
from fusedops.specs.make import randn

OPS = [name for name in nvcc.kernel_names() if not name.endswith("_backward")]
# The compilation of all kernels takes a minute of a processor.
pytestmark = pytest.mark.ci(every=7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        path = nvcc.build()
    except native.CannotBuildError as problem:
        pytest.skip(str(problem))
    torch.ops.load_library(str(path))
    for name in nvcc.kernel_names():  # no kernel of the library stays without a schema
        extension.private_operator("fusedops_ptx_machine", name)
    loaded = ctypes.CDLL(str(path))
    loaded.ptx_cuda_fault.restype = ctypes.c_char_p
    loaded.ptx_cuda_fault.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    return loaded


@dataclass
class Machine:
    """Runs ops by the CUDA kernels on the machine."""

    library: ctypes.CDLL

    def configure(self, seed: int = 0, processors: int = 2, capability: int = 90) -> None:
        """Set the order of blocks and warps, and the GPU."""
        self.library.ptx_cuda_configure(capability, processors, ctypes.c_uint64(seed))

    def run(self, spec: Spec, sample: Sample) -> ComparisonResult:
        """Run the op and its gradients, on tensors made under watch; it must not change them."""
        before = [tensor.detach().clone() for tensor in sample.tensors]
        with fusedops.use_backend("cuda"):
            result = run(spec.op, sample)
        assert_same_bits(list(sample.tensors), before)
        return result


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The backend "cuda" runs on the machine, and new tensors are watched."""
    usual = backends._implementation

    def implementation(kernels: backends.Kernels, backend: str, backward: bool) -> Any:
        if backend != "cuda":
            return usual(kernels, backend, backward)
        name = kernels.name + "_backward" * backward
        return extension.private_operator("fusedops_ptx_machine", name)

    monkeypatch.setattr(backends, "_unsupported", lambda *_: None)
    monkeypatch.setattr(backends, "_implementation", implementation)
    library.ptx_cuda_watch(True)
    machine = Machine(library)
    machine.configure()
    yield machine
    library.ptx_cuda_watch(False)


@pytest.mark.parametrize("capability", nvcc.CAPABILITIES)
def test_the_machine_knows_every_instruction(machine: Machine, capability: int) -> None:
    machine.configure(capability=capability)
    message = ctypes.create_string_buffer(4096)
    count = machine.library.ptx_cuda_parse_all(message, len(message))
    assert count > 200, message.value.decode()


@functools.cache
def samples(op: str, dtype: torch.dtype) -> dict[str, Sample]:
    return {sample.name: sample for sample in all_specs()[op].samples(CPU, dtype)}


def assert_matches_float64(
    machine: Machine, spec: Spec, sample: Sample, orders: int = 1, **gpu: int
) -> None:
    """Check values and gradients; every further order gives the same bits."""
    machine.configure(**gpu)
    actual = machine.run(spec, sample)
    assert_within_budget(actual, spec, sample)
    for seed in range(1, orders):
        machine.configure(seed, **gpu)
        assert_same_bits(machine.run(spec, sample), actual)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in samples(op, torch.float32)]
)
def test_samples_match_float64(machine: Machine, op: str, name: str, dtype: torch.dtype) -> None:
    sample = fresh(samples(op, dtype)[name])
    large = sample.args[0].numel() > 10_000  # seconds an order
    assert_matches_float64(machine, all_specs()[op], sample, 2 if large else 3)


@pytest.mark.parametrize("op", OPS)
def test_kernels_for_sm_80_match_float64(machine: Machine, op: str) -> None:
    sample = fresh(next(iter(samples(op, torch.bfloat16).values())))
    assert_matches_float64(machine, all_specs()[op], sample, capability=80)


def norm_call(op: str, rows: int, columns: int, dtype: torch.dtype) -> Sample:
    new = functools.partial(randn, device=CPU, dtype=dtype)
    data = [new(rows, columns), *([new(rows, columns, key="r")] * op.startswith("add"))]
    parameters = [new(columns, shift=1.0, key="w"), *([new(columns, key="b")] * ("layer" in op))]
    return Sample("rows", (*data, (columns,), *parameters))


# On both sides of each size at which launchers change the kernel, its block or its packs.
COLUMNS = {
    37: (3,),
    21: (248, 255),
    9: (256, 257, 264),
    5: (512, 520, 1024, 1032),
    13: (2048, 2049, 2056),
    2: (4096, 4097, 4104),
    1: (8192, 8193, 16384, 16392, 32768),
    3: (8200,),
}
NORMS = ("layer_norm", "add_rms_norm")
ROWS = [(rows, columns) for rows, sizes in COLUMNS.items() for columns in sizes]


def norm_marks(op: str, size: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Of a size with one norm, half of the dtypes are in the first tier."""
    number = NORMS.index(op) + ROWS.index(size) + DTYPES.index(dtype)
    return [pytest.mark.slow] * (number % 2)


@pytest.mark.parametrize(
    ("op", "size", "dtype"),
    [
        pytest.param(*call, marks=norm_marks(*call))
        for call in itertools.product(NORMS, ROWS, DTYPES)
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_norms_of_every_kernel(
    machine: Machine, op: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    assert_matches_float64(machine, all_specs()[op], norm_call(op, *size, dtype), processors=1)


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("op", ["layer_norm", "bias_gelu"])
def test_sums_over_rows_on_small_and_large_gpus(machine: Machine, op: str, processors: int) -> None:
    sample = norm_call("layer_norm", 700, 64, torch.float32)
    if op == "bias_gelu":
        sample = Sample("rows", (sample.args[0], sample.args[3]))
    assert_matches_float64(machine, all_specs()[op], sample, 3, processors=processors)


def vector_call(op: str, dtype: torch.dtype) -> Sample:
    """Return a call whose sizes fit packs, so that addresses alone decide."""
    new = functools.partial(randn, device=CPU, dtype=dtype)
    match op:
        case "bias_gelu":
            return Sample("packs", (new(7, 64), new(64, key="b")))
    return norm_call(op, 7, 64, dtype)


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor one element further in memory: dense, and not aligned for packs."""
    longer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    moved = longer[1:].view(tensor.shape).copy_(tensor.detach())
    return moved.requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("op", OPS)
def test_addresses_that_do_not_fit_packs(machine: Machine, op: str, dtype: torch.dtype) -> None:
    spec, sample = all_specs()[op], vector_call(op, dtype)
    for position in range(len(sample.tensors) + 1):  # the last: the incoming gradients
        moved = [off_by_one(t) if i == position else t for i, t in enumerate(sample.tensors)]
        places = {id(old): new for old, new in zip(sample.tensors, moved, strict=True)}
        call = sample.map(lambda tensor, places=places: places[id(tensor)])
        with fusedops.use_backend("cuda"):
            outputs = floating(spec.op(*call.args, **call.kwargs))
            grads = [off_by_one(grad) for grad in incoming(outputs)]
            if position < len(moved):
                grads = incoming(outputs)
            results = torch.autograd.grad(outputs, call.leaves, grads)
        actual = ComparisonResult([output.detach() for output in outputs], list(results))
        found = difference_from_truth(actual, spec, sample)
        assert found is None, f"tensor {position}: {found}"


@pytest.mark.parametrize("op", OPS)
def test_one_gradient_alone_has_the_same_bits(machine: Machine, op: str) -> None:
    spec = all_specs()[op]
    first = next(iter(samples(op, torch.bfloat16).values()))
    for sample in (vector_call(op, torch.float32), fresh(first)):
        whole = machine.run(spec, sample)
        for index, leaf in enumerate(sample.leaves):
            alone = sample.map(lambda t, leaf=leaf: t if t is leaf else t.detach())
            (grad,) = machine.run(spec, alone).grads
            assert_same_bits([grad], [whole.grads[index]])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("output", [0, 1], ids=["normed", "summed"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4, 1.0])
def test_one_output_alone_has_a_gradient(
    machine: Machine, op: str, output: int, dropout_p: float, dtype: torch.dtype
) -> None:
    whole = all_specs()[op]

    def one_of(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)[output]

    spec = replace(whole, op=one_of(whole.op), eager=one_of(whole.eager))
    for columns in (64, 33):
        x, r, shape, *_ = norm_call(op, 7, columns, dtype).args
        sample = Sample("one", (x, r, shape), {"dropout_p": dropout_p}, random=dropout_p > 0)
        assert_matches_float64(machine, spec, sample, 2)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("columns", [3, 33, 64, 2048])
def test_dropout_drops_what_the_cpu_drops(machine: Machine, columns: int, placed: bool) -> None:
    x, r, shape, *parameters = norm_call("add_layer_norm", 8, columns, torch.float32).args
    given: dict[str, Any] = {"dropout_p": 0.3}
    if placed:  # two runs of two pieces of two rows
        place = torch.tensor((4, 30, 2, 7, 21)) * columns
        given["seed"] = torch.cat((torch.tensor((2**50, 3)), place))
    whole = all_specs()["add_layer_norm"]
    summed = replace(whole, op=lambda *args, **kwargs: whole.op(*args, **kwargs)[1])
    for spec, more in ((whole, parameters), (summed, [])):
        sample = Sample("dropout", (x, r, shape, *more), given, random=True)
        actual = machine.run(spec, sample)
        with fusedops.use_backend("cpp"):
            want = run(spec.op, sample)
        assert_same_bits([actual.outputs[-1]], [want.outputs[-1]])
        grad_x = [result.grads[0] == 0 for result in (actual, want)]
        assert torch.equal(*grad_x) and grad_x[0].any() and not grad_x[0].all()


def test_more_rows_than_a_grid_is_high(machine: Machine) -> None:
    new = functools.partial(randn, device=CPU, dtype=torch.bfloat16)
    sample = Sample("high", (new(65535 * 16 + 5, 1), new(1, key="b")))
    assert_matches_float64(machine, all_specs()["bias_gelu"], sample)


FAULTS = {
    1: "which nobody has written",
    2: "without a barrier between",
    3: "the block waits at two barriers",
    4: "a part of the lanes of a warp arrives",
    5: "names lanes that do not execute it",
    6: "which the mask does not name",
    7: "512 bytes behind the begin of 'a tensor', which has 512",
    8: "which is not aligned",
    9: "which nobody has written",
    10: "4 bytes of shared memory at 252 of 252",
    11: "which another block writes too",
    12: "4 bytes of shared memory at 256 of 256",
    13: "blocks of 1025 threads",
    14: "a grid of (1, 65536, 1) blocks",
    15: "writes the same byte without a barrier between",
    16: "writes the same byte without a barrier between",
}


@pytest.mark.ci(every=1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [0, *FAULTS])
def test_each_fault_is_found(machine: Machine, fault: int, seed: int) -> None:
    machine.configure(seed)
    numbers = torch.arange(128.0)
    said = machine.library.ptx_cuda_fault(fault, numbers.data_ptr(), 128).decode()
    if fault == 0:
        assert said == "" and torch.equal(numbers, torch.arange(128.0))
    else:
        assert FAULTS[fault] in said


def test_a_fault_is_an_error_of_the_op(machine: Machine) -> None:
    machine.library.ptx_cuda_watch(False)
    elsewhere = torch.ones(8)
    with fusedops.use_backend("cuda"), pytest.raises(RuntimeError, match="of global memory at"):
        fusedops.bias_gelu(elsewhere, torch.ones(8))


def test_gradients_of_no_rows_have_the_dtype_of_the_rows(machine: Machine) -> None:
    """The kernels read such rows in float32, because the incoming gradient has more digits."""
    rows = torch.ones(0, 8, dtype=torch.bfloat16)
    numbers = (None, (8,), 1e-6, 0.0, "hf", 0.0, torch.bfloat16, [True] * 3)
    backward = extension.private_operator("fusedops_ptx_machine", "add_rms_norm_backward")
    grads = backward(rows.float(), None, rows, torch.ones(8), torch.ones(0), *numbers)
    assert grads[1].dtype == torch.bfloat16 and grads[2].dtype == torch.float32
