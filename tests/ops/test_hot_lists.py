"""AdamW steps and sums of squares over many tensors, against float64 arithmetic written out here.

The same tests run on a GPU's kernels and, where there is none, on the compiled ones of the CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import hot_samples
import pytest
import torch
from comparing import assert_all_close
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import dtypes
from fusedops.ops.adamw import Draw, TensorLists, adamw
from fusedops.ops.square_sums import square_sums
from fusedops.specs import tensors_in

pytest.importorskip("triton")

each_machine = pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpp", torch.device("cpu")),
        pytest.param("triton", torch.device("cuda"), marks=pytest.mark.gpu),
    ],
    ids=["cpp", "triton-cuda"],
)
BF16, F32 = torch.bfloat16, torch.float32
LR, BETAS, EPS = 0.05, (0.8, 0.95), 1e-6
GAP = 7  # elements between tensors, which nobody may write


def odd_sizes(count: int) -> list[int]:
    """Return sizes of less than a block of 1024 and of several, hardly any divided by 16."""
    return [1 + 37 * i * i % 5001 for i in range(count)]


def cut(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, key: int, gap: int = GAP):  # type: ignore[no-untyped-def]
    """Return the memory of tensors with gaps between them, all random, and the tensors."""
    generator = torch.Generator().manual_seed(key)
    whole = torch.randn(sum(sizes) + gap * len(sizes), generator=generator).to(device, dtype)
    parts, begin = [], 0
    for size in sizes:
        parts.append(whole[begin : begin + size])
        begin += size + gap
    return whole, parts


def outside(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of the memory that belong to none of the tensors."""
    free = torch.ones_like(whole, dtype=torch.bool)
    for part in parts:
        free[part.storage_offset() : part.storage_offset() + part.numel()] = False
    return whole[free].clone()


@contextlib.contextmanager
def assert_nothing_written_outside(*memory: tuple[torch.Tensor, list[torch.Tensor]]):  # type: ignore[no-untyped-def]
    """Assert that what lies between the tensors is as before."""
    before = [outside(whole, parts) for whole, parts in memory]
    yield
    for (whole, parts), left in zip(memory, before, strict=True):
        assert torch.equal(outside(whole, parts), left), "written between tensors"


def _in_float64(values: Sequence[Any]) -> list[Any]:
    return [each.double() if isinstance(each, torch.Tensor) else each for each in values]


def _step(batch: TensorLists) -> None:
    device = batch.params[0].device
    factor = torch.tensor(0.25, device=device, dtype=torch.float64)
    found_inf = torch.zeros(1, device=device)
    adamw(batch, lr=LR, betas=BETAS, eps=EPS, grad_factor=factor, found_inf=found_inf)


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
    params, firsts = cut(sizes, param, device, 1), cut(sizes, state, device, 3)
    squares, copies = cut(sizes, state, device, 4), cut(sizes, copied or param, device, 5)
    squares[0].abs_()
    copies[0].copy_(params[0])
    batch = TensorLists(
        params[1],
        cut(sizes, grad, device, 2)[1],
        firsts[1],
        squares[1],
        copies=copies[1] if copied else [],
        steps=[torch.tensor(float(i % 5), device=device) for i in range(count)],
        weight_decays=[0.1 * (i % 3) for i in range(count)],
    )
    wide = TensorLists(**{name: _in_float64(value) for name, value in vars(batch).items()})
    wide.copies = []  # they are rounded from the parameters
    untouched = [copies] if copied else []
    with (
        assert_nothing_written_outside(params, firsts, squares, *untouched),
        fusedops.use_backend(backend),
    ):
        _step(batch)
    with fusedops.use_backend("torch"):
        _step(wide)
    for what in ("params", "exp_avgs", "exp_avg_sqs"):
        got, want = getattr(batch, what), getattr(wide, what)
        # What rounding the truth itself takes stands for what eager torch gets.
        rounded = [true.to(mine.dtype) for mine, true in zip(got, want, strict=True)]
        assert_all_close(got, want, rounded, depth=4)
    for master, copy in zip(batch.params, batch.copies, strict=bool(batch.copies)):
        assert torch.equal(copy, master.to(copy.dtype))
    assert [step.item() for step in batch.steps] == [i % 5 + 1.0 for i in range(count)]


def each_hot_call() -> Any:
    found = [call for op in ("adamw", "square_sums") for call in hot_samples.calls(op, BF16)]
    return pytest.mark.parametrize("call", found, ids=lambda call: f"{call.op} {call.name}")


@each_machine
@each_hot_call()
def test_hot_samples_of_lists_match_float64(
    call: hot_samples.HotCall, backend: str, device: torch.device
) -> None:
    """Sizes and addresses that 16 divides: the configurations on record."""
    made = hot_samples.made(call, BF16, device).sample

    def outcome(name: str, wide: bool) -> list[torch.Tensor]:
        args = pytree.tree_map_only(
            torch.Tensor, lambda each: each.double() if wide else each.clone(), list(made.args)
        )
        with fusedops.use_backend(name):
            result = getattr(torch.ops.fusedops, call.op).default(*args)
        return [*tensors_in(args), *tensors_in(result)]

    results = (outcome(backend, False), outcome("torch", False), outcome("torch", True))
    for got, eager, want in zip(*results, strict=True):
        assert got.dtype == eager.dtype
        # A sum has as many terms as the largest tensor has elements; a step has a few.
        budget = dtypes.error_budget(eager, want, got.dtype, depth=max(4, got.numel()))
        assert bool(((got.double() - want).abs() <= budget).all())


@each_machine
def test_a_step_with_found_inf_writes_nothing(backend: str, device: torch.device) -> None:
    sizes = odd_sizes(20)
    params, grads, firsts, squares = (cut(sizes, F32, device, key)[1] for key in range(4))
    steps = [torch.tensor(2.0, device=device) for _ in sizes]
    batch = TensorLists(
        params,
        grads,
        firsts,
        [square.abs() for square in squares],
        steps=steps,
        weight_decays=[0.1] * len(sizes),
    )
    written = [*batch.params, *batch.exp_avgs, *batch.exp_avg_sqs, *steps]
    before = [each.clone() for each in written]
    with fusedops.use_backend(backend):
        adamw(batch, lr=LR, betas=BETAS, eps=EPS, found_inf=torch.ones(1, device=device))
    assert all(map(torch.equal, written, before))


@each_machine
def test_stochastic_rounding_is_unbiased_and_of_independent_numbers(
    backend: str, device: torch.device
) -> None:
    """A million equal numbers, 3/8 of the way from one bfloat16 to the next, in two tensors."""
    size, share = 1 << 19, 0.375
    low, spacing = 1.0, 2.0**-7
    # Moments of zero and no decay but this: param * (1 - lr * decay) lies between two neighbours.
    start = 1.0 + 2 * spacing
    aim = low + share * spacing
    params = [torch.full((size,), start, device=device, dtype=BF16) for _ in range(2)]
    grads, firsts, squares = (torch.zeros_like(params[0]).repeat(2, 1).unbind() for _ in range(3))
    batch = TensorLists(
        params,
        list(grads),
        list(firsts),
        list(squares),
        steps=[torch.zeros((), device=device) for _ in range(2)],
        draws=[Draw(91, 0, size, size), Draw(91, size, size, size)],
        weight_decays=[(1 - aim / start) / 0.5] * 2,
    )
    with fusedops.use_backend(backend):
        adamw(
            batch,
            lr=0.5,
            betas=BETAS,
            eps=1.0,
            grad_factor=torch.ones((), device=device, dtype=torch.float64),
            found_inf=torch.zeros(1, device=device),
        )
    up = torch.stack([parameter == low + spacing for parameter in params])
    assert bool((up | torch.stack([each == low for each in params])).all()), "no neighbour"
    # Five standard deviations: a correct kernel fails once in two million numbers of keys.
    for each in up:
        assert abs(each.double().mean().item() - share) < 5 * math.sqrt(0.25 / size)
    for a, b in ((up[0], up[1]), (up[0, 1:], up[0, :-1]), (up[0, 4:], up[0, :-4])):
        both = (a & b).double().mean().item()
        assert abs(both - share**2) < 5 * math.sqrt(0.25 / size), "the numbers are not independent"


@each_machine
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_sums_of_squares_of_many_tensors_match_float64(
    dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    # The second kernel adds a number for each block of 1024: three of its own blocks and more.
    sizes = [*odd_sizes(400), 0, 2 * 1024**2 + 4097]
    _, tensors = cut(sizes, dtype, device, 6)
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
