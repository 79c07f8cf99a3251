"""What the strict mode of Triton's interpreter finds, and that the kernels do not need luck."""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits

import fusedops
from fusedops._core import env
from fusedops.specs import Spec, all_specs
from fusedops.specs.comparison import fresh, run

if not env.triton_interpreted():
    pytest.skip("needs TRITON_INTERPRET=1, in its own process", allow_module_level=True)

import triton
import triton.language as tl
import triton_interpreter_strict as strict

pytestmark = pytest.mark.interpreter
BLOCK = 16


@triton.jit
def copy(x_ptr, y_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < num, other=0.0), mask=at < num)


@triton.jit
def write_number(y_ptr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    value = VALUE if VALUE >= 0 else tl.program_id(0)
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + value)


@triton.jit
def reverse(x_ptr, y_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + at, tl.load(x_ptr + BLOCK - 1 - at))


@triton.jit
def sum_of_three(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + at, mask=at < 3).to(tl.float32), 0))


@triton.jit
def append(y_ptr, count_ptr, BLOCK: tl.constexpr):
    place = tl.load(count_ptr)
    tl.store(y_ptr + place, tl.program_id(0).to(tl.float32))
    tl.store(count_ptr, place + 1)


def assert_refused(launch: Callable[[], Any], *words: str) -> None:
    with pytest.raises((strict.Hazard, triton.runtime.errors.InterpreterError)) as caught:
        launch()
    for word in (*words, "test_interpreter_strict.py:"):
        assert word in str(caught.value)


def test_addresses_outside_a_tensor_are_refused() -> None:
    x, y = torch.randn(37), torch.empty(37)
    copy[(3,)](x, y, 37, BLOCK=BLOCK)
    assert torch.equal(x, y)
    assert_refused(
        lambda: copy[(3,)](x, torch.empty(38), 38, BLOCK=BLOCK), "outside x_ptr (148 bytes)"
    )
    assert_refused(lambda: copy[(3,)](x, y[:36], 37, BLOCK=BLOCK), "outside y_ptr (144 bytes)")


def test_programs_that_depend_on_each_other_are_refused() -> None:
    x = torch.randn(37)
    assert_refused(lambda: copy[(3,)](x, x[1:], 36, BLOCK=BLOCK), "reads what", "writes")
    count = torch.zeros((), dtype=torch.int32)
    assert_refused(lambda: append[(3,)](x, count, BLOCK=BLOCK), "different values to one address")


def test_two_programs_may_write_the_same_value_only() -> None:
    y = torch.empty(BLOCK)
    write_number[(3,)](y, VALUE=7, BLOCK=BLOCK)
    assert torch.equal(y, torch.full((BLOCK,), 7.0))
    assert_refused(lambda: write_number[(3,)](y, VALUE=-1, BLOCK=BLOCK), "different values")


def test_a_program_reads_what_it_wrote_only_behind_a_barrier() -> None:
    x, y = torch.empty(BLOCK), torch.empty(BLOCK)
    reverse[(1,)](x, y, BARRIER=True, BLOCK=BLOCK)
    assert torch.equal(y, x.flip(0))
    assert_refused(lambda: reverse[(1,)](x, y, BARRIER=False, BLOCK=BLOCK), "reads what")


def test_nothing_that_nobody_wrote_is_a_number() -> None:
    x = torch.randn(BLOCK)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = torch.zeros(1)
        sum_of_three[(1,)](x.to(dtype), y, BLOCK=BLOCK)
        assert y.isnan().all()
        empty = (torch.empty(3, dtype=dtype), x.new_empty(3, dtype=dtype), torch.empty_like(x))
        assert all(each.isnan().all() for each in empty)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_the_order_of_programs_does_not_change_a_bit(spec: Spec, dtype: torch.dtype) -> None:
    sample = spec.samples(torch.device("cpu"), dtype)[0]
    results = []
    for arrange in (lambda order: None, list.reverse, strict.shuffle):
        with fusedops.use_backend("triton"), strict.order(arrange):
            results.append(run(spec.op, fresh(sample)))
    for other in results[1:]:
        assert_same_bits(other, results[0])
