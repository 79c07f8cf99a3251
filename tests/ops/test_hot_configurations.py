"""The configurations that users run, against float64: on a GPU, attention in the interpreter too.

A hot sample launches the tiles that the static report has on record, with descriptors where these
are used, three blocks deep in each direction (``tests/hot_samples``). The generic tests of an op
have small and odd calls, which launch other configurations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import hot_samples
import pytest
import torch
from comparing import assert_within_budget

import fusedops
from fusedops.specs import all_specs

pytest.importorskip("triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_matches_float64(
    call: hot_samples.HotCall, dtype: torch.dtype, device: torch.device
) -> None:
    sample = call.sample(hot_samples.New(device, dtype))
    fusedops.reset_counters()
    with fusedops.use_backend("triton"):
        result = call.run(sample)
    used = {backend for _, backend in fusedops.counters()}
    assert used == {"triton"}, f"ran on {used}"
    assert_within_budget(result, all_specs()[call.op], call.plain(sample))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        pytest.param(call, dtype, id=f"{op}-{str(dtype)[6:]}-{call.op} {call.name}")
        for op in hot_samples.ops()
        for dtype in DTYPES
        for call in hot_samples.calls(op, dtype)
        if call.op not in ("adamw", "square_sums")  # tests/ops/test_hot_lists.py
    ],
)
def test_hot_samples_match_float64(call: hot_samples.HotCall, dtype: torch.dtype) -> None:
    assert_matches_float64(call, dtype, torch.device("cuda"))


@contextlib.contextmanager
def real_tiles() -> Iterator[None]:
    """Give attention in the interpreter the tiles of sm_90, not the small ones for few rows."""
    from fusedops.kernels import _attention_launch, attention_decode

    compiled = SimpleNamespace(triton_interpreted=lambda: False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention_launch, "env", compiled)
        patch.setattr(_attention_launch, "generation_of", lambda device: 90)
        patch.setattr(attention_decode, "env", compiled)
        yield


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("attention_decode", "4 rows of D128, 1040 keys"),
        pytest.param("attention", "D64 of 4", marks=pytest.mark.slow),
        pytest.param("attention", "D128 of 4, by pointers", marks=pytest.mark.slow),
        pytest.param("attention", "D64 of 4, window, sinks", marks=pytest.mark.slow),
    ],
)
def test_real_tiles_of_attention_in_the_interpreter(op: str, name: str) -> None:
    (call,) = [each for each in hot_samples.calls(op, torch.bfloat16) if each.name == name]
    with real_tiles():
        assert_matches_float64(call, torch.bfloat16, torch.device("cpu"))
