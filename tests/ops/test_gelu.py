"""What is special about gelu: published values, infinities, the names of the variants."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_testing import assert_close

import fusedops
from fusedops._core.activation import GELU_VARIANTS

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

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def value_and_slope(x: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = fusedops.gelu(x, approximate)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize(("x", "value", "slope"), FAST_GELU)
def test_fast_gelu_has_the_published_values(x: float, value: str, slope: str, backend: str) -> None:
    with fusedops.use_backend(backend):
        got = value_and_slope(torch.tensor([x], dtype=torch.float64), "fast")
    for tensor, published in zip(got, (value, slope), strict=True):
        digits = ".9e" if "e" in published else ".9f"
        assert format(tensor.item() + 0.0, digits) == published


def test_fast_gelu_has_the_published_minimum() -> None:
    x = torch.linspace(-2.0, 0.0, 200_001, dtype=torch.float64)
    y, slope = value_and_slope(x, "fast")
    at_minimum = fusedops.gelu(torch.tensor(-0.7512, dtype=torch.float64), "fast").item()
    assert format(at_minimum, ".9f") == "-0.163610189"
    assert format(x[y.argmin()].item(), ".4f") == "-0.7512"
    assert (slope[x < -0.7513] < 0).all() and (slope[x > -0.7511] > 0).all()


def test_fast_gelu_has_the_published_distance_to_erf() -> None:
    x = torch.linspace(-10.0, 10.0, 200_001, dtype=torch.float64)
    distance = (fusedops.gelu(x, "fast") - fusedops.gelu(x, "none")).abs()
    assert format(distance.max().item(), ".5f") == "0.02033"
    assert format(x[distance.argmax()].abs().item(), ".2f") == "2.27"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_overflows(backend: str, approximate: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels compute in float32")
    most = 1e38 if (backend, approximate) == ("torch", "none") else 3e38  # torch's doubles x
    x = torch.tensor([-most, -1e30, -2e4, 2e4, 1e30, most] * 3, dtype=dtype)
    with fusedops.use_backend(backend):
        y, slope = value_and_slope(x, approximate)
    assert torch.equal(y, x.clamp_min(0.0))
    assert torch.equal(slope, (x > 0).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_infinities_give_what_torch_has_in_float64(
    backend: str, approximate: str, dtype: torch.dtype
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels compute in float32")
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, inf] * 9, dtype=dtype)
    with fusedops.use_backend(backend):
        y, slope = value_and_slope(x, approximate)
    with fusedops.use_backend("torch"):
        of_torch = value_and_slope(x.double(), approximate)
    for got, want in ((y, (nan, inf)), (slope, (nan, nan))):
        wanted = torch.tensor(want * 9, dtype=dtype)
        torch.testing.assert_close(got, wanted, equal_nan=True)
    torch.testing.assert_close((y.double(), slope.double()), of_torch, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", GELU_VARIANTS)
def test_nan_stays_nan(backend: str, approximate: str) -> None:
    x = torch.tensor([1.0, float("nan"), -1.0])
    with fusedops.use_backend(backend):
        y, slope = value_and_slope(x, approximate)
    assert y.isnan().tolist() == slope.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize(
    ("name", "approximate"),
    [
        ("gelu", "none"),
        ("gelu_python", "none"),
        ("gelu_new", "tanh"),
        ("gelu_fast", "tanh"),
        ("gelu_pytorch_tanh", "tanh"),
        ("quick_gelu", "fast"),
    ],
)
def test_hugging_face_names_mean_these_variants(name: str, approximate: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.ACT2FN[name]
    x = torch.linspace(-6.0, 6.0, 4001)
    # transformers writes sqrt(2 / pi) with ten digits in gelu_fast: float32 is where they agree.
    assert_close(fusedops.gelu(x, approximate), theirs(x).double(), theirs(x), name)
    for other in set(GELU_VARIANTS) - {approximate}:
        with pytest.raises(AssertionError):
            assert_close(fusedops.gelu(x, other), theirs(x).double(), theirs(x), name)


def test_only_the_input_is_saved() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fusedops.gelu(x, "tanh")
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]


@pytest.mark.parametrize(
    ("approximate", "dtype"),
    [("none", torch.bfloat16), ("tanh", torch.float16), ("fast", torch.float16)],
)
def test_large_outputs_are_the_same_bits_as_small_ones(
    approximate: str, dtype: torch.dtype
) -> None:
    """Above 16 MiB the kernels write around the cache; the odd end of the tensor does not."""
    x = torch.randn(4096 * 2049 + 17).to(dtype)
    large = value_and_slope(x, approximate)
    for got, want in zip(large, zip(*_in_pieces(x, approximate), strict=True), strict=True):
        assert torch.equal(got, torch.cat(want))


def _in_pieces(x: torch.Tensor, approximate: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [value_and_slope(piece, approximate) for piece in x.split(1_000_003)]
