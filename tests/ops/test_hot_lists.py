"""Operators over lists of tensors: values against float64 arithmetic, and what they refuse.

Optimizers call them past no public function's checks, and so may anybody. Steps of many tensors
and sums of squares run on a GPU's kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hot_samples
import pytest
import torch
from comparing import assert_all_close, assert_same_bits
from reachable import reachable
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import dtypes
from fusedops.ops.adamw import Draw, TensorLists, adamw
from fusedops.ops.square_sums import square_sums
from fusedops.specs import multi_tensor_specs, tensors_in

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = (F32, BF16, torch.float16, torch.float64)
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
each_machine = pytest.mark.parametrize(
    ("backend", "device"),
    [("cpp", CPU), pytest.param("triton", CUDA, marks=pytest.mark.gpu)],
    ids=["cpp", "triton-cuda"],
)
LR, BETAS, EPS = 0.05, (0.8, 0.95), 1e-6
GAP = 7  # elements between tensors, which nobody may write
Tensors = list[torch.Tensor]
Change = Callable[[Any], Any]


def operator(name: str) -> Any:
    return getattr(torch.ops.fusedops, name).default


def arguments(name: str, sample_name: str, dtype: torch.dtype = F32) -> dict[str, Any]:
    """Return the arguments of a call by name, with tensors that nobody else has."""
    calls = multi_tensor_specs()[name].calls(CPU, dtype)
    (sample,) = [call for call in calls if call.name == sample_name]
    names = [argument.name for argument in operator(name)._schema.arguments]
    return dict(zip(names, sample.args, strict=True))


def outcome(name: str, given: Sequence[Any], backend: str, wide: bool = False) -> Tensors:
    """Return the results of a call and what it left in its arguments."""

    def copy(each: torch.Tensor) -> torch.Tensor:
        copied = each.clone(memory_format=torch.preserve_format)
        return copied.double() if wide else copied

    args = pytree.tree_map_only(torch.Tensor, copy, list(given))
    with fusedops.use_backend(backend), reachable(tensors_in(args)):
        result = operator(name)(*args)
    return [*tensors_in(args), *tensors_in(result)]


def assert_matches_float64(name: str, args: Sequence[Any], backend: str, depth: int) -> None:
    got, eager = outcome(name, args, backend), outcome(name, args, "torch")
    for mine, base, want in zip(got, eager, outcome(name, args, "torch", wide=True), strict=True):
        budget = dtypes.error_budget(base, want, mine.dtype, depth=max(depth, mine.numel()))
        assert mine.dtype == base.dtype
        assert bool(((mine.double() - want).abs() <= budget).all())


@pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", multi_tensor_specs())
def test_values_match_float64(name: str, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    for sample in multi_tensor_specs()[name].calls(CPU, dtype):
        if sample.name in ("draws", "half states"):
            continue  # random roundings: tests/optim/test_rounding.py
        if backend == "triton" and sample.name == "strides":
            continue  # the interpreter is not told of the copies that the launcher makes
        if backend == "triton" and torch.float64 in {tensor.dtype for tensor in sample.tensors}:
            continue  # no Triton kernel takes float64
        # A step is a few operations per element; a sum has up to 130 terms.
        assert_matches_float64(name, sample.args, backend, 130)


@each_machine
@pytest.mark.parametrize(
    "call",
    [call for op in ("adamw", "square_sums") for call in hot_samples.calls(op, BF16)],
    ids=lambda call: f"{call.op} {call.name}",
)
def test_hot_samples_of_lists_match_float64(
    call: hot_samples.HotCall, backend: str, device: torch.device
) -> None:
    """Sizes and addresses that 16 divides: the configurations on record."""
    sample = call.sample(hot_samples.New(device, BF16))
    assert_matches_float64(call.op, sample.args, backend, 4)


def odd_sizes(count: int) -> list[int]:
    """Return sizes of less than a block of 1024 and of several, hardly any divided by 16."""
    return [1 + 37 * i * i % 5001 for i in range(count)]


class Cut:
    """Random tensors that lie in one memory with gaps between them."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: Any, key: int) -> None:
        generator = torch.Generator().manual_seed(key)
        length = sum(sizes) + GAP * len(sizes)
        self.whole = torch.randn(length, generator=generator).to(device, dtype)
        cuts = self.whole.split([length for size in sizes for length in (size, GAP)])
        self.parts, self.gaps = list(cuts[::2]), cuts[1::2]

    def outside(self) -> torch.Tensor:
        """Return the elements of the memory that belong to none of the tensors."""
        return torch.cat(self.gaps)


def step(batch: TensorLists, backend: str, found_inf: float = 0.0) -> None:
    device = batch.params[0].device
    factor = torch.tensor(0.25, device=device, dtype=torch.float64)
    found = torch.full((1,), found_inf, device=device)
    with fusedops.use_backend(backend):
        adamw(batch, lr=LR, betas=BETAS, eps=EPS, grad_factor=factor, found_inf=found)


@each_machine
@pytest.mark.parametrize("count", [3, 400])
@pytest.mark.parametrize(
    "kinds", [(F32, BF16, F32, BF16), (F32, F32, F32, None), (BF16, BF16, F32, None)], ids=str
)
def test_a_step_of_many_tensors_matches_float64(
    kinds: tuple[torch.dtype, ...], count: int, backend: str, device: torch.device
) -> None:
    """With ``copies`` the parameters are master weights, and the model's are rounded from them."""
    sizes = odd_sizes(count)
    param, grad, state, copied = kinds
    kinds_in_order = (param, grad, state, state, copied or param)
    params, grads, firsts, squares, copies = cuts = [
        Cut(sizes, dtype, device, key) for key, dtype in enumerate(kinds_in_order, 1)
    ]
    squares.whole.abs_()
    copies.whole.copy_(params.whole)
    batch = TensorLists(
        params.parts,
        grads.parts,
        firsts.parts,
        squares.parts,
        copies=copies.parts if copied else [],
        steps=[torch.tensor(float(i % 5), device=device) for i in range(count)],
        weight_decays=[0.1 * (i % 3) for i in range(count)],
    )
    wide = TensorLists(**pytree.tree_map_only(torch.Tensor, torch.Tensor.double, vars(batch)))
    wide.copies = []  # they are rounded from the parameters
    outside = [cut.outside() for cut in cuts]
    step(batch, backend)
    step(wide, "torch")
    assert all(torch.equal(cut.outside(), left) for cut, left in zip(cuts, outside, strict=True))
    for what in ("params", "exp_avgs", "exp_avg_sqs"):
        got, want = getattr(batch, what), getattr(wide, what)
        # What rounding the truth itself takes stands for what eager torch gets.
        rounded = [true.to(mine.dtype) for mine, true in zip(got, want, strict=True)]
        assert_all_close(got, want, rounded, depth=4)
    for master, copy in zip(batch.params, batch.copies, strict=bool(batch.copies)):
        assert torch.equal(copy, master.to(copy.dtype))
    assert [each.item() for each in batch.steps] == [i % 5 + 1.0 for i in range(count)]


@each_machine
def test_a_step_with_found_inf_writes_nothing(backend: str, device: torch.device) -> None:
    sizes = odd_sizes(20)
    lists = [[part.abs() for part in Cut(sizes, F32, device, key).parts] for key in range(4)]
    steps = [torch.tensor(2.0, device=device) for _ in sizes]
    batch = TensorLists(*lists, steps=steps, weight_decays=[0.1] * len(sizes))
    before = [each.clone() for each in tensors_in(list(vars(batch).values()))]
    step(batch, backend, found_inf=1.0)
    assert all(map(torch.equal, tensors_in(list(vars(batch).values())), before))


@each_machine
def test_stochastic_rounding_draws_the_numbers_of_the_reference(
    backend: str, device: torch.device
) -> None:
    """First moments are half of the gradients, exactly, and are rounded to bfloat16."""
    many, few = sizes = [1 << 16, 333]
    moments = []
    for name, where in ((backend, device), ("torch", CPU)):
        params, grads = (Cut(sizes, F32, where, key).parts for key in (1, 2))
        zeros = [[torch.zeros_like(each, dtype=BF16) for each in grads] for _ in range(2)]
        batch = TensorLists(
            params,
            grads,
            *zeros,
            steps=[torch.zeros((), device=where) for _ in sizes],
            draws=[Draw(91, 0, many, many), Draw(91, many, few, few)],
            weight_decays=[0.0] * 2,
        )
        with fusedops.use_backend(name):
            adamw(batch, lr=LR, betas=(0.5, 0.5), eps=EPS)
        moments.append([each.cpu() for each in batch.exp_avgs])
    assert_same_bits(*moments)
    assert not torch.equal(moments[0][0], (grads[0] / 2).bfloat16()), "nothing was drawn"


@each_machine
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_sums_of_squares_of_many_tensors_match_float64(
    dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    # The second kernel adds a number for each block of 1024: three of its own blocks and more.
    sizes = [*odd_sizes(400), 0, 2 * 1024**2 + 4097]
    tensors = Cut(sizes, dtype, device, 6).parts
    with fusedops.use_backend(backend):
        got, again = square_sums(tensors), square_sums(tensors)
    want = torch.stack([tensor.double().square().sum() for tensor in tensors])
    assert torch.equal(got, again)
    budget = dtypes.error_budget(want, want, torch.float64, depth=max(sizes))
    assert bool(((got - want).abs() <= budget).all())


@each_machine
def test_a_square_that_overflows_float32_is_summed(backend: str, device: torch.device) -> None:
    with fusedops.use_backend(backend):
        (got,) = square_sums([torch.full((3000,), 2.0**100, device=device)]).tolist()
    assert got == 3000 * 2.0**200


def of_one(place: int, change: Change) -> Change:
    """Return what changes one tensor of a list."""
    return lambda given: [change(each) if i == place else each for i, each in enumerate(given)]


def with_gaps(given: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*given.shape, 3), dtype=given.dtype)[..., 1]


# What no list of a step may be, and words of the error.
WRONG_LISTS: dict[str, tuple[Change, str]] = {
    "one less": (lambda given: given[:-1], r"list of 5 tensors|weight_decays .* len\(params\) = 4"),
    "one more": (lambda given: [*given, given[0]], "list of 5 tensors|weight_decays must"),
    "half precision": (of_one(2, torch.Tensor.half), "must have dtype"),
    "integers": (of_one(0, torch.Tensor.long), "must have dtype"),
    "shape": (of_one(0, lambda given: given.new_ones(3)), r"\[.\] must be of shape"),
    "gaps": (of_one(4, with_gaps), r"\[4\] must be without gaps"),
    "strides": (of_one(1, torch.Tensor.contiguous), r"\[1\] must be without gaps and of"),
    "expanded": (of_one(4, lambda given: given[:1].expand(66)), r"\[4\] must be without gaps"),
    "device": (of_one(0, lambda given: given.to("meta")), r"\[.\] must be on (cpu|meta)"),
}
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies", "steps")
REFUSED: dict[str, tuple[str, Change, str]] = {
    **{
        f"{name}, {label}": (name, *wrong)
        for name in LISTS
        for label, wrong in WRONG_LISTS.items()
        # A step count is one number.
        if name != "steps" or label not in ("gaps", "strides", "expanded")
    },
    "no moments": ("exp_avgs", lambda _: [], "exp_avgs must be a list of 5 .* params .*got 0"),
    "maxima": ("max_exp_avg_sqs", lambda _: [torch.ones(7)], "of 5 tensors.* or empty, got 1"),
    "decays": ("weight_decays", lambda given: given[:2], "weight_decays must be such that"),
    "draws": ("draws", lambda _: [1, 0, 1], "draws must be such that"),
    "factor": ("grad_factor", lambda _: torch.ones(2), r"grad_factor must be of shape \[\] or \[1"),
    "found": ("found_inf", lambda _: torch.ones(()).int(), "found_inf must have dtype float32"),
}


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("label", REFUSED)
def test_adamw_refuses_lists_that_do_not_fit_and_writes_nothing(
    label: str, backend: str | None
) -> None:
    name, change, words = REFUSED[label]
    given = arguments("adamw", "transposed", torch.float64)
    given[name] = change(given[name])
    real = [each for each in tensors_in(list(given.values())) if not each.is_meta]
    before = [each.clone() for each in real]
    with (
        fusedops.use_backend(backend),
        pytest.raises((TypeError, ValueError), match=f"adamw: .*({words})"),
    ):
        operator("adamw")(*given.values())
    assert all(torch.equal(a, b) for a, b in zip(real, before, strict=True))


@pytest.mark.parametrize(
    ("place", "number", "words"),
    [(1, -1, "base"), (1, -(2**63), "base"), (2, 0, "run"), (3, -4, "pitch")],
)
def test_adamw_refuses_draws_outside_of_the_parameter(place: int, number: int, words: str) -> None:
    given = arguments("adamw", "draws", BF16)
    operator("adamw")(*given.values())
    given["draws"][4 + place] = number
    with pytest.raises(ValueError, match=f"adamw: {words} must be such that"):
        operator("adamw")(*given.values())


@pytest.mark.parametrize("kind", ["meta", torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_square_sums_refuses_other_devices_and_dtypes(kind: Any) -> None:
    words = "must be on cpu" if kind == "meta" else "must have dtype"
    with pytest.raises((TypeError, ValueError), match=rf"square_sums: inputs\[1\] {words}"):
        operator("square_sums")([torch.ones(3), torch.ones(3).to(kind)])
