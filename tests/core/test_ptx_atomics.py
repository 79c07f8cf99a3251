"""The PTX machine's atomic operations: each lane gets what was there before its own change."""

from __future__ import annotations

import pytest
import torch
from ptx_kernels import run

pytestmark = pytest.mark.ci


def changed(operation: str, values: torch.Tensor, start: int | float) -> tuple[list, list]:  # type: ignore[type-arg]
    """Return what 32 lanes got, sorted, and the word that they changed, the first of a result."""
    bits = torch.tensor(start, dtype=values.dtype).view(torch.int32).item()
    body = f"""
      @%p0 st.global.b32 [%d1], {bits};
      bar.sync 0;
      ld.global.b32 %r2, [%d5];
      atom.global.gpu.acq_rel.{operation};
      st.global.b32 [%d4 + 4], %r3;
    """
    found = run(body, torch.zeros(33, dtype=values.dtype), values)
    return sorted(found[1:].tolist()), found[:1].tolist()


def test_sums_are_of_all_lanes() -> None:
    got, last = changed("add.u32 %r3, [%d1], %r2", torch.ones(32, dtype=torch.int32), 5)
    assert got == list(range(5, 37)) and last == [37]
    got, last = changed("add.f32 %r3, [%d1], %r2", torch.full((32,), 0.5), 1.0)
    assert got == [1 + i / 2 for i in range(32)] and last == [17.0]


def test_exchanges_pass_each_value_on_once() -> None:
    got, last = changed("exch.b32 %r3, [%d1], %r2", torch.arange(1, 33, dtype=torch.int32), 40)
    assert sorted(got + last) == [*range(1, 33), 40]


def test_one_lane_finds_what_it_compares_with() -> None:
    values = torch.arange(1, 33, dtype=torch.int32)
    got, (last,) = changed("cas.b32 %r3, [%d1], 0, %r2", values, 0)
    assert got[0] == 0 and got[1:] == [last] * 31
    got, last = changed("cas.b32 %r3, [%d1], 7, %r2", values, 5)
    assert got == [5] * 32 and last == [5]
