"""What is special about norms: the bits of torch, of models and of their parts; statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_same_bits

import fusedops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Below a vector, vectors and rests, runs of strips, several levels of sums.
COLUMNS = [1, 3, 5, 8, 31, 33, 100, 768, 1000, 1024, 4096, 5003, 70000]
SCALES = [1.0, 1e-3, 300.0]
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch"])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(columns: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(columns)
    x = (torch.randn(5, columns) * scale).to(dtype)
    return x, (torch.randn(columns) * 0.2 + 1).to(dtype)


@by_backend
@by_dtype
def test_bits_of_rms_norm_are_torchs(backend: str, dtype: torch.dtype) -> None:
    for columns in COLUMNS:
        for scale in SCALES:
            x, weight = inputs(columns, dtype, scale)
            for args in ((weight, None), (weight, 1e-6), (weight, 0.1), ()):
                with fusedops.use_backend(backend):
                    got = fusedops.rms_norm(x, (columns,), *args)
                where = f"{columns} columns times {scale}, {args}"
                assert_same_bits(got, F.rms_norm(x, (columns,), *args), where)
    x, weight = torch.randn(3, 500, 640).to(dtype), torch.randn(640).to(dtype)  # on threads
    assert_same_bits(fusedops.rms_norm(x, (640,), weight), F.rms_norm(x, (640,), weight))


HF, OFFSET = {"rounding": "hf"}, {"weight_offset": 1.0}
# Module of transformers -> options of ours.
MODELS: dict[str, dict[str, Any]] = {
    "llama.LlamaRMSNorm": HF,
    "t5.T5LayerNorm": HF,
    "gemma.GemmaRMSNorm": OFFSET,
    "gemma2.Gemma2RMSNorm": OFFSET,
}


@by_backend
@by_dtype
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_models(name: str, backend: str, dtype: torch.dtype) -> None:
    family, _, module = name.partition(".")
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    # Beside half precision the product is float32, but for T5's.
    kinds = {dtype, dtype if family == "t5" else torch.float32}
    for columns in COLUMNS:
        stock = getattr(modeling, module)(columns, eps=1e-6)
        ours = fusedops.nn.RMSNorm(columns, eps=1e-6, **MODELS[name])
        assert torch.equal(ours.weight, stock.weight)
        for scale in SCALES:
            x, weight = inputs(columns, dtype, scale)
            for kind in kinds:
                stock.weight.data = (weight - MODELS[name].get("weight_offset", 0.0)).to(kind)
                ours.to(kind).load_state_dict(stock.state_dict())
                with fusedops.use_backend(backend):
                    got = ours(x)
                assert_same_bits(got, stock(x), f"{columns} columns times {scale}, {kind}")


@by_dtype
@pytest.mark.parametrize("columns", [5, 33, 200, 1024])
def test_bits_of_added_norms_are_those_of_sum_then_norm(columns: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 37, columns).to(dtype)
    weight, bias = torch.randn(2, columns).to(dtype)
    shape, whole = (columns,), residual + x
    normed, summed = fusedops.add_layer_norm(x, residual, shape, weight, bias)
    assert torch.equal(summed, whole)
    assert torch.equal(normed, fusedops.layer_norm(whole, shape, weight, bias))
    normed, summed = fusedops.add_rms_norm(x, residual, shape, weight)
    assert torch.equal(summed, whole)
    assert torch.equal(normed, F.rms_norm(whole, shape, weight))
    for extras in (HF, OFFSET):
        normed, summed = fusedops.add_rms_norm(x, residual, shape, weight, 1e-6, **extras)
        assert torch.equal(normed, fusedops.rms_norm(whole, shape, weight, 1e-6, **extras))


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_one_tensor_is_the_gradient_of_both_when_nothing_is_dropped(name: str) -> None:
    x, residual = (torch.randn(4, 32, requires_grad=True) for _ in range(2))

    def loss() -> torch.Tensor:
        normed, summed = getattr(fusedops, name)(x, residual, (32,), torch.ones(32))
        return normed.square().sum() + summed.sum()

    grad_x, grad_residual = torch.autograd.grad(loss(), (x, residual))
    assert grad_x.data_ptr() == grad_residual.data_ptr()
    loss().backward()
    assert x.grad is not None and torch.equal(x.grad, grad_x)
    x.grad.zero_()  # an accumulated gradient is nobody else's
    assert torch.equal(residual.grad, grad_residual)


@pytest.mark.parametrize(
    ("cols", "shifted", "by"),
    [
        (1024, 1024, 1e4),  # a large mean
        *((cols, min(64, cols // 4), by) for cols in (1024, 70, 5) for by in (1e4, -3e2, 3e1, 1.0)),
    ],
)
def test_a_row_far_from_zero_or_from_its_beginning_keeps_its_statistics(
    cols: int, shifted: int, by: float
) -> None:
    residual = torch.randn(4, cols)
    residual[:, :shifted] += by
    normed, summed = fusedops.add_layer_norm(torch.randn(4, cols), residual, (cols,))
    want = F.layer_norm(summed.double(), (cols,))
    assert_close(normed, want, F.layer_norm(summed, (cols,)), "normed")
    assert torch.equal(normed, fusedops.layer_norm(summed, (cols,)))


@pytest.mark.parametrize("shift", [0.0, 100.0], ids=["pivot", "two_passes"])
@pytest.mark.parametrize("added", [False, True])
def test_a_row_of_a_million_elements_is_as_exact_as_torchs(added: bool, shift: float) -> None:
    size = (1 << 20) + 5
    x = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    x[:, 64:] += shift  # far from the mean of the row's beginning
    if added:
        got, _ = fusedops.add_layer_norm(x, torch.zeros_like(x), (size,))
    else:
        got = fusedops.layer_norm(x, (size,))
    exact, eager = F.layer_norm(x.double(), (size,)), F.layer_norm(x, (size,))
    assert_close(got, exact, eager, "normed")
