"""What is special about activations, dropout, rotary positions and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close

import fusedops
from fusedops._core import philox
from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS

TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])
Op = Callable[..., torch.Tensor]


@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_between_minus_8_and_8(approximate: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(dtype)
    x = x[x.abs() <= 8]
    assert x.numel() > 30_000
    eager = {
        "none": F.gelu,
        "tanh": lambda t: F.gelu(t, approximate="tanh"),
        "fast": lambda t: t * torch.sigmoid(1.702 * t),
    }[approximate]
    assert_close(fusedops.gelu(x, approximate), eager(x.double()), eager(x), approximate)


GATED: dict[str, tuple[Op, Op]] = {
    "swiglu": (fusedops.swiglu, F.silu),
    **{
        f"geglu {form}": (lambda g, u, form=form: fusedops.geglu(g, u, form), ACTIVATIONS[name])
        for form, name in GELU_VARIANTS.items()
    },
}
# Each op as a function of what is activated, and the factor of the result.
OF_ONE: dict[str, tuple[Op, float]] = {
    **{
        f"gelu {form}": (lambda x, form=form: fusedops.gelu(x, form), 1.0) for form in GELU_VARIANTS
    },
    **{
        name: (lambda gate, op=op: op(gate, torch.full_like(gate, 2.0)), 2.0)
        for name, (op, _) in GATED.items()
    },
}


@pytest.mark.parametrize("name", OF_ONE)
@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nothing_finite_overflows(name: str, backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels compute in float32")
    op, factor = OF_ONE[name]
    # What is doubled must not overflow by that; torch's own gelu doubles x.
    most = 1e38 if factor == 2.0 or (backend, name) == ("torch", "gelu none") else 3e38
    x = torch.tensor([-most, -1e30, -2e4, 2e4, 1e30, most] * 3, dtype=dtype, requires_grad=True)
    with fusedops.use_backend(backend):
        y = op(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, factor * x.clamp_min(0.0))
    assert torch.equal(slope, factor * (x > 0).to(dtype))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_large_sums_of_a_linear_layer_stay_finite(activation: str) -> None:
    x = torch.tensor([[-3e38], [-1e30], [-200.0], [200.0], [1e15]], requires_grad=True)
    output = fusedops.linear_act(x, torch.ones(1, 1), activation=activation)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert output.isfinite().all() and grad.isfinite().all()


# Name -> op, its formula, and arguments: -3 + 2^-7 is no bfloat16, and eager rounds it back to -3.
ROUNDED_INSIDE: dict[str, tuple[Op, Op, list[torch.Tensor]]] = {
    "bias_gelu": (
        fusedops.bias_gelu,
        lambda x, bias: F.gelu(x + bias),
        [torch.full((1, 40), -3.0), torch.full((40,), 2.0**-7)],
    ),
    **{
        name: (
            op,
            lambda gate, up, activation=activation: activation(gate) * up,
            [torch.linspace(-4, 4, 1000), torch.linspace(1, 3, 1000)],
        )
        for name, (op, activation) in GATED.items()
    },
}


@pytest.mark.parametrize("name", ROUNDED_INSIDE)
@by_backend
def test_inner_values_are_not_rounded(name: str, backend: str) -> None:
    op, formula, args = ROUNDED_INSIDE[name]
    given = [arg.bfloat16() for arg in args]
    exact, eager = formula(*(arg.double() for arg in given)), formula(*given)
    with fusedops.use_backend(backend):
        got = op(*given)
    assert_close(got, exact, exact.bfloat16(), name)
    assert (got.double() - exact).square().mean() < (eager.double() - exact).square().mean()


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_halves_of_one_tensor_are_not_copied(name: str) -> None:
    gate, up = torch.randn(64, 4, 2 * 512).chunk(2, -1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        getattr(fusedops, name)(gate, up)
    ran = {event.name for event in profile.events()}
    assert f"fusedops_cpp::{name}" in ran or f"fusedops::{name}" in ran
    assert not {each for each in ran if "copy" in each or "contiguous" in each or "clone" in each}


CPU = torch.device("cpu")

# Counter, key, and the words that are drawn in seven and in ten rounds.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000, 00000000 00000000
5f6fb709 0d893f64 4f121f81 4f730a48, 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff, ffffffff ffffffff
5207ddc2 45165e59 4d8ee751 8c52f662, 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344, a4093822 299f31d0
4dfccaba 190a87f0 c47362ba b6b5242a, d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("number", range(3))
def test_philox_gives_random123s_known_answers(number: int) -> None:
    asked, answers = (
        line.split(", ") for line in KNOWN_ANSWERS.split("\n")[1:-1][2 * number :][:2]
    )
    counter, key = (tuple(torch.tensor(int(w, 16)) for w in part.split()) for part in asked)
    for rounds, words in zip((7, 10), answers, strict=True):
        drawn = philox.philox4x32(counter, key, rounds)  # type: ignore[arg-type]
        assert " ".join(f"{int(word):08x}" for word in drawn) == words


def expected_mask(shape: tuple[int, ...], p: float, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return philox.keep_mask(shape, philox.new_seed(CPU), p)


def _of_norm(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, residual, p: op(x, residual, x.shape[-1:], dropout_p=p)


# Op -> it as a function of input, residual and probability, whose last result is their sum.
DROPPING: dict[str, Callable[..., Any]] = {
    "bias_dropout_add": lambda x, residual, p: (fusedops.bias_dropout_add(x, None, residual, p),),
    "add_layer_norm": _of_norm(fusedops.add_layer_norm),
    "add_rms_norm": _of_norm(fusedops.add_rms_norm),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (7, 33), (3, 128), (2, 5, 260), (4097,), (2, 9001)]


@by_backend
@pytest.mark.parametrize(
    ("name", "shape", "p"),
    [
        *(("bias_dropout_add", shape, p) for shape in SHAPES for p in (0.1, 0.5, 0.999)),
        *((f"add_{n}_norm", s, 0.3) for n in ("layer", "rms") for s in (*SHAPES[2:4], (2, 9001))),
    ],
)
def test_forward_and_backward_drop_by_the_mask_of_the_seed(
    name: str, shape: tuple[int, ...], p: float, backend: str
) -> None:
    x, residual = torch.ones(shape, requires_grad=True), torch.zeros(shape, requires_grad=True)
    with fusedops.use_backend(backend):
        torch.manual_seed(3)
        outputs = DROPPING[name](x, residual, p)
        grads = torch.autograd.grad(outputs, (x, residual), [torch.randn(shape) for _ in outputs])
    keep, scale = expected_mask(shape, p, 3), philox.scale(p)
    assert torch.equal(outputs[-1] != 0, keep)
    torch.testing.assert_close(outputs[-1], torch.where(keep, scale, 0.0))
    torch.testing.assert_close(grads[0], torch.where(keep, grads[1] * scale, 0.0))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_elements_have_their_rate_and_are_independent(p: float) -> None:
    count = 1 << 20
    first, second = (expected_mask((count,), p, seed).double() - (1 - p) for seed in (1, 2))
    variance = p * (1 - p)
    assert abs(first.mean().item()) < 5 * (variance / count) ** 0.5
    for a, b in ((first[1:], first[:-1]), (first[4:], first[:-4]), (first, second)):
        assert abs((a * b).mean().item() / variance) < 5 * count**-0.5


def test_torchs_seed_decides_and_calls_differ() -> None:
    x, zero = torch.ones(4096), torch.zeros(4096)
    torch.manual_seed(0)
    calls = [fusedops.bias_dropout_add(x, None, zero, 0.5) for _ in range(2)]
    assert not torch.equal(*calls)
    torch.manual_seed(0)
    assert torch.equal(fusedops.bias_dropout_add(x, None, zero, 0.5), calls[0])


def test_without_dropout_no_random_number_is_drawn() -> None:
    x = torch.randn(4, 8)
    before = torch.get_rng_state()
    fusedops.bias_dropout_add(x, None, x, 0.0)
    fusedops.bias_dropout_add(x, None, x, 0.5, training=False)
    assert torch.equal(torch.get_rng_state(), before)


@by_backend
def test_p_1_drops_all_even_what_is_not_finite(backend: str) -> None:
    residual = torch.randn(3, 8)
    x = torch.full((3, 8), float("inf"), requires_grad=True)
    with fusedops.use_backend(backend):
        output = fusedops.bias_dropout_add(x, torch.ones(8), residual, 1.0)
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(output, residual)
    assert torch.equal(grad, torch.zeros_like(grad))


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


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["keep", "additive", "per_row", "input"])
def test_a_row_without_keys_gives_zeros(kind: str, dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(2, 5, 37).to(dtype)
    keep = torch.rand(5, 37) > 0.3
    keep[:, 0] = True
    keep[3] = False
    if kind == "per_row":
        keep = keep[:, :1].clone()
    mask = keep
    if kind == "additive":
        mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -torch.inf)
        mask.requires_grad_()
    if kind == "input":
        x, mask = x.masked_fill(~keep, -torch.inf), None
    x.requires_grad_()
    leaves = [x] if mask is None or not mask.requires_grad else [x, mask]
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x, mask)
        grads = torch.autograd.grad(y, leaves, torch.randn_like(y))
    empty = torch.zeros_like(y[:, 3])
    assert torch.equal(y[:, 3], empty) and torch.equal(grads[0][:, 3], empty)
    assert all(grad.isfinite().all() for grad in (y, *grads))


@by_backend
def test_the_least_finite_number_is_no_mask(backend: str) -> None:
    x = torch.randn(1, 2, 8).bfloat16()
    mask = torch.zeros(2, 8, dtype=torch.bfloat16)
    mask[0] = torch.finfo(torch.bfloat16).min
    mask[1, 4:] = torch.finfo(torch.bfloat16).min
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x, mask)
    assert torch.equal(y[0, 0], torch.full_like(y[0, 0], 1 / 8))
    assert not y[0, 1, 4:].any()


@by_backend
@pytest.mark.parametrize("kind", ["keep", "additive"])
@pytest.mark.parametrize("columns", [19, 1], ids=["per_column", "per_row"])
def test_an_expanded_mask_gives_the_bits_of_a_dense_one(
    kind: str, columns: int, backend: str
) -> None:
    x = torch.randn(2, 3, 6, 19)
    mask = torch.randn(2, 1, 6, columns)
    mask = mask > -0.5 if kind == "keep" else mask
    results = []
    for given in (mask, mask.expand(2, 3, 6, 19), mask.expand(2, 3, 6, 19).contiguous()):
        leaf = x.clone().requires_grad_()
        given = given.detach().requires_grad_(kind == "additive")
        with fusedops.use_backend(backend):
            y = fusedops.scaled_masked_softmax(leaf, given, 0.7)
            leaves = [leaf, given] if given.requires_grad else [leaf]
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y) + x)
        assert grads[-1].shape == leaves[-1].shape
        results.append((y, grads[0]))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_the_mask_is_never_expanded_in_memory() -> None:
    x, mask = torch.randn(64, 16, 32), torch.zeros(16, 1, dtype=torch.bool)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fusedops.scaled_masked_softmax(x, mask.expand(64, 16, 32))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated == x.numel() * x.element_size()
