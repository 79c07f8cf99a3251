"""``fusedops.cpu``: torch's half-precision products run our kernels, right and reversibly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from comparing import assert_close
from torch import nn
from torch.nn import functional as F

import fusedops.cpu as cpu
from fusedops._core import extension

pytestmark = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the C++ kernels are not built"
)
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On every processor both dtypes are replaced in these tests, of any size."""
    monkeypatch.setattr(cpu, "_served", lambda: DTYPES)
    monkeypatch.setattr(cpu, "_LEAST", 1)
    with cpu.enabled():
        yield


def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1, :].expand(x.shape),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_match_float64(name: str, left: str, right: str, dtype: torch.dtype) -> None:
    batch = (3,) if name in ("bmm", "baddbmm") else ()
    a = LAYOUTS[left](new(*batch, 17, 33, dtype=dtype))
    b = LAYOUTS[right](new(*batch, 33, 21, dtype=dtype))
    adds = name in ("addmm", "baddbmm")
    addends = [new(21, dtype=dtype), new(17, 1, dtype=dtype), new(*batch, 17, 21, dtype=dtype)]
    for addend in addends if adds else [None]:
        args = (a, b) if addend is None else (addend, a, b)
        kwargs = {"beta": 0.5, "alpha": 2.0} if adds else {}
        product = getattr(torch, name)
        before = sum(cpu.counts().values())
        found = product(*args, **kwargs)
        out = torch.empty_like(found)
        assert product(*args, **kwargs, out=out) is out and torch.equal(out, found)
        if adds and addend.shape == found.shape:
            here = addend.clone()
            assert torch.equal(getattr(here, f"{name}_")(a, b, **kwargs), found)
        assert sum(cpu.counts().values()) >= before + 2
        expected = product(*(tensor.double() for tensor in args), **kwargs)
        assert_close(found, expected, expected.to(dtype), depth=a.shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_and_their_gradients_run_it(dtype: torch.dtype) -> None:
    linear, x = nn.Linear(24, 40).to(dtype), new(2, 9, 24, dtype=dtype).requires_grad_()
    F.linear(x, linear.weight, linear.bias).square().sum().backward()
    after_linear = cpu.counts()
    assert sum(after_linear.values()) == 3, "the layer, and the gradients of input and weight"
    q = new(2, 3, 9, 24, dtype=dtype).requires_grad_()
    (q @ q.mT).sum().backward()
    assert sum(cpu.counts().values()) == 6
    exact, exact_x = nn.Linear(24, 40).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(linear.state_dict())
    exact(exact_x).square().sum().backward()
    scale = torch.finfo(dtype).eps
    for ours, truth in ((x, exact_x), *zip(linear.parameters(), exact.parameters(), strict=True)):
        error = (ours.grad.double() - truth.grad).abs().max() / truth.grad.abs().max()
        assert error < 4 * scale


def test_what_is_not_ours_is_torchs() -> None:
    half = new(4, 5, dtype=torch.float16)
    assert torch.mm(half.float(), half.T.float()).dtype == torch.float32
    assert torch.mm(half[:0], half.T).shape == (0, 4)
    assert torch.equal(torch.mm(half[:, :0], half.T[:0]), torch.zeros(4, 4).half())
    assert not cpu.counts()
    with pytest.raises(RuntimeError, match="cannot be multiplied|size"):
        torch.mm(half, half)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(half, half.T.float())
    with pytest.raises(RuntimeError):
        torch.addmm(new(7, dtype=torch.float16), half, half.T)
    for product, shape in ((torch.mm, (4,)), (torch.mm, (2, 4, 4)), (torch.bmm, (4, 4))):
        operand = new(*shape, dtype=torch.float16)
        with pytest.raises(RuntimeError, match="matrix|2D|3D|dimension"):
            product(operand, operand)
        with pytest.raises(RuntimeError, match="matrix|2D|3D|dimension"):
            product(operand, operand, out=torch.empty_like(operand))
    out = torch.empty(4, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(half, half.T, out=out)
    assert not cpu.counts()


def test_what_torch_computes_faster_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    row, weight = new(1, 512, dtype=torch.float16), new(300, 512, dtype=torch.float16)
    F.linear(row, weight)
    assert not cpu.counts()
    row @ weight.T.contiguous()
    assert cpu.counts() == {"mm float16": 1}
    monkeypatch.setattr(cpu, "_LEAST", 1 << 18)
    row @ weight.T.contiguous()
    assert cpu.counts() == {"mm float16": 1}


def test_beta_0_ignores_what_is_added() -> None:
    half = new(4, 5, dtype=torch.float16)
    nan = torch.full((4, 4), torch.nan, dtype=torch.float16)
    assert torch.equal(torch.addmm(nan, half, half.T, beta=0), half @ half.T)


def test_autocast_and_vmap() -> None:
    x, weight = new(3, 8, 16, dtype=torch.float32), new(16, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
    assert cpu.counts() == {"mm bfloat16": 1}
    half = x.half()
    torch.testing.assert_close(
        torch.vmap(torch.mm, (0, None))(half, weight.half()), half @ weight.half()
    )


@pytest.mark.slow
def test_compiled_code_runs_it() -> None:
    x, weight = new(64, 96, dtype=torch.float16), new(80, 96, dtype=torch.float16)
    expected = F.linear(x, weight)
    before = sum(cpu.counts().values())
    found = torch.compile(lambda x: F.linear(x, weight) + 1)(x)
    torch.testing.assert_close(found, expected + 1)
    assert sum(cpu.counts().values()) > before


def test_it_is_reversible() -> None:
    half = new(4, 5, dtype=torch.float16)
    assert cpu.is_enabled()
    with cpu.enabled():
        half @ half.T
    assert cpu.is_enabled() and cpu.counts() == {"mm float16": 1}
    cpu.disable()
    half @ half.T
    assert not cpu.is_enabled() and cpu.counts() == {"mm float16": 1}
    cpu.disable()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_the_environment_enables_it() -> None:
    code = "import fusedops; from fusedops import cpu; print(cpu.is_enabled())"
    assert run(code, FUSEDOPS_CPU="1").strip().endswith("True")
    assert run(code, FUSEDOPS_CPU="0").strip().endswith("False")


def test_without_kernels_it_says_why() -> None:
    output = run("import fusedops.cpu; fusedops.cpu.enable()", FUSEDOPS_DISABLE_NATIVE="1")
    assert "UnsupportedError: fusedops.cpu.enable: the C++ kernels are missing" in output
