"""What is special about rms_norm: it has the bits of the models that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same_bits

import fusedops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Below a vector, vectors and rests, runs of strips, several levels of sums.
COLUMNS = [1, 3, 5, 8, 31, 33, 100, 768, 1000, 1024, 4096, 5003, 70000]
SCALES = [1.0, 1e-3, 300.0]
BACKENDS = ["cpp", "torch"]


def inputs(columns: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(columns)
    x = (torch.randn(5, columns) * scale).to(dtype)
    return x, (torch.randn(columns) * 0.2 + 1).to(dtype)


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + eps)
    return weight * wide.to(x.dtype)


def gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_bits_are_torchs(backend: str, columns: int, dtype: torch.dtype) -> None:
    for scale in SCALES:
        x, weight = inputs(columns, dtype, scale)
        with fusedops.use_backend(backend):
            for eps in (None, 1e-6, 0.1):
                got = fusedops.rms_norm(x, (columns,), weight, eps)
                assert_same_bits(got, F.rms_norm(x, (columns,), weight, eps))
            assert_same_bits(fusedops.rms_norm(x, (columns,)), F.rms_norm(x, (columns,)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_torchs_in_many_rows_on_threads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(1500, 640).to(dtype), torch.randn(640).to(dtype)
    got = fusedops.rms_norm(x.view(3, 500, 640), (640,), weight)
    assert_same_bits(got, F.rms_norm(x.view(3, 500, 640), (640,), weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("model", [llama, gemma])
def test_bits_are_those_of_models(
    model: Callable[..., torch.Tensor], backend: str, columns: int, dtype: torch.dtype
) -> None:
    extra = {"rounding": "hf"} if model is llama else {"weight_offset": 1.0}
    for scale in SCALES:
        x, weight = inputs(columns, dtype, scale)
        weight = weight if model is llama else weight - 1
        for each in (weight, weight.float()):  # beside half precision the product is float32
            with fusedops.use_backend(backend):
                got = fusedops.rms_norm(x, (columns,), each, 1e-6, **extra)
            assert_same_bits(got, model(x, each, 1e-6))


def test_the_roundings_differ_in_half_precision_alone() -> None:
    for dtype in DTYPES:
        x, weight = inputs(1024, dtype, 1.0)
        once = fusedops.rms_norm(x, (1024,), weight, 1e-6)
        twice = fusedops.rms_norm(x, (1024,), weight, 1e-6, rounding="hf")
        assert torch.equal(once, twice) == (dtype == torch.float32)


def _modules() -> list[object]:
    transformers = pytest.importorskip("transformers")
    del transformers
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    hf, offset = {"rounding": "hf"}, {"weight_offset": 1.0}
    return [
        (LlamaRMSNorm, hf),
        (T5LayerNorm, hf),
        (GemmaRMSNorm, offset),
        (Gemma2RMSNorm, offset),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_transformers_modules(dtype: torch.dtype) -> None:
    x, weight = inputs(768, dtype, 2.0)
    for make, arguments in _modules():
        stock = make(768, eps=1e-5).to(dtype)
        module = fusedops.nn.RMSNorm(768, eps=1e-5, dtype=dtype, **arguments)
        assert torch.equal(module.weight, stock.weight)
        with torch.no_grad():
            stock.weight.copy_(weight)
        module.load_state_dict(stock.state_dict())
        assert_same_bits(module(x), stock(x), make.__name__)
