"""What is special about the attention ops: masks, halves that merge, packed sequences, gradients.

Gradients of scores are known exactly where a query attends one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close, assert_within_budget

import fusedops
from fusedops.specs import Sample, all_specs
from fusedops.specs.comparison import fresh, incoming, run
from fusedops.specs.make import TensorFactory

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch"])
by_any_backend = pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def qkv(
    *shape: int, columns: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    other = (*shape[:-2], shape[-2] if columns is None else columns, shape[-1])
    new = TensorFactory(CPU, dtype)
    return new(*shape, key="q"), new(*other, key="k"), new(*other, key="v")


def _written_out(
    dtype: torch.dtype, leaves: Sequence[torch.Tensor], mask: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return output and gradients; those of torch's own function do not sum to 1 on the CPU."""
    q, k, v = wide = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    output = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask.to(dtype), -1) @ v
    return output.detach(), *torch.autograd.grad(output, wide, grad.to(dtype))


@pytest.mark.parametrize("shape", [(2, 1, 40, 130), (2, 1, 1, 130), (40, 1), (1, 2, 40, 130)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_boolean_mask_forbids_whole_blocks_and_parts_of_them(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v = qkv(2, 2, 40, 32, columns=130, dtype=dtype)
    keep = TensorFactory(CPU, torch.float32)(*shape, key="mask", grad=False) > -0.3
    if shape[0] == 1:
        keep = keep.transpose(-2, -1).contiguous().transpose(-2, -1)
    if keep.shape[-2] > 1:
        keep[..., 3, :] = True
        keep[..., 16:39, 100:] = False
    spec, sample = all_specs()["attention"], Sample("mask", (q, k, v, keep))
    result = run(spec.op, sample)
    assert_within_budget(result, spec, sample)
    allowed = keep.all(-1).expand(2, 2, 40)
    assert torch.equal(result.outputs[0][allowed], fusedops.attention(q, k, v)[allowed])


@pytest.mark.parametrize("leading", [(3, 2), (1, 2), (3, 1), (1, 1), (2,), (1,), ()])
def test_a_mask_broadcasts_over_several_batch_dims(leading: tuple[int, ...]) -> None:
    q, k, v = qkv(3, 2, 2, 5, 8)
    mask = TensorFactory(CPU, torch.float32)(*leading, 2, 5, 5, key="mask")
    output = fusedops.attention(q, k, v, mask)
    want = fusedops.attention(q, k, v, mask.detach().expand(3, 2, 2, 5, 5))
    assert torch.equal(output, want)
    (grad,) = torch.autograd.grad(output.sum(), mask)
    assert grad.shape == mask.shape


@by_backend
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


@by_backend
def test_merging_nothing_with_nothing_is_nothing(backend: str) -> None:
    forbids_all = torch.zeros(4, 4, dtype=torch.bool)
    with fusedops.use_backend(backend):
        nothing = fusedops.attention(*qkv(1, 2, 4, 8), forbids_all, return_lse=True)
        for output, lse in (nothing, fusedops.merge_attention(*nothing, *nothing)):
            assert not output.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("place", "shape", "said"),
    [
        (1, (1, 2, 5), r"lse must be of shape \[1, 2, 4\]"),
        (2, (1, 2, 4, 7), r"other must be of shape \[1, 2, 4, 8\]"),
    ],
)
def test_what_cannot_be_merged_is_named(place: int, shape: tuple[int, ...], said: str) -> None:
    halves = [torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)] * 2
    halves[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"merge_attention: {said}"):
        fusedops.merge_attention(*halves)


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


@by_backend
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [-1e4, -1e9, -1e37, None])
@pytest.mark.parametrize("per_query", [True, False], ids=["per_query", "per_key"])
def test_a_row_that_is_all_but_forbidden_has_the_gradients_of_its_probabilities(
    backend: str, dtype: torch.dtype, bias: float | None, per_query: bool
) -> None:
    """The least finite number, ``None``, is one too; beside other numbers it forbids."""
    least = torch.finfo(dtype).min
    bias = least if bias is None else bias
    if abs(bias) > torch.finfo(dtype).max:
        pytest.skip(f"{dtype} has no such number")
    q, k, v = qkv(1, 2, 4, 8, columns=40, dtype=dtype)
    mask = torch.zeros(4 if per_query else 1, 40, dtype=dtype)
    mask[-1] = bias
    if per_query:
        mask[0, 1:7] = least
        mask[2], mask[2, 5] = least, -torch.inf
    # Scores of zero: what they add to the bias is not lost in rounding, in any dtype.
    q = (q * (mask[:, :1] == 0)).detach().requires_grad_()
    grad = TensorFactory(CPU, dtype)(1, 2, 4, 8, key="grad")
    with fusedops.use_backend(backend):
        output = fusedops.attention(q, k, v, mask)
        ours = torch.autograd.grad(output, (q, k, v), grad)
    exact, eager = (_written_out(to, (q, k, v), mask, grad) for to in (torch.float64, dtype))
    for name, *tensors in zip(("output", *"qkv"), (output, *ours), exact, eager, strict=True):
        assert_close(*tensors, f"{name} or its gradient", depth=40)


@by_backend
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


# Of each call with one key a query: how many queries and keys, and the options.
ONE_KEY: dict[str, tuple[int, int, dict[str, Any]]] = {
    "window": (37, 35, {"window": (0, 0)}),
    "one token": (1, 1, {}),
    "one key": (37, 1, {}),
    "soft-cap": (37, 1, {"softcap": 2.0}),
    "large scores": (37, 1, {"scale": 100.0}),
    "dropout": (37, 37, {"window": (0, 0), "dropout_p": 0.3}),
}


def assert_zero(output: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    for grad in torch.autograd.grad(output, leaves, incoming((output,))):
        assert not grad.any(), f"{grad.abs().max():.3g}"


@pytest.mark.ci(every=5)
@by_any_backend
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ONE_KEY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_without_rivals_have_no_gradient(
    backend: str, dtype: torch.dtype, name: str, biased: bool
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no kernel")
    rows, columns, options = ONE_KEY[name]
    new = TensorFactory(CPU, dtype)
    query, key = new(2, 4, rows, 24, key="q"), new(2, 2, columns, 24, key="k")
    value = new(2, 2, columns, 16, key="v")
    leaves = [query, key]
    if biased:
        options = options | {"attn_mask": new(1, 4, rows, columns, key="bias")}
        leaves.append(options["attn_mask"])
    with fusedops.use_backend(backend):
        output = fusedops.attention(query, key, value, enable_gqa=True, **options)
        assert_zero(output, leaves)


@by_any_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_of_one_token_have_no_gradient(backend: str, dtype: torch.dtype) -> None:
    new, ends = TensorFactory(CPU, dtype), torch.arange(10)
    query, key, value = new(9, 4, 24, key="q"), new(9, 2, 24, key="k"), new(9, 2, 16, key="v")
    with fusedops.use_backend(backend):
        assert_zero(fusedops.attention_varlen(query, key, value, ends, ends, 1, 1), [query, key])


@by_any_backend
def test_a_sink_is_a_rival(backend: str) -> None:
    inputs = qkv(1, 1, 3, 8)

    def grads(dtype: torch.dtype, name: str) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        sinks = torch.tensor([-10.5], dtype=dtype)
        with fusedops.use_backend(name):
            output = fusedops.attention(*leaves, window=(0, 0), sinks=sinks)
            return list(torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(-1)))

    exact, base = grads(torch.float64, "torch"), grads(torch.float32, "torch")
    for i, actual in enumerate(grads(torch.float32, backend)):
        assert_close(actual, exact[i], base[i], f"gradient {i}")


@by_any_backend
def test_keys_that_are_elsewhere_are_rivals(backend: str) -> None:
    """Each of two keys with the log-sum-exp of both, as ranks of a ring differentiate them."""
    if backend == "torch":
        pytest.skip("the reference makes the log-sum-exp again from the keys that it is given")
    query, key, value = (tensor.detach() for tensor in qkv(1, 2, 5, 16, columns=2))
    options = (0.0, 0.25, -1, -1, 0.0, True)
    with fusedops.use_backend(backend), torch.no_grad():
        call = torch.ops.fusedops.attention_backward
        saved = torch.ops.fusedops.attention(query, key, value, *[None] * 4, *options)
        ones = torch.ones_like(saved[0])

        def grads(part: slice) -> list[torch.Tensor]:
            keys, values = key[:, :, part], value[:, :, part]
            wanted = [True, True, False, False, False]
            arguments = (query, keys, values, *[None] * 4, *saved, *options, wanted)
            return call(ones.cumsum(-1), None, *arguments)

        whole, first, second = grads(slice(2)), grads(slice(1)), grads(slice(1, 2))
    assert_close(first[0] + second[0], whole[0].double(), whole[0], "query", depth=32)
    joined = torch.cat((first[1], second[1]), 2)
    assert_close(joined, whole[1].double(), whole[1], "key", depth=32)


@by_any_backend
def test_a_sink_of_minus_infinity_beside_a_row_of_nothing(backend: str) -> None:
    query, key, value = qkv(1, 2, 4, 8)
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    mask = torch.tensor([True, False, True, True])[:, None].expand(4, 4)
    ends = torch.tensor([0, 4])
    with fusedops.use_backend(backend):
        dense = fusedops.attention(query, key, value, mask, sinks=sinks)
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key[:, :, :2], value[:, :, :2])]
        packed = fusedops.attention_varlen(
            *rows, ends, torch.tensor([0, 2]), 4, 2, is_causal=True, sinks=sinks
        )
        for output in (dense, packed):
            (grad,) = torch.autograd.grad(output, sinks, torch.ones_like(output))
            assert grad[0] == 0 and grad[1].isfinite() and grad[1] != 0, grad


def layout(tensor: torch.Tensor) -> list[int]:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


# What the generic tests leave out of the Triton kernels: all options together, gradients one by
# one, layouts. The truth is the reference; dropout draws the same numbers there.
def assert_agree(op: Any, sample: Sample, given: Any = incoming) -> None:
    results = []
    for backend in ("triton", "torch"):
        with fusedops.use_backend(backend):
            result = run(op, fresh(sample), given)
        results.append([*result.outputs, *result.grads])
    depth = max(tensor.numel() for tensor in sample.tensors)
    for index, (got, want) in enumerate(zip(*results, strict=True)):
        assert_close(got, want.double(), want, f"result {index}", depth)
        assert layout(got) == layout(want)


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


OPTIONS: dict[str, Any] = {
    "dropout_p": 0.3,
    "window": (20, 9),
    "softcap": 3.0,
    "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.0625]]),
    "return_lse": True,
}


@pytest.mark.interpreter
@pytest.mark.parametrize("keys", [50, 52], ids=["counters_apart", "counters_in_fours"])
def test_all_options_together(keys: int) -> None:
    args = new(1, 4, 37, 20), new(1, 2, keys, 20), new(1, 2, keys, 12), new(1, 4, 1, keys)
    options = OPTIONS | {"enable_gqa": True, "sinks": new(4)}
    assert_agree(fusedops.attention, Sample("x", args, options))


@pytest.mark.interpreter
def test_all_options_of_packed_sequences_together() -> None:
    ends = torch.tensor([0, 20, 20, 41]), torch.tensor([0, 33, 36, 52])
    args = new(41, 4, 20), new(52, 2, 20), new(52, 2, 12), *ends, 21, 33
    options = OPTIONS | {"alibi_slopes": torch.rand(3, 4), "is_causal": True, "sinks": new(4)}
    assert_agree(fusedops.attention_varlen, Sample("x", args, options))


@pytest.mark.interpreter
@pytest.mark.parametrize("wanted", range(5))
def test_each_gradient_alone(wanted: int) -> None:
    shapes = ((2, 2, 18, 8), (2, 2, 21, 8), (2, 2, 21, 8), (2, 1, 18, 21), (2,))
    *args, sinks = (
        torch.randn(shape).requires_grad_(i == wanted) for i, shape in enumerate(shapes)
    )
    assert_agree(fusedops.attention, Sample("x", tuple(args), {"sinks": sinks}))


@pytest.mark.interpreter
@pytest.mark.parametrize("given", [incoming, lambda outputs: [torch.ones(()).expand(2, 2, 18, 8)]])
def test_any_layout(given: Any) -> None:
    mask = torch.rand(18, 2, 1).permute(1, 2, 0).unsqueeze(-1).expand(2, 2, 18, 21) > 0.2

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.permute(3, 2, 1, 0), k.unsqueeze(1).mT, v.expand(2, 1, 21, 8)
        return fusedops.attention(q, k, v, mask, enable_gqa=True)

    sample = Sample("x", (new(8, 18, 2, 2), new(2, 8, 21), new(2, 1, 1, 8)))
    assert_agree(call, sample, given)


@pytest.mark.interpreter
@pytest.mark.parametrize("plain", [True, False])
def test_decoding_merges_many_parts(plain: bool) -> None:
    lengths, shape = torch.tensor([300, 77, 1]), (3, 2, 300)
    args = torch.randn(3, 4, 2, 24), torch.randn(*shape, 24), torch.randn(*shape, 40), lengths
    options = OPTIONS | {"window": (45, 0), "alibi_slopes": torch.rand(3, 4)}
    del options["dropout_p"]
    options = {"return_lse": True} if plain else options
    sample = Sample("x", args, options | {"sinks": torch.randn(4)})
    assert_agree(fusedops.attention_decode, sample)


@pytest.mark.parametrize("capacity", [20, 300])  # one part, and many
@pytest.mark.interpreter
def test_a_length_past_the_cache_reads_nothing_and_gives_nan(capacity: int) -> None:
    """What a GPU does where nobody has looked: in compiled code, in a captured graph."""
    cache = torch.randn(1, 2, 4 * capacity, 16)[:, :, :capacity].expand(4, -1, -1, -1)
    q, lengths = torch.randn(4, 4, 1, 16), torch.tensor([capacity, capacity + 1, -1, 2**40])
    with fusedops.use_backend("triton"):
        found, _ = torch.ops.fusedops.attention_decode(
            q, cache, cache, lengths, None, None, 0.25, -1, 0.0
        )
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()
