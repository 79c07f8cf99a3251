"""What is special about rotary_embedding: Hugging Face's chains, memory layouts, the tables."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_close

import fusedops

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def tables(length: int, rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(length).float()[:, None] * torch.rand(rotary_dim // 2)
    angle = torch.cat((angle, angle), -1)[None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "interleaved"),
    [("llama", False), ("gpt_neox", False), ("qwen2", False), ("cohere", True), ("glm", True)],
)
def test_equals_what_hugging_face_writes(model: str, interleaved: bool, dtype: torch.dtype) -> None:
    name = f"transformers.models.{model}.modeling_{model}"
    theirs = pytest.importorskip(name).apply_rotary_pos_emb
    q, k = torch.randn(2, 4, 9, 32).to(dtype), torch.randn(2, 2, 9, 32).to(dtype)
    cos, sin = tables(9, 16 if model in ("gpt_neox", "glm") else 32, dtype)
    whole = (cos, sin)
    if interleaved:  # these models pass the angles as halves, or have doubled them themselves
        half = cos.shape[-1] // 2
        whole = tuple(table[..., :half].repeat_interleave(2, -1) for table in (cos, sin))
        cos, sin = whole if model == "cohere" else (cos, sin)
    got = fusedops.rotary_embedding(q, k, *whole, interleaved=interleaved)
    want = theirs(q, k, cos, sin)
    exact = theirs(*(tensor.double() for tensor in (q, k, cos, sin)))
    for index in range(2):
        assert_close(got[index], exact[index].double(), want[index].to(dtype), f"result {index}")


@by_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_results_keep_a_dense_layout(backend: str, interleaved: bool, rotary_dim: int) -> None:
    q = torch.randn(2, 5, 3, 16).transpose(1, 2).requires_grad_()
    k = torch.randn(5, 2, 2, 16).permute(1, 2, 0, 3).requires_grad_()
    cos, sin = torch.randn(2, 5, rotary_dim), torch.randn(2, 5, rotary_dim)
    with fusedops.use_backend(backend):
        got = fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
        plain = fusedops.rotary_embedding(
            q.contiguous(), k.contiguous(), cos, sin, interleaved=interleaved
        )
    assert [each.stride() for each in got] == [q.stride(), k.stride()]
    assert all(map(torch.equal, got, plain))


def test_gradients_of_the_tables_come_from_the_reference() -> None:
    q, k = torch.randn(2, 3, 4, 8).double(), torch.randn(2, 1, 4, 8).double()
    cos, sin = (torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = (q.requires_grad_(), k, cos, sin)
    for interleaved in (False, True):

        def call(*args: torch.Tensor, interleaved: bool = interleaved) -> tuple[torch.Tensor, ...]:
            return fusedops.rotary_embedding(*args, interleaved=interleaved)

        assert torch.autograd.gradcheck(call, leaves)
    with fusedops.use_backend("cpp"), pytest.raises(fusedops.UnsupportedError, match="cos and sin"):
        fusedops.rotary_embedding(*leaves)
    with fusedops.use_backend("cpp"), torch.no_grad():
        fusedops.rotary_embedding(*leaves)
