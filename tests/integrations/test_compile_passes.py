"""What ``compile_passes`` replaces in captured graphs, and what it leaves."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import DENSE
from patch_testing import assert_close, assert_within_budget, distance
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.integrations.graph import passes as graph_passes
from fusedops.integrations.graph.passes import CompilePasses
from fusedops.integrations.hf.rules import torch_modules

W = torch.linspace(-1.5, 2.0, 16 * 24).reshape(24, 16).sin()
V = torch.linspace(0.5, 3.0, 16 * 24).reshape(24, 16).cos()
BACK = W.t().contiguous() * 0.7
BIAS = torch.linspace(-1, 1, 24)
SCALE = torch.linspace(0.5, 1.5, 16)
SHIFT = torch.linspace(-0.5, 0.5, 16)
X = torch.linspace(-3, 3, 2 * 5 * 16).reshape(2, 5, 16).sin()


ALL = (*fusedops.compile_passes().rewrites, "mlp")


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Any]:
    """Return a function in the rewritten graph without Inductor's code, and the options."""
    passes = fusedops.compile_passes(**{"rewrites": ALL} | options)

    def backend(module: Any, inputs: Any) -> Any:
        passes["pre_grad_custom_pass"](module.graph)
        module.graph.lint()
        module.recompile()
        return aot_eager(module, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True), passes


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.float())).type_as(x)


def centred(x: torch.Tensor) -> torch.Tensor:
    difference = x - x.mean(-1, keepdim=True)
    return difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + 1e-5)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 5, 2, 8).transpose(1, 2)


def rotary(x: torch.Tensor, turn: Callable[..., Any] = rotate_half) -> torch.Tensor:
    angles = torch.arange(5.0)[:, None] / torch.arange(1.0, 9.0)
    cos, sin = (table.to(x.dtype)[None, None] for table in (angles.cos(), angles.sin()))
    q, k = heads(x), heads(x * 2)
    return (q * cos + turn(q) * sin) * (k * cos + turn(k) * sin)


def attention(x: torch.Tensor) -> torch.Tensor:
    q = F.linear(x, W.to(x.dtype)[:16]).view(2, 5, 4, 4).transpose(1, 2)
    k = heads(x)[..., :4]
    k = k[:, :, None, :, :].expand(2, 2, 2, 5, 4).reshape(2, 4, 5, 4)
    y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    return y.transpose(1, 2).reshape(2, 5, 16)


def multi_head(x: torch.Tensor) -> torch.Tensor:
    """What ``nn.MultiheadAttention`` calls, without biases."""
    first, last = torch.cat([W, V]).to(x.dtype), W[:16].to(x.dtype)
    sizes, no_biases = (16, 2), (None, None, None, False, 0.0)
    options = {"need_weights": False}
    return F.multi_head_attention_forward(
        x, x, x, *sizes, first, *no_biases, last, None, **options
    )[0]


def loss(x: torch.Tensor, **options: Any) -> torch.Tensor:
    logits = F.linear(x, W.to(x.dtype)).float()
    return F.cross_entropy(logits.view(-1, 24), torch.arange(10) % 24, **options)


def weights(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(weight.to(x.dtype) for weight in (W, V, BACK, BIAS))


def mlp(x: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    up, _, down, bias = weights(x)
    return F.linear(activation(F.linear(x, up, bias)), down)


def glu(x: torch.Tensor) -> torch.Tensor:
    gate, up, down, _ = weights(x)
    return F.linear(F.linear(x, up) * F.silu(F.linear(x, gate)), down)


def packed(x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, W.to(x.dtype)).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def residual(x: torch.Tensor) -> torch.Tensor:
    total = x + torch.tanh(x)
    return total + rms(total, SCALE.to(x.dtype))


REPLACED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, int]]] = {
    "layer norm": (lambda x: F.layer_norm(x, (16,), SCALE.to(x.dtype)), {"layer_norm": 1}),
    "layer norm in float32": (
        lambda x: F.layer_norm(x.float(), (16,), SCALE, SHIFT).to(x.dtype),
        {"layer_norm": 1},
    ),
    "rms_norm of torch": (lambda x: F.rms_norm(x, (16,), SCALE.to(x.dtype)), {"rms_norm": 1}),
    "Llama's norm": (lambda x: rms(x, SCALE.to(x.dtype)), {"rms_norm": 1}),
    "Gemma's norm": (lambda x: gemma(x, SCALE.to(x.dtype)), {"rms_norm": 1}),
    "norm without weight": (lambda x: centred(x.float()).to(x.dtype), {"layer_norm": 1}),
    "residual sum": (residual, {"add_rms_norm": 1}),
    "gated": (glu, {"linear_glu": 1, "linear": 1}),
    "packed gate": (packed, {"geglu": 1, "linear": 1}),
    "two products": (lambda x: mlp(x, F.gelu), {"mlp": 1}),
    "GELU as a formula": (lambda x: mlp(x, gelu_new), {"mlp": 1}),
    "squared ReLU": (lambda x: mlp(x, lambda y: F.relu(y) ** 2), {"mlp": 1}),
    "quick GELU": (lambda x: mlp(x, lambda y: y * torch.sigmoid(1.702 * y)), {"mlp": 1}),
    "one product": (lambda x: F.silu(F.linear(x, W.to(x.dtype))), {"linear_act": 1}),
    "GELU": (lambda x: F.gelu(x + 1), {"gelu": 1}),
    "addmm": (
        lambda x: torch.addmm(BIAS.to(x.dtype), x.view(-1, 16), W.to(x.dtype).t()),
        {"linear": 1},
    ),
    "rotary": (rotary, {"rotary_embedding": 1}),
    "attention": (attention, {"attention": 1, "linear": 1}),
    "attention of several heads": (multi_head, {"attention": 1}),
    "loss": (loss, {"cross_entropy": 1, "linear": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.usefixtures("own_products")
def test_what_is_replaced_has_the_same_values(name: str, dtype: torch.dtype) -> None:
    function, counts = REPLACED[name]
    fused, passes = compiled(function)
    tolerance = 2e-5 if dtype == torch.float32 else 0.04
    x, wide = (X.to(kind, copy=True).requires_grad_() for kind in (dtype, torch.float64))
    result, exact = fused(x), function(wide)
    assert result.dtype == function(x).dtype
    assert dict(passes.counts) == counts
    slopes = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64).reshape(exact.shape)
    for tensor in (result, exact):
        tensor.backward(slopes.to(tensor.dtype))
    assert distance(result, exact) <= tolerance
    assert distance(x.grad, wide.grad) <= tolerance


def between(x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(x, W)
    return F.linear(F.gelu(hidden), BACK) + hidden.sum()


def written(x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(x, W)
    hidden += 1
    return F.gelu(hidden)


def written_later(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    normed = F.layer_norm(y, (16,)) * 2
    y[0].zero_()
    return normed + y


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(x, W)
    hidden.view(-1)[:4].mul_(3)
    return F.silu(hidden)


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = F.linear(x, W)
    return F.gelu(hidden) * x.mean()


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.linear(x, W)
    return F.gelu(hidden)


def other_sum(x: torch.Tensor, dim: int, keepdim: bool = True) -> torch.Tensor:
    return SCALE * (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=keepdim) + 1e-6))


LEFT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "an intermediate that is needed": (between, ("mlp", "linear_act")),
    "an intermediate that is written to": (written, ("linear_act", "linear")),
    "a view that is written to": (written_through_a_view, ("linear_act", "linear")),
    "in place": (lambda x: F.relu(F.linear(x, W), inplace=True), ("linear_act", "linear")),
    "no_grad inside": (without_gradient, ("linear_act",)),
    "autocast inside": (under_autocast, ("linear_act",)),
    "mean of another dimension": (lambda x: other_sum(x, -2), ("rms_norm",)),
    "variance with n - 1": (
        lambda x: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
        ("layer_norm",),
    ),
    "eps outside of the root": (
        lambda x: SCALE * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)),
        ("rms_norm",),
    ),
    "fourth powers": (
        lambda x: SCALE * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
        ("rms_norm",),
    ),
    "another row": (
        lambda x: SCALE * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        ("rms_norm",),
    ),
    "eps from data": (lambda x: rms(x, SCALE, x.abs().max()), ("rms_norm",)),
    "a wrong constant": (lambda x: mlp(x, lambda y: y * torch.sigmoid(1.7 * y)), ("mlp",)),
    "another gate": (
        lambda x: F.silu(F.linear(x, W)) * F.linear(x + 1, V),
        ("linear_glu",),
    ),
    "gates with a bias": (
        lambda x: F.silu(F.linear(x, W, BIAS)) * F.linear(x, V),
        ("linear_glu",),
    ),
    "halves in the other order": (
        lambda x: rotary(x, lambda y: torch.cat((y[..., 4:], -y[..., :4]), -1)),
        ("rotary_embedding",),
    ),
    "halves that are not negated": (
        lambda x: rotary(x, lambda y: torch.cat((y[..., 4:], y[..., :4]), -1)),
        ("rotary_embedding",),
    ),
    "class weights": (lambda x: loss(x, weight=BIAS.abs()), ("cross_entropy",)),
    "probabilities": (
        lambda x: F.cross_entropy(F.linear(x, W)[0], W[:5].softmax(-1) @ W.t()),
        ("cross_entropy",),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_only_looks_alike_is_left(name: str) -> None:
    function, absent = LEFT[name]
    fused, passes = compiled(function)
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    result, exact = fused(x), function(other)
    assert not set(absent) & set(passes.counts)
    tolerance = 1e-5 if exact.dtype == torch.float32 else 0.01
    assert distance(result, exact) <= tolerance
    for tensor in (result, exact):
        tensor.float().square().sum().backward()
    assert distance(x.grad, other.grad) <= tolerance


def test_an_input_that_is_written_to_later_is_left() -> None:
    fused, passes = compiled(written_later)
    torch.testing.assert_close(fused(X), written_later(X))
    assert not passes.counts


def test_autocast_around_all_of_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(F.layer_norm(x, (16,), SCALE), F.gelu)

    fused, passes = compiled(function)
    result = fused(X)
    assert passes.counts["mlp"] == 1
    assert result.dtype == function(X).dtype == torch.bfloat16
    assert distance(result, function(X)) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.usefixtures("own_products")
def test_bodies_of_checkpointing_are_rewritten() -> None:
    fused, passes = compiled(lambda x: checkpoint(mlp, x, F.gelu, use_reentrant=False))
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    fused(x).sum().backward()
    mlp(other, F.gelu).sum().backward()
    assert passes.counts["mlp"] == 1
    assert_close(x.grad, other.grad)


@pytest.mark.usefixtures("own_products")
def test_one_graph_serves_all_sizes() -> None:
    fused, passes = compiled(lambda x: glu(rms(x, SCALE)))
    for rows in (3, 5, 8):
        x = torch.randn(2, rows, 16)
        torch._dynamo.mark_dynamic(x, 1)
        assert_close(fused(x), glu(rms(x, SCALE)))
    assert dict(passes.counts) == {"rms_norm": 1, "linear_glu": 1, "linear": 1}


def test_only_the_given_rewrites_are_tried() -> None:
    fused, passes = compiled(lambda x: glu(rms(x, SCALE)), rewrites=["norm"])
    fused(X)
    assert dict(passes.counts) == {"rms_norm": 1}
    with pytest.raises(ValueError, match=r"must be among cross_entropy, .*, got 'softmax', 'foo'"):
        fusedops.compile_passes(["norm", "softmax", "foo"])


def test_tensors_of_another_class_are_left() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = nn.Parameter(TwoTensor(W.clone(), W.clone()))
    fused, passes = compiled(lambda x: F.gelu(F.linear(x, weight)))
    torch.testing.assert_close(fused(X).a, F.gelu(F.linear(X, W)))
    assert not passes.counts


@pytest.mark.usefixtures("own_products")
def test_inductor_calls_them_and_keeps_the_code(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    hits = torch._dynamo.utils.counters["aot_autograd"]
    for expected in (0, 1):
        torch._dynamo.reset()
        before, passes = hits["autograd_cache_hit"], fusedops.compile_passes()
        fusedops.reset_counters()
        result = torch.compile(model, options=passes)(X)
        result.sum().backward()  # the code is stored with that of the backward
        torch.testing.assert_close(result, model(X))
        assert str(passes).endswith(
            "3 calls of fused ops (layer_norm: 1, linear: 1, linear_act: 1)"
        )
        assert hits["autograd_cache_hit"] - before == expected
    assert str(CompilePasses.__str__(fusedops.compile_passes())).startswith("CompilePasses: no")


def test_a_graph_without_a_match_is_reported() -> None:
    fused, passes = compiled(torch.tanh)
    assert "when the compiled model is called first" in str(passes)
    fused(X)
    assert "the captured graphs have no part that these passes replace" in str(passes)


def test_passes_on_a_patched_model() -> None:
    """A patched Llama of one layer, compiled with the passes, is as near to float64 as stock.

    The passes join both sums of the residual stream with the fused norms behind them.
    """
    model = DENSE["Llama"].model(num_hidden_layers=1)
    ids = torch.arange(24).view(2, 12)
    results = []
    for dtype, changes in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        part = copy.deepcopy(model).to(dtype)
        run = part
        if changes:
            fusedops.patch(part, level="O3")
            run, passes = compiled(part)
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append({"loss": loss.detach(), **{n: p.grad for n, p in part.named_parameters()}})
    exact, stock, found = results
    assert dict(passes.counts) == {"add_rms_norm": 2}
    assert_within_budget(found, stock, exact, torch.float32)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_sum_is_joined_with_the_norm_of_a_patched_module(norm: type[nn.Module]) -> None:
    patched = norm(16)
    fusedops.patch(patched)

    def block(x: torch.Tensor) -> torch.Tensor:
        return patched(x + torch.tanh(x))

    fused, passes = compiled(lambda x: checkpoint(block, x, use_reentrant=False) + block(x))
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    fused(x).cos().sum().backward()
    fusedops.unpatch(patched)
    (2 * block(other)).cos().sum().backward()
    assert passes.counts.total() == 2 and next(iter(passes.counts)).startswith("add_")
    assert_close(x.grad, other.grad)


def test_the_cache_key_holds_all_sources_and_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ops").mkdir()
    monkeypatch.setattr(graph_passes, "_PACKAGE", tmp_path)
    keys = set()
    for text in ("first", "second"):
        (tmp_path / "ops" / "gelu.py").write_text(text)
        graph_passes._sources.cache_clear()
        keys.add(fusedops.compile_passes()["pre_grad_custom_pass"].uuid())
    monkeypatch.setattr(torch_modules, "_SERVED", ())
    keys.add(fusedops.compile_passes()["pre_grad_custom_pass"].uuid())
    graph_passes._sources.cache_clear()
    assert len(keys) == 3


def random_function(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of random parts, of which some write to what others have read."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 11, (9,), generator=generator).tolist()
    up, gate, down, bias = (weight.double() for weight in (W, V, BACK, BIAS))
    scale = SCALE.double()

    def function(x: torch.Tensor) -> torch.Tensor:
        y, kept = x * 1.0, x * 0.5
        for choice in choices:
            match choice:
                case 0:
                    y = y + F.layer_norm(kept, (16,), scale)
                case 1:
                    y = scale * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
                case 2:
                    y = F.linear(F.gelu(F.linear(y, up, bias)), down)
                case 3:
                    y = y + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
                case 4:
                    y, kept = kept + y, y
                case 5:
                    kept = kept.mul_(0.9)
                case 6:
                    hidden = F.linear(y, up)
                    y = F.linear(F.gelu(hidden), down)
                    kept = kept + hidden.mean(-1, keepdim=True)
                case 7:
                    y = y.clone()
                    y[:, 0] += 1
                case 8:
                    q = heads(y)
                    out = F.scaled_dot_product_attention(q, q, heads(kept), is_causal=True)
                    y = y + out.transpose(1, 2).reshape(2, 5, 16)
                case 9:
                    total = y + kept
                    y = F.layer_norm(total, (16,)) + total
                case 10:
                    y = y.transpose(0, 1).contiguous().transpose(0, 1)
            y = y / (1 + y.abs().mean())
        return y

    return function


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))]
)
def test_random_functions_keep_their_values(seed: int) -> None:
    function = random_function(seed)
    fused, _ = compiled(function)
    x, other = (X.double() for _ in range(2))
    assert_close(fused(x), function(other))
    try:
        function(other.requires_grad_()).square().sum().backward()
    except RuntimeError:
        return  # it writes to what a backward needs
    fused(x.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-9, rtol=1e-8)
