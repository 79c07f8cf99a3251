"""Attention by torch's kernels, configurations of the Triton modules: values, layouts, who serves.

The kernels of torch run on GPUs only: on the CPU stand-ins give their values in their layouts, and
meta tensors hold the calls to the real schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fusedops
from fusedops._core import backends, dtypes, extension

pytest.importorskip("triton")

from fusedops.kernels import _attention_torch, attention, attention_varlen

aten = torch.ops.aten
SCALE = 0.3
CONFIGS = pytest.mark.parametrize("config", _attention_torch.DENSE)
CAUSAL = pytest.mark.parametrize("right", [-1, 0], ids=["whole", "causal"])
HEADS = pytest.mark.parametrize("key_heads", [4, 2])


def tensors(key_heads: int = 4, rows: int = 33, **options: Any) -> list[torch.Tensor]:
    """Return query, key, value and a gradient of the output, ``[B, H, S, D]``."""
    made = torch.Generator().manual_seed(2)
    shapes = [(2, heads, rows, 16) for heads in (4, key_heads, key_heads, 4)]
    drawn = (torch.randn(shape, generator=made) for shape in shapes)
    return [each.to(options.pop("dtype", torch.bfloat16)).to(**options) for each in drawn]


def packed(key_heads: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the tensors of packed sequences, the third without keys, and where they end."""
    query, key, value, do = (tensor[0].transpose(0, 1) for tensor in tensors(key_heads))
    ends_q, ends_k = torch.tensor([0, 9, 20, 26]), torch.tensor([0, 9, 26, 26])
    return [query[:26], key[:26], value[:26], do[:26]], ends_q, ends_k


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural log-sum-exp ``[..., H, S]`` in float64, lower right corners."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (each.double().repeat_interleave(groups, -3) for each in (key, value))
    scores = scale * query.double() @ key.mT
    if causal:
        rows, keys = scores.shape[-2:]
        allowed = torch.ones(rows, keys, dtype=torch.bool, device=key.device).tril(keys - rows)
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return weights @ value, lse


def gradients(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    leaves = [each.double().detach().requires_grad_() for each in (q, k, v)]
    with torch.enable_grad():
        output, _ = exact(*leaves, causal, scale)
    found = torch.autograd.grad(output, leaves, do.double(), allow_unused=True)
    return tuple(each.to(q.dtype) for each in found)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put stand-ins in the place of torch's kernels; return the names of those that ran."""
    ran: list[str] = []

    def put(name: str, function: Callable[..., Any]) -> None:
        def stand_in(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return function(*args, **options)

        monkeypatch.setattr(aten, name, stand_in)

    def cudnn(
        q: Any, k: Any, v: Any, bias: Any, wants: bool, p: float, causal: bool, *, scale: Any
    ):
        assert bias is None and wants and p == 0.0
        out, lse = exact(q, k, v, causal, scale)
        return out.to(q.dtype), lse.float().unsqueeze(3)

    def flash(q: Any, k: Any, v: Any, p: float, causal: bool, *, scale: float) -> Any:
        assert p == 0.0
        out, lse = exact(q, k, v, causal, scale)
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.float()

    def cudnn_backward(
        do, q, k, v, out, lse, seed, offset, bias, a, b, rows, keys, p, causal, *, scale
    ):
        assert bias is a is b is None and (rows, keys, p) == (q.shape[2], k.shape[2], 0.0)
        assert torch.equal(lse.squeeze(3).exp().isfinite(), torch.ones(q.shape[:3]).bool())
        return gradients(do, q, k, v, causal, scale)

    def flash_backward(do, q, k, v, out, lse, a, b, rows, keys, p, causal, seed, offset, *, scale):
        assert a is b is None and (rows, keys, p) == (q.shape[2], k.shape[2], 0.0)
        assert lse.shape == q.shape[:3]
        return gradients(do, q, k, v, causal, scale)

    def sequences(ends: torch.Tensor) -> list[slice]:
        assert ends.dtype == torch.int32
        return [slice(*pair) for pair in zip(ends.tolist(), ends.tolist()[1:], strict=False)]

    def packed_forward(q, k, v, ends_q, ends_k, rows, keys, p, causal, debug, *, scale):
        assert p == 0.0 and not debug
        parts = []
        for of_q, of_k in zip(sequences(ends_q), sequences(ends_k), strict=True):
            here = (q[of_q], k[of_k], v[of_k])
            parts.append(exact(*(each.transpose(0, 1) for each in here), causal, scale))
        lse = torch.cat([each for _, each in parts], 1)
        out = torch.cat([each for each, _ in parts], 1).transpose(0, 1)
        # A row without keys has infinity there.
        return out.to(q.dtype), torch.where(lse == -torch.inf, torch.inf, lse).float()

    def packed_backward(
        do, q, k, v, out, lse, ends_q, ends_k, rows, keys, p, causal, seed, offset, *, scale
    ):
        assert bool((lse > -torch.inf).all()) and seed.shape == (2,)
        found = [torch.zeros_like(each) for each in (q, k, v)]
        for of_q, of_k in zip(sequences(ends_q), sequences(ends_k), strict=True):
            if of_k.start < of_k.stop:
                here = (do[of_q], q[of_q], k[of_k], v[of_k])
                grads = gradients(*(each.transpose(0, 1) for each in here), causal, scale)
                for into, at, grad in zip(found, (of_q, of_k, of_k), grads, strict=True):
                    into[at] = grad.transpose(0, 1)
        return found

    put("_scaled_dot_product_cudnn_attention", cudnn)
    put("_scaled_dot_product_flash_attention", flash)
    put("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
    put("_scaled_dot_product_flash_attention_backward", flash_backward)
    put("_flash_attention_forward", packed_forward)
    put("_flash_attention_backward", packed_backward)
    monkeypatch.setattr(_attention_torch, "_takes", lambda config, call: True)
    return ran


def assert_close(got: Any, wanted: Any) -> None:
    """Compare results with the reference's: one rounding of difference, and one of its own."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert mine.stride() == theirs.stride()
            budget = dtypes.error_budget(theirs, theirs.double(), mine.dtype, depth=64)
            finite = torch.where(theirs.isinf(), 0.0, (mine - theirs).double().abs())
            assert bool((finite <= budget.nan_to_num(0.0)).all())
            assert torch.equal(mine.isinf(), theirs.isinf())


@CONFIGS
@CAUSAL
@HEADS
def test_dense_values_are_those_of_the_reference(
    stand_ins: list[str], config: str, right: int, key_heads: int
) -> None:
    query, key, value, do = tensors(key_heads)
    numbers = (None, None, None, None, 0.0, SCALE, -1, right, 0.0)
    for keep in (False, True):
        got = attention.forward(query, key, value, *numbers, keep, config=config)
        with fusedops.use_backend("torch"):
            wanted = torch.ops.fusedops.attention(query, key, value, *numbers, keep)
        assert_close(got[:2], wanted[:2])
        assert [each.shape for each in got] == [each.shape for each in wanted]
        assert got[2].count_nonzero() == 0, "torch tells nothing of its rounding"
    saved = (query, key, value, *numbers[:4], *got)
    call = (do, None, *saved, *numbers[4:], True)
    for mask in ([True, True, True, False, False], [True, False, True, False, False]):
        found = attention.backward(*call, mask, config=config)
        with fusedops.use_backend("torch"):
            wanted = torch.ops.fusedops.attention_backward(*call, mask)
        assert_close(found, wanted)
    assert len(stand_ins) == 4 and all(config in stand_in for stand_in in stand_ins)


@CAUSAL
@HEADS
def test_packed_values_are_those_of_the_reference(
    stand_ins: list[str], right: int, key_heads: int
) -> None:
    (query, key, value, do), ends_q, ends_k = packed(key_heads)
    numbers = (ends_q, ends_k, None, None, None, 11, 17, 0.0, SCALE, -1, right, 0.0)
    got = attention_varlen.forward(query, key, value, *numbers, True, config="flash")
    with fusedops.use_backend("torch"):
        wanted = torch.ops.fusedops.attention_varlen(query, key, value, *numbers, True)
    assert_close(got[:2], wanted[:2])
    assert bool((got[1][:, 20:] == -torch.inf).all()), "a sequence without keys"
    call = (do, None, query, key, value, *numbers[:5], *got, *numbers[5:], True)
    mask = [True, True, True, False]
    found = attention_varlen.backward(*call, mask, config="flash")
    with fusedops.use_backend("torch"):
        assert_close(found, torch.ops.fusedops.attention_varlen_backward(*call, mask))
    assert stand_ins == ["_flash_attention_forward", "_flash_attention_backward"]


@CONFIGS
def test_calls_fit_the_schemas_of_torch(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setattr(_attention_torch, "_takes", lambda config, call: True)
    query, key, value, do = tensors(device="meta")
    numbers = (None, None, None, None, 0.0, SCALE, -1, 0, 0.0, True)
    got = attention.forward(query, key, value, *numbers, config=config)
    fake = torch.ops.fusedops.attention(query, key, value, *numbers)
    assert [(a.shape, a.dtype) for a in got] == [(b.shape, b.dtype) for b in fake]
    call = (do, None, query, key, value, *numbers[:4], *got, *numbers[4:])
    grads = attention.backward(*call, [True, True, True, False, False], config=config)
    assert [grad.shape for grad in grads[:3]] == [each.shape for each in (query, key, value)]


def test_packed_calls_fit_the_schemas_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention_torch, "_takes", lambda config, call: True)
    given, *ends = packed(2)
    query, key, value, do, *ends = (each.to("meta") for each in (*given, *ends))
    numbers = (*ends, None, None, None, 11, 17, 0.0, SCALE, -1, 0, 0.0, True)
    got = attention_varlen.forward(query, key, value, *numbers, config="flash")
    assert [each.shape for each in got] == [(26, 4, 16), (4, 26), (26, 4, 16)]
    call = (do, None, query, key, value, *numbers[:5], *got, *numbers[5:])
    grads = attention_varlen.backward(*call, [True, True, True, False], config="flash")
    assert [grad.shape for grad in grads[:3]] == [each.shape for each in (query, key, value)]


# Arguments of the op that are not plain, by their place behind query, key and value.
NOT_PLAIN = {
    "mask": (0, torch.ones(1, 1, 33, 33, dtype=torch.bool)),
    "alibi": (1, torch.ones(4)),
    "sinks": (2, torch.ones(4)),
    "dropout": (3, torch.zeros(2, dtype=torch.int64)),
    "scale": (5, -1.0),
    "window": (6, 3),
    "right": (7, 2),
    "softcap": (8, 5.0),
}


@CONFIGS
@pytest.mark.parametrize("option", NOT_PLAIN)
def test_other_calls_run_on_our_kernels(
    monkeypatch: pytest.MonkeyPatch, stand_ins: list[str], option: str, config: str
) -> None:
    ours = []
    for module in (attention._attention_forward, attention._attention_backward):
        name = module.__name__.rsplit("_", 1)[-1]
        monkeypatch.setattr(module, name, lambda *args, name=name: ours.append(name))
    numbers: list[Any] = [None, None, None, None, 0.0, SCALE, -1, -1, 0.0, False]
    place, value = NOT_PLAIN[option]
    numbers[place] = value
    query, key, v, do = tensors()
    attention.forward(query, key, v, *numbers, config=config)
    saved = (do, do[..., 0], do.new_empty(0), do.new_empty(0))
    call = (do, None, query, key, v, *numbers[:4], *saved, *numbers[4:])
    attention.backward(*call, [True] * 5, config=config)
    assert ours == ["forward", "backward"] and stand_ins == []


def test_shapes_that_torch_takes_otherwise_run_on_our_kernels(stand_ins: list[str]) -> None:
    query, key, value, _ = tensors()
    for given, right in (
        ([each.float() for each in (query, key, value)], -1),
        ([query[..., :12], key[..., :12], value[..., :12]], -1),
        ([query, key, value[..., :8]], -1),
        ([query[:, :, :9], key, value], 0),
        ([query[:, :, :0], key, value], -1),
    ):
        call = attention._call(*given, None, None, None, None, 0.0, SCALE, -1, right, 0.0)
        assert not _attention_torch.serves("flash", call)
    call = attention._call(query, key, value, None, None, None, None, 0.0, SCALE, -1, 0, 0.0)
    assert _attention_torch.serves("flash", call) and not _attention_torch.serves(None, call)
    assert _attention_torch.serves_backward("flash", call, None)
    assert not _attention_torch.serves_backward("flash", call, query[..., 0].float())


def test_deterministic_algorithms_keep_the_backward_ours(stand_ins: list[str]) -> None:
    query, key, value, _ = tensors()
    call = attention._call(query, key, value, None, None, None, None, 0.0, SCALE, -1, 0, 0.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert not _attention_torch.serves_backward("flash", call, None)
        assert _attention_torch.serves("flash", call)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_has_none_of_these_kernels() -> None:
    query, key, value, _ = tensors()
    call = attention._call(query, key, value, None, None, None, None, 0.0, SCALE, -1, 0, 0.0)
    assert not _attention_torch.serves("cudnn", call)


def test_the_tuner_is_offered_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "triton_missing", lambda: None)
    assert backends.configurations("attention") == ("cudnn", "flash")
    assert backends.configurations("attention_varlen") == ("flash",)


@pytest.mark.gpu
@CONFIGS
@CAUSAL
@HEADS
def test_values_on_a_gpu(config: str, right: int, key_heads: int) -> None:
    query, key, value, do = (tensor.cuda() for tensor in tensors(key_heads, rows=333))
    numbers = (None, None, None, None, 0.0, SCALE, -1, right, 0.0, True)
    call = attention._call(query, key, value, *numbers[:-1])
    if not _attention_torch.serves(config, call):
        pytest.skip(f"this torch has no {config} attention for this GPU")
    got = attention.forward(query, key, value, *numbers, config=config)
    saved = (query, key, value, *numbers[:4], *got, *numbers[4:])
    mask = [True, True, True, False, False]
    found = attention.backward(do, None, *saved, mask, config=config)
    wide, lse = exact(query, key, value, right == 0, SCALE)
    budget = dtypes.error_budget(lse.float(), lse, torch.float32, depth=333)
    assert bool(((got[1].double() - lse).abs() <= budget).all())
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    with sdpa_kernel(SDPBackend.MATH):
        eager = scaled_dot_product_attention(
            *leaves, is_causal=right == 0, scale=SCALE, enable_gqa=True
        )
    eager.backward(do)
    doubled = [each.double() for each in (do, query, key, value)]
    truths = (wide, *gradients(*doubled, right == 0, SCALE))
    eagers = (eager.detach(), *(leaf.grad for leaf in leaves))
    for mine, theirs, truth in zip((got[0], *found[:3]), eagers, truths, strict=True):
        assert dtypes.rms(mine.double() - truth) <= dtypes.rms_budget(theirs, truth, mine.dtype)
