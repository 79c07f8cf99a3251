"""What is special about rotary_embedding: Hugging Face's chains, memory layouts, the tables."""

from __future__ import annotations

import pytest
import torch
from op_testing import assert_close

import fusedops
from fusedops.specs import all_specs

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
SPEC = all_specs()["rotary_embedding"]


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


def test_a_projection_that_holds_query_and_key_is_not_copied() -> None:
    """Query and key are often slices of one tensor, with gaps between their heads."""
    whole = torch.randn(2, 7, 6, 16)
    q, k = whole[:, :, :4].transpose(1, 2), whole[:, :, 4:].transpose(1, 2)
    cos, sin = tables(7, 16, torch.float32)
    before = whole.clone()
    rotated = fusedops.rotary_embedding(q, k, cos, sin)
    want = fusedops.rotary_embedding(q.contiguous(), k.contiguous(), cos, sin)
    assert all(map(torch.equal, rotated, want))
    assert torch.equal(whole, before)


@by_backend
@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_rotation_by_the_negative_angle(backend: str, interleaved: bool) -> None:
    q, k = torch.randn(2, 3, 6, 20), torch.randn(2, 1, 6, 20)
    angle = torch.rand(6, 8) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    cos, sin = angle.cos(), angle.sin()
    q.requires_grad_()
    with fusedops.use_backend(backend):
        forward = fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
        grad = torch.autograd.grad(forward[0], q, forward[0])[0]
        back = fusedops.rotary_embedding(
            forward[0].detach(), k, cos, -sin, interleaved=interleaved
        )[0]
    assert torch.equal(grad, back)
    exact = q.detach().double()
    assert_close(grad, exact, exact.float(), "rotated there and back", depth=4)


def test_only_the_tables_are_saved() -> None:
    q, k = torch.randn(2, 3, 6, 8, requires_grad=True), torch.randn(2, 1, 6, 8)
    cos, sin = tables(6, 8, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fusedops.rotary_embedding(q, k, cos, sin)
    assert [tensor.data_ptr() for tensor in saved] == [cos.data_ptr(), sin.data_ptr()]


@by_backend
def test_one_result_may_go_unused(backend: str) -> None:
    q, k = (torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(2))
    cos, sin = tables(6, 8, torch.float32)
    with fusedops.use_backend(backend):
        rotated = fusedops.rotary_embedding(q, k, cos, sin)
        grads = torch.autograd.grad(rotated[1].sum(), (q, k), allow_unused=True)
    want = torch.autograd.grad(SPEC.eager(q, k, cos, sin)[1].sum(), k)[0]
    assert grads[0] is None
    assert_close(grads[1], want.double(), want, "gradient of key", depth=2)


@by_backend
@pytest.mark.parametrize(
    ("dtype", "interleaved"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)],
)
def test_float32_tables_beside_half_precision(
    backend: str, dtype: torch.dtype, interleaved: bool
) -> None:
    q, k = torch.randn(2, 3, 6, 24).to(dtype), torch.randn(2, 1, 6, 24).to(dtype)
    cos, sin = torch.randn(6, 20), torch.randn(6, 20)
    with fusedops.use_backend(backend):
        got = fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    wide = (tensor.double() for tensor in (q, k, cos, sin))
    exact = SPEC.eager(*wide, interleaved=interleaved)
    for index in range(2):
        assert got[index].dtype == dtype
        rounded = exact[index].to(dtype)
        assert_close(got[index], exact[index], rounded, f"result {index}")


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_large_outputs_are_the_same_bits_as_small_ones(interleaved: bool) -> None:
    """Above 16 MiB the kernel writes around the cache."""
    q = torch.randn(2, 1100, 64, 64).bfloat16().transpose(1, 2)
    k = torch.randn(2, 1100, 1, 64).bfloat16().transpose(1, 2)
    cos, sin = tables(1100, 64, torch.bfloat16)
    large = fusedops.rotary_embedding(q, k, cos, sin, interleaved=interleaved)[0]
    for part in range(0, 1100, 275):
        some = slice(part, part + 275)
        small = fusedops.rotary_embedding(
            q[:, :, some], k[:, :, some], cos[:, some], sin[:, some], interleaved=interleaved
        )[0]
        assert torch.equal(large[:, :, some], small)
