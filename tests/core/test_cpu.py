"""``fusedops.cpu``: torch's half-precision products and attention run our kernels, reversibly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_close
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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


HALF = torch.ones(32, 32).half()
WRONG: list[Callable[[], object]] = [
    lambda: HALF @ torch.ones(33, 5).half(),
    lambda: torch.mm(HALF, HALF[None]),
    lambda: torch.mm(HALF, HALF.float()),
    lambda: torch.mm(HALF, HALF, out=torch.empty(32, 32)),
    lambda: torch.mm(HALF, HALF, out=torch.empty(1).half().expand(32, 32)),
    lambda: torch.addmm(torch.ones(5).half(), HALF, HALF),
    lambda: torch.addmm(HALF, HALF, HALF, alpha=1j),
    lambda: HALF.clone()[:1].addmm_(HALF, HALF),
    lambda: torch.bmm(HALF[None], HALF),
    lambda: torch.baddbmm(HALF, HALF.expand(2, 32, 32), HALF[None]),
    lambda: HALF @ torch.ones(33).half(),
    lambda: torch._addmm_activation(torch.ones(5).half(), HALF, HALF),
    lambda: F.scaled_dot_product_attention(HALF[None], HALF[None], HALF[None].float()),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_torchs(wrong: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as found:
        wrong()
    assert not cpu.counts()
    cpu.disable()
    with pytest.raises(RuntimeError) as expected:
        wrong()
    assert str(found.value) == str(expected.value)


def test_what_torch_computes_faster_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    row, weight = new(1, 1024, dtype=torch.float16), new(300, 1024, dtype=torch.float16)
    F.linear(row, weight)
    assert not cpu.counts()
    row @ weight.T.contiguous()
    assert cpu.counts() == {"mm float16": 1}
    cpu.disable()
    monkeypatch.setattr(cpu, "_LEAST", 1 << 19)
    with cpu.enabled():
        row @ weight.T.contiguous()
        assert not cpu.counts()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["mm", "bmm"])
def test_out_of_any_layout(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    product = torch.bmm if batch else torch.mm
    a, b = new(*batch, 9, 9, dtype=dtype), new(*batch, 9, 9, dtype=dtype).mT
    expected = product(a, b)
    wide, wider = torch.zeros(2, *batch, 9, 18, dtype=dtype)
    transposed, empty = torch.empty_like(expected).mT, torch.empty(0, dtype=dtype)
    for out in (transposed, wide[..., :9], wider[..., ::2], empty):
        assert product(a, b, out=out) is out
        assert torch.equal(out, expected)
    assert not wide[..., 9:].any() and not wider[..., 1::2].any()
    with pytest.warns(UserWarning, match="resized"):
        product(a, b, out=torch.ones(*batch, 4, 4, dtype=dtype))
    left, right = a.clone(), b.clone()
    assert torch.equal(product(left, b, out=left), expected)
    assert torch.equal(product(a, right, out=right), expected)
    assert cpu.counts() == {f"{product.__name__} {str(dtype)[6:]}": 8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_addend_may_be_the_result(dtype: torch.dtype) -> None:
    a, b, c = (new(9, 9, dtype=dtype) for _ in range(3))
    expected = torch.addmm(c, a, b, beta=0.5)
    for index in range(3):
        tensors = [a.clone(), b.clone(), c.clone()]
        torch.addmm(tensors[2], *tensors[:2], beta=0.5, out=tensors[index])
        assert torch.equal(tensors[index], expected)
    assert torch.equal(a.clone().addmm_(a, b), torch.addmm(a, a, b))
    with pytest.raises(RuntimeError, match="shape|size"):
        new(9, dtype=dtype).addmm_(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_and_layers_for_inference(dtype: torch.dtype) -> None:
    a, vector = new(17, 33, dtype=dtype), new(17, dtype=dtype)
    expected = a.T.double() @ vector.double()
    assert_close(a.T @ vector, expected, expected.to(dtype), depth=17)
    assert cpu.counts() == {f"addmv {str(dtype)[6:]}": 1}
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu").eval()
    x = new(2, 9, 32, dtype=dtype)
    with torch.inference_mode():
        expected = layer.double()(x.double())
        found = layer.to(dtype)(x)
    assert (found - expected).abs().max() < 8 * torch.finfo(dtype).eps * expected.abs().max()
    assert cpu.counts()[f"addmm {str(dtype)[6:]}"] == 3


MASKS: dict[str, Callable[[torch.dtype], torch.Tensor | None]] = {
    "none": lambda dtype: None,
    "causal": lambda dtype: None,
    "rows": lambda dtype: new(7, 11, dtype=dtype),
    "batch": lambda dtype: new(2, 1, 7, 11, dtype=dtype),
    "float32": lambda dtype: new(1, 3, 1, 11, dtype=torch.float32),
    "boolean": lambda dtype: new(7, 11, dtype=dtype) > 0,
    "a row of nothing": lambda dtype: (torch.arange(7) > 0)[:, None].expand(7, 11),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_inside", [True, False])
def test_attention_matches_float64_and_lies_as_torchs(
    heads_inside: bool, name: str, dtype: torch.dtype
) -> None:
    def run(dtype: torch.dtype, mask: torch.Tensor | None) -> list[torch.Tensor]:
        query = new(2, 7, 3, 16, dtype=given).to(dtype).transpose(1, 2)
        query = query if heads_inside else query.contiguous()
        keys_and_values = (new(2, 3, 11, 16, dtype=given).to(dtype) for _ in range(2))
        leaves = [leaf.requires_grad_() for leaf in (query, *keys_and_values)]
        output = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, is_causal=name == "causal", scale=0.3
        )
        grads = torch.autograd.grad(output, leaves, 0.5 + output.detach())
        return [output.detach(), *grads]

    given, mask = dtype, MASKS[name](dtype)
    found = run(dtype, mask)
    assert cpu.counts() == {
        f"scaled_dot_product_attention{part} {str(dtype)[6:]}": 1 for part in ("", "_backward")
    }
    cpu.disable()
    stock = run(dtype, mask)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    for ours, torchs, exact in zip(found, stock, run(torch.float64, mask), strict=True):
        assert (ours.stride(), ours.dtype) == (torchs.stride(), torchs.dtype)
        allowed = 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() < allowed


@pytest.mark.parametrize("ours_first", [True, False])
def test_forward_and_backward_of_attention_may_differ(ours_first: bool) -> None:
    q, k, v = (new(1, 2, size, 8, dtype=torch.float16).requires_grad_() for size in (5, 7, 7))
    mask = (torch.arange(5) > 0)[:, None].expand(5, 7)
    grads = []
    for mixed in (False, True):
        if mixed and not ours_first:
            cpu.disable()
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if mixed:
            cpu.disable() if ours_first else cpu.enable()
        grads.append(torch.autograd.grad(output, (q, k, v), torch.ones_like(output)))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*wide, attn_mask=mask).sum(), wide)
    for whole, mixed_grad, expected in zip(*grads, exact, strict=True):
        assert_close(mixed_grad, expected, whole, depth=expected.numel())


def test_attention_that_is_not_ours_is_torchs() -> None:
    q = new(1, 2, 5, 8, dtype=torch.float16)
    F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    F.scaled_dot_product_attention(q[:, :, :0], q, q)
    assert not cpu.counts()
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q.float(), q)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)  # torch computes it in float32
    assert not cpu.counts()


def test_second_derivatives() -> None:
    x, weight = new(5, 8, dtype=torch.float16), new(6, 8, dtype=torch.float16).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    results = []
    for x_, w in ((x, weight), (x.double(), exact)):
        (grad,) = torch.autograd.grad(F.linear(x_, w).square().sum(), w, create_graph=True)
        results.append(torch.autograd.grad(grad.sum(), w)[0].double())
    assert (results[0] - results[1]).abs().max() < 4e-3 * results[1].abs().max()
    assert cpu.counts()["mm float16"] >= 4


def test_views_of_negative_numbers_and_inference_mode() -> None:
    a, b = new(5, 8, dtype=torch.float16), new(8, 6, dtype=torch.float16)
    expected = a @ b
    with torch.inference_mode():
        assert torch.equal(torch._neg_view(a) @ b, -expected)
        assert torch.equal(torch.zeros_like(expected).addmm_(a, b), expected)
    assert cpu.counts() == {"mm float16": 2, "addmm float16": 1}


def test_threads_may_multiply_while_it_changes() -> None:
    half = new(40, 40, dtype=torch.float16)
    exact = half.double() @ half.double()
    done = threading.Event()
    errors: list[float] = []

    def multiply() -> None:
        while not done.is_set():
            errors.append(float((half @ half - exact).abs().max()))

    workers = [threading.Thread(target=multiply) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(50):
        cpu.disable()
        cpu.enable()
    done.set()
    for worker in workers:
        worker.join()
    assert errors and max(errors) < 0.05


def step_of_wrapped(rank: int, kind: str) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Return the calls and the gradients of a model that torch shards or replicates."""
    cpu._served = lambda: DTYPES  # type: ignore[assignment]
    cpu._LEAST = 1
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(torch.bfloat16)
    with cpu.enabled():
        if kind == "DDP":
            model = DistributedDataParallel(model)
        elif kind == "FSDP2":
            fully_shard(model)
        x = new(8, 16, dtype=torch.bfloat16)
        x = x if kind == "one process" else x.chunk(2)[rank]
        model(x).float().square().mean().backward()
        grads = [p.grad.full_tensor() if kind == "FSDP2" else p.grad for p in model.parameters()]
        return cpu.counts(), [grad.float() for grad in grads]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_data_parallel_training(kind: str, on_processes: Callable[..., list[Any]]) -> None:
    (_, expected), *_ = on_processes(step_of_wrapped, 1, "one process")
    for calls, grads in on_processes(step_of_wrapped, 2, kind):
        assert calls == {"addmm bfloat16": 2, "mm bfloat16": 3}
        for found, wanted in zip(grads, expected, strict=True):
            error = (found - wanted).abs().max()
            assert error < 4 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


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
@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_code_runs_it(compiled_first: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        q = F.linear(x, weight).unflatten(-1, (2, 40)).movedim(1, 0)[None]
        return F.scaled_dot_product_attention(q, q, q) + 1

    x, weight = new(64, 96, dtype=torch.float16), new(80, 96, dtype=torch.float16)
    x.requires_grad_()
    expected = run(x)
    compiled = torch.compile(run)
    if compiled_first:
        cpu.disable()
        compiled(x).sum().backward()
        cpu.enable()
    found = compiled(x)
    torch.testing.assert_close(found, expected)
    before = cpu.counts()
    found.sum().backward()
    assert cpu.counts()["mm float16"] > before["mm float16"]
    assert cpu.counts()["scaled_dot_product_attention_backward float16"] == 1


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
