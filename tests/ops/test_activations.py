"""What is special about gelu, bias_gelu, swiglu and geglu: published values, names, rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close

import fusedops
from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS

# x, x * sigmoid(1.702 x), its derivative: to the digits that are published.
FAST_GELU = [
    (-8.0, "-9.766428866e-06", "-1.540163803e-05"),
    (-5.0, "-1.007016267e-03", "-1.512193240e-03"),
    (-1.0, "-0.154204234", "-0.067779607"),
    (0.0, "0.000000000", "0.500000000"),
    (0.5, "0.350388437", "0.879221912"),
    (1.0, "0.845795766", "1.067779607"),
    (2.0, "1.935658623", "1.073815354"),
    (4.0, "3.995585276", "1.006401887"),
    (9.0, "8.999997997", "1.000003187"),
]
by_backend = pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
Op = Callable[..., torch.Tensor]


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize(("x", "value", "slope"), FAST_GELU)
def test_fast_gelu_has_the_published_values(x: float, value: str, slope: str, backend: str) -> None:
    leaf = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    with fusedops.use_backend(backend):
        y = fusedops.gelu(leaf, "fast")
        (grad,) = torch.autograd.grad(y.sum(), leaf)
    for tensor, published in ((y, value), (grad, slope)):
        digits = ".9e" if "e" in published else ".9f"
        assert format(tensor.item() + 0.0, digits) == published


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
