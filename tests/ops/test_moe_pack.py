"""What is special to packing: the bytes themselves, which must be the same on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedops
from fusedops.ops._moe_payload import dequantize, quantize
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# In steps of one code, ties between codes, subnormal codes, the largest, and what is not finite.
EDGES = [0.0, 448.0, 464.0, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 17.0, 18.0, 19.0, -3.25]


def _bytes(backend: str, call: Any) -> torch.Tensor:
    with fusedops.use_backend(backend):
        return fusedops.moe_pack(*call.args, **call.kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_backends_write_the_same_bytes(backend: str, dtype: torch.dtype) -> None:
    for sample in all_specs()["moe_pack"].samples(CPU, dtype):
        call = fresh(sample)
        assert torch.equal(_bytes(backend, call), _bytes("torch", call)), sample.name


@pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
def test_float8_codes_are_those_of_torch(backend: str) -> None:
    """Every scale from the smallest to the largest, around every rounding decision."""
    rows = torch.tensor(EDGES).repeat(9, 1) * 2.0 ** torch.arange(-120, 120, 27).unsqueeze(1)
    rows = torch.cat([rows, torch.zeros(1, len(EDGES)), torch.full((1, len(EDGES)), 1e-45)])
    rows[0, 3], rows[1, 4], rows[2, 5] = torch.inf, torch.nan, -torch.inf
    probs = torch.ones(len(rows), 1)
    with fusedops.use_backend(backend):
        payload = fusedops.moe_pack(rows, probs, quantized=True)
        back = fusedops.moe_unpack(payload, probs, rows)
    codes, scales = quantize(rows)
    expected = dequantize(codes, scales, torch.float32)
    assert torch.equal(back.isnan(), expected.isnan())
    assert torch.equal(back.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    finite = rows.isfinite()
    assert torch.equal(back.isfinite(), finite)
    # Four significant bits: half a unit of the fourth, or half the spacing of subnormal codes.
    bound = torch.maximum(rows.abs() * 2.0**-4, scales * 2.0**-10)
    assert ((back - rows).abs() <= bound)[finite].all()


def test_rows_are_aligned() -> None:
    for hidden in (1, 7, 33, 2048):
        for dtype in (torch.bfloat16, torch.float32):
            payload = fusedops.moe_pack(torch.ones(3, hidden, dtype=dtype), torch.ones(3, 2))
            assert payload.stride(0) % 16 == 0
            assert payload.stride(0) - hidden * dtype.itemsize < 16 + 2 * 8 + 8
