"""What is special about the attention ops: rows of nothing, halves that merge, packed sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close

import fusedops
from fusedops.specs.make import randn

CPU = torch.device("cpu")
BACKENDS = ["cpp", "torch"]


def qkv(
    *shape: int, columns: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    other = (*shape[:-2], shape[-2] if columns is None else columns, shape[-1])
    return (
        randn(*shape, device=CPU, dtype=dtype, key="q"),
        randn(*other, device=CPU, dtype=dtype, key="k"),
        randn(*other, device=CPU, dtype=dtype, key="v"),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_with_nothing_to_attend_gives_zero_and_gradient_zero(backend: str) -> None:
    q, k, v = qkv(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    with fusedops.use_backend(backend):
        output, lse = fusedops.attention(q, k, v, mask, return_lse=True)
        grads = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    assert torch.equal(output[:, :, 2], torch.zeros(1, 2, 8))
    assert torch.equal(lse[:, :, 2], torch.full((1, 2), -torch.inf))
    assert torch.equal(grads[0][:, :, 2], torch.zeros(1, 2, 8))
    assert all(grad.isfinite().all() for grad in grads)
    others = torch.tensor([0, 1, 3])
    alone = fusedops.attention(q[:, :, others], k, v)
    assert_close(output[:, :, others], alone.double(), alone, "the other queries", depth=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_without_dims_give_every_key_the_same_weight(dtype: torch.dtype) -> None:
    query, key = torch.empty(1, 2, 5, 0, dtype=dtype), torch.empty(1, 2, 7, 0, dtype=dtype)
    value = torch.randn(1, 2, 7, 8).to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = fusedops.attention(query, key, value, scale=1.0)
    torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand_as(output))
    grads = torch.autograd.grad(output.sum(), leaves)
    assert [grad.numel() for grad in grads[:2]] == [0, 0]
    torch.testing.assert_close(grads[2], torch.full_like(value, 5 / 7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_least_finite_number_in_a_mask_is_a_number(backend: str, dtype: torch.dtype) -> None:
    """A row of it is a row of equal scores; next to other numbers it forbids."""
    q, k, v = qkv(1, 2, 4, 8, dtype=dtype)
    mask = torch.zeros(4, 4, dtype=dtype)
    mask[1:] = torch.finfo(dtype).min
    mask[2, 1], mask[3, 1:] = -torch.inf, 0.0
    with fusedops.use_backend(backend):
        output = fusedops.attention(q, k, v, mask)
        grads = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    ones = torch.ones_like(output)
    exact, eager = (_written_out(to, (q, k, v), mask, ones) for to in (torch.float64, dtype))
    for tensors in zip((output, *grads), exact, eager, strict=True):
        assert_close(*tensors, depth=64)


def _written_out(
    dtype: torch.dtype, leaves: Sequence[torch.Tensor], mask: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return output and gradients; those of torch's own function do not sum to 1 on the CPU."""
    q, k, v = wide = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    output = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask.to(dtype), -1) @ v
    return output.detach(), *torch.autograd.grad(output, wide, grad.to(dtype))


@pytest.mark.parametrize("shape", [(2, 1, 40, 130), (2, 1, 1, 130), (40, 1), (1, 2, 40, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_boolean_mask_is_minus_infinity_to_those_it_forbids(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v = qkv(2, 2, 40, 32, columns=130, dtype=dtype)
    keep = randn(*shape, device=CPU, dtype=torch.float32, key="mask", grad=False) > -0.3
    if shape[0] == 1:
        keep = keep.transpose(-2, -1).contiguous().transpose(-2, -1)
    if keep.shape[-2] > 1:
        keep[..., 3, :] = True
        keep[..., 16:39, 100:] = False
    found = fusedops.attention(q, k, v, keep)
    added = torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, -torch.inf)
    expected = fusedops.attention(q, k, v, added)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = fusedops.attention(*doubles, keep)
    assert_close(found, exact, expected, "output", depth=130)
    grads = [
        torch.autograd.grad(output.sum(), inputs)
        for output, inputs in ((found, (q, k, v)), (exact, doubles), (expected, (q, k, v)))
    ]
    for name, of_found, of_exact, of_expected in zip("qkv", *grads, strict=True):
        assert_close(of_found, of_exact, of_expected, f"gradient of {name}", depth=130)
    alone = fusedops.attention(q, k, v)
    allowed = keep.all(-1).expand(2, 2, 40)
    assert torch.equal(found[allowed], alone[allowed])


@pytest.mark.parametrize("leading", [(3, 2), (1, 2), (3, 1), (1, 1), (2,), (1,), ()])
def test_a_mask_broadcasts_over_several_batch_dims(leading: tuple[int, ...]) -> None:
    q, k, v = qkv(3, 2, 2, 5, 8)
    mask = randn(*leading, 2, 5, 5, device=CPU, dtype=torch.float32, key="mask")
    output = fusedops.attention(q, k, v, mask)
    want = fusedops.attention(q, k, v, mask.detach().expand(3, 2, 2, 5, 5))
    assert torch.equal(output, want)
    (grad,) = torch.autograd.grad(output.sum(), mask)
    assert grad.shape == mask.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_halves_of_the_keys_merge_into_the_whole(backend: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 3, 5, 16, columns=40, dtype=dtype)
    with fusedops.use_backend(backend):
        parts = [
            fusedops.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True)
            for cut in (slice(0, 13), slice(13, 40))
        ]
        merged, lse = fusedops.merge_attention(*parts[0], *parts[1])
        whole, whole_lse = fusedops.attention(q, k, v, return_lse=True)
        grads = torch.autograd.grad(merged, (q, k, v), torch.ones_like(merged))
        whole_grads = torch.autograd.grad(whole, (q, k, v), torch.ones_like(whole))
    for got, want in zip((merged, lse, *grads), (whole, whole_lse, *whole_grads), strict=True):
        assert_close(got, want.double(), want, "merged", depth=40)


def test_merging_nothing_with_nothing_is_nothing() -> None:
    output, lse = torch.zeros(2, 3), torch.full((2,), -torch.inf)
    merged, merged_lse = fusedops.merge_attention(output, lse, output, lse)
    assert torch.equal(merged, output) and torch.equal(merged_lse, lse)


@pytest.mark.parametrize(
    ("place", "value", "error", "said"),
    [
        (0, None, TypeError, "output must be a torch.Tensor, got NoneType"),
        (1, torch.zeros(1, 2, 5), ValueError, r"lse must be of shape \[1, 2, 4\]"),
        (2, torch.zeros(1, 2, 4, 7), ValueError, r"other must be of shape \[1, 2, 4, 8\]"),
        (3, 3, TypeError, "other_lse must be a torch.Tensor, got int"),
    ],
)
def test_what_cannot_be_merged_is_named(
    place: int, value: object, error: type[Exception], said: str
) -> None:
    halves: list[object] = [torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)] * 2
    halves[place] = value
    with pytest.raises(error, match=f"merge_attention: {said}"):
        fusedops.merge_attention(*halves)


def test_packed_sequences_equal_each_on_its_own() -> None:
    lengths = (5, 0, 70, 33)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (tensor.transpose(0, 1) for tensor in qkv(2, int(ends[-1]), 16))
    last = int(max(lengths))
    packed = fusedops.attention_varlen(q, k, v, ends, ends, last, last, is_causal=True)
    for begin, end in zip(ends[:-1], ends[1:], strict=True):
        own = [tensor[begin:end].transpose(0, 1) for tensor in (q, k, v)]
        alone = fusedops.attention(*own, is_causal=True).transpose(0, 1)
        assert torch.equal(packed[begin:end], alone)


def test_what_lies_behind_the_length_is_not_read() -> None:
    q, k, v = (tensor.detach() for tensor in qkv(1, 2, 1, 8, columns=6))
    k[:, :, 4:], v[:, :, 4:] = torch.nan, torch.nan
    output = fusedops.attention_decode(q, k, v, torch.tensor([4]))
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_closer_than_from_the_rounded_output(dtype: torch.dtype) -> None:
    """Flash attention takes ``sum(output * grad)`` from the rounded output; here nothing is lost.

    It shows where values have a mean: the output is then large and the scores' gradient is not.
    """
    q, k, v = qkv(2, 4, 64, 32, dtype=dtype)
    v = v + 4
    grad = torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)

    def query_gradient(op: object, wide: torch.dtype) -> torch.Tensor:
        leaves = [tensor.detach().to(wide).requires_grad_() for tensor in (q, k, v)]
        output = op(*leaves)  # type: ignore[operator]
        return torch.autograd.grad(output, leaves[0], grad.to(wide))[0].double()

    exact = query_gradient(F.scaled_dot_product_attention, torch.float64)
    ours = query_gradient(fusedops.attention, dtype) - exact
    torchs = query_gradient(F.scaled_dot_product_attention, dtype) - exact
    assert ours.square().mean() < 0.1 * torchs.square().mean()


def test_saved_bytes_grow_with_the_sequence_not_with_its_square() -> None:
    def saved(rows: int) -> int:
        q, k, v = qkv(1, 2, rows, 16)
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fusedops.attention(q, k, v, is_causal=True)
        return count

    assert saved(512) == 8 * saved(64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [-1e4, -1e9, -1e37])
@pytest.mark.parametrize("per_query", [True, False], ids=["per_query", "per_key"])
def test_a_row_that_is_all_but_forbidden_has_the_gradients_of_its_probabilities(
    backend: str, dtype: torch.dtype, bias: float, per_query: bool
) -> None:
    if abs(bias) > torch.finfo(dtype).max:
        pytest.skip(f"{dtype} has no such number")
    q, k, v = qkv(1, 2, 4, 8, columns=40, dtype=dtype)
    mask = torch.zeros(4 if per_query else 1, 40, dtype=dtype)
    mask[-1] = bias
    # Scores of zero: what they add to the bias is not lost in rounding, in any dtype.
    q = (q * (mask[:, :1] == 0)).detach().requires_grad_()
    grad = randn(1, 2, 4, 8, device=CPU, dtype=dtype, key="grad")
    with fusedops.use_backend(backend):
        output = fusedops.attention(q, k, v, mask)
        ours = torch.autograd.grad(output, (q, k, v), grad)
    exact, eager = (_written_out(to, (q, k, v), mask, grad) for to in (torch.float64, dtype))
    for name, *tensors in zip("qkv", ours, exact[1:], eager[1:], strict=True):
        assert_close(*tensors, f"gradient of {name}", depth=40)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e9, 1e18])
def test_huge_scores_weigh_values_as_eager_attention_does(backend: str, scale: float) -> None:
    """Where a row's log-sum-exp is so large that its sum vanishes in the rounding."""
    generator = torch.Generator().manual_seed(5)
    query, key, value, grad = (torch.randn(2, 3, 70, 32, generator=generator) for _ in range(4))
    future = torch.full((70, 70), -torch.inf).triu(1)
    given = (query * scale, key, value)
    exact, eager = (_written_out(to, given, future, grad) for to in (torch.float64, query.dtype))
    value = value.requires_grad_()
    with fusedops.use_backend(backend):
        output = fusedops.attention(query * scale, key, value, is_causal=True)
        (grad_value,) = torch.autograd.grad(output, value, grad)
    for got, place in ((output, 0), (grad_value, 3)):
        allowed = 2 * (eager[place] - exact[place]).abs().max() + 1e-6
        assert (got - exact[place]).abs().max() <= allowed
