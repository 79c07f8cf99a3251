"""Attention that modules write out: the op is called, or the bits are those of stock."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from home_made import WIDTH
from patch_testing import assert_same_training, counted, gradients
from torch import nn
from torch.overrides import TorchFunctionMode
from written_families import FAMILIES, arguments, loss_of, written_model

import fusedops
from fusedops.integrations.hf.rules.deferred_scores import DeferredScores
from fusedops.integrations.hf.rules.written_attention import outcome_of
from fusedops.integrations.hf.tables import rule_of_class


def pair_of(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a patched and a stock model of which every parameter that trains is used."""
    patched, stock = written_model(name, **options), written_model(name, **options)
    loss_of(stock, arguments(name)).backward()
    unused = {key for key, value in stock.named_parameters() if value.grad is None}
    for model in (patched, stock):
        model.zero_grad()
        for key, value in model.named_parameters():
            value.requires_grad_(key not in unused)
    fusedops.patch(patched, level="O3")
    return patched, stock


def step_of(name: str) -> Any:
    def loss(model: nn.Module) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        call = arguments(name)
        if "pixel_values" in call:
            call["pixel_values"] = call["pixel_values"].to(dtype)
        return loss_of(model, call)

    return loss


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "prophetnet"])
def test_a_training_step_matches_stock(name: str) -> None:
    patched, stock = pair_of(name)
    with counted() as calls:
        gradients(patched, step_of(name))
    assert calls["attention"] == FAMILIES[name].calls
    assert_same_training(patched, stock, step_of(name))


@pytest.mark.usefixtures("own_products")
def test_a_model_that_is_not_a_number_in_float64_matches_stock() -> None:
    patched, stock = pair_of("prophetnet")
    with counted() as calls:
        actual = gradients(patched, step_of("prophetnet"))
    assert calls["attention"] == FAMILIES["prophetnet"].calls
    torch.testing.assert_close(actual, gradients(stock, step_of("prophetnet")))


@pytest.mark.parametrize("name", ["megatron", "gptj", "xlm", "gpt neo", "mvp", "donut"])
def test_a_training_step_matches_stock_under_autocast(name: str) -> None:
    patched, stock = pair_of(name)
    with counted() as calls:
        gradients(patched, step_of(name), autocast=True)
    assert calls["attention"] == FAMILIES[name].calls
    assert_same_training(patched, stock, step_of(name), autocast=True, draws=4)


@pytest.mark.parametrize("name", ["megatron", "gptj", "codegen", "roformer", "mpnet", "fsmt"])
def test_a_model_in_bfloat16_is_as_near_to_float64_as_stock(name: str) -> None:
    patched, stock = pair_of(name)
    expected = gradients(stock.double(), step_of(name))
    stock.bfloat16()
    patched.bfloat16()
    with counted() as calls:
        actual = gradients(patched, step_of(name))
    assert calls["attention"] == FAMILIES[name].calls
    eager = gradients(stock, step_of(name))
    del expected["loss"], actual["loss"]  # the error of a single number is a matter of luck
    own, other = (
        sum((value[key].double() - exact).square().sum() for key, exact in expected.items())
        for value in (actual, eager)
    )
    assert all(actual[key].dtype == eager[key].dtype for key in expected)
    assert own <= 2 * other


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].kind == "causal"])
def test_generation_with_a_cache_gives_the_tokens_of_stock(name: str) -> None:
    patched, stock = pair_of(name)
    tokens = arguments(name)["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with counted() as calls:
        actual = patched.eval().generate(tokens, **options)  # type: ignore[operator]
    assert calls["attention"] == 6 * FAMILIES[name].calls
    assert torch.equal(actual, stock.eval().generate(tokens, **options))  # type: ignore[operator]


ASKED = ["megatron", "gptj", "luke", "xlm", "layoutlm", "mvp", "funnel", "pegasus x", "pvt v2"]


@pytest.mark.parametrize("name", ASKED)
def test_weights_that_are_asked_for_are_those_of_stock(name: str) -> None:
    patched, stock = pair_of(name)
    call = arguments(name)
    with torch.no_grad(), counted() as calls:
        actual = patched.eval()(**call, output_attentions=True)
    expected = stock.eval()(**call, output_attentions=True)
    names = [key for key in expected if "attentions" in key and expected[key]]
    assert names
    assert calls["attention"] == 0
    for key in names:
        for weights, others in zip(actual[key], expected[key], strict=True):
            if others is not None:
                torch.testing.assert_close(weights, others)


@pytest.mark.parametrize("name", ["megatron", "gptj", "roformer", "mpnet"])
def test_unpatched_models_have_the_bits_of_stock(name: str) -> None:
    patched, stock = pair_of(name)
    step_of(name)(patched)
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(module) for module in stock.modules()
    ]
    for key, gradient in gradients(stock, step_of(name)).items():
        assert torch.equal(gradients(patched, step_of(name))[key], gradient)


def test_a_method_of_a_tensor_is_not_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4)
    torch.manual_seed(0)
    stock = transformers.BloomForCausalLM(config).eval()
    patched = copy.deepcopy(stock)
    fusedops.patch(patched, level="O3")
    with counted() as calls, torch.no_grad():
        actual = patched(arguments("gptj")["input_ids"]).logits
    torch.testing.assert_close(actual, stock(arguments("gptj")["input_ids"]).logits)
    assert calls["attention"] == 0
    report = fusedops.patch(patched, level="O3")
    entries = [entry for entry in report.modules if entry.cls == "BloomAttention"]
    assert not any(entry.replaced for entry in entries)
    assert entries[0].reason == "its code uses the scores in permute"


def test_a_copy_in_another_process_is_patched_too() -> None:
    patched, _ = pair_of("megatron")
    loaded = pickle.loads(pickle.dumps(patched))
    with counted() as calls:
        assert torch.equal(step_of("megatron")(loaded), step_of("megatron")(patched))
    assert calls["attention"] == 4


@pytest.mark.parametrize("name", ["gptj", "mvp", "megatron"])
def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    patched, _ = pair_of(name)
    expected = gradients(patched, step_of(name))
    patched.gradient_checkpointing_enable()  # type: ignore[operator]
    for key, gradient in gradients(patched, step_of(name)).items():
        assert torch.equal(gradient, expected[key])


def test_one_graph_is_compiled_from_the_code_of_stock() -> None:
    patched, _ = pair_of("gptj")
    compiled = torch.compile(patched, backend="aot_eager")
    with counted() as calls, torch.no_grad():
        actual = step_of("gptj")(compiled)
    assert calls["attention"] == 0
    torch.testing.assert_close(actual, step_of("gptj")(patched))


class Written(nn.Module):
    """Causal attention with a mask and dropout, as a user writes it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.softmax = nn.Softmax(dim=-1)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) / WIDTH**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
        weights = self.dropout(self.softmax(scores))
        return self.c_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class InPlace(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores *= 0.25
        scores += torch.linspace(-1.0, 1.0, x.shape[1])
        scores.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), -1e9)
        weights = torch.softmax(scores, -1, dtype=torch.float32).type_as(v)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))


class Batched(Written):
    """Products of three dims, a mask for four, and a bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, 4)[:, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in self.heads(x))
        mask = torch.zeros(2, 1, 12, 12)
        mask[0, :, :, 9:] = torch.finfo(torch.float32).min
        distance = torch.arange(12.0)[None, None] / 12
        bias = (distance * self.bias).repeat(2, 1, 1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.3)
        scores = (scores.view(2, 4, 12, 12) + mask.to(scores.dtype)).view(8, 12, 12)
        weights = F.dropout(F.softmax(scores, dim=2), 0.5, self.training and False)
        heads = torch.bmm(weights, v).view(2, 4, 12, -1)
        return self.c_proj(heads.transpose(1, 2).flatten(2))


class Equations(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in self.heads(x))
        scores = torch.einsum("bind,bjnd->bnij", q * 0.3, k)
        heads = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v)
        return self.c_proj(heads.flatten(2))


class Regularised(Written):
    """The entropy of the weights is a second result."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.25
        weights = torch.softmax(scores, -1)
        entropy = -(weights * torch.log_softmax(scores, -1)).sum()
        return self.c_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2)), entropy


class Returning(Written):
    """The weights are a second result."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.25
        weights = self.dropout(torch.softmax(scores, -1))
        return torch.matmul(weights, v), {"weights": weights}, v


class Activated(Written):
    """Modules that are patched get the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        weights = torch.softmax(self.act(torch.matmul(q, k.transpose(-2, -1))), -1)
        return self.c_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class Keeping(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        self.weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1)
        return self.c_proj(torch.matmul(self.weights, v).transpose(1, 2).flatten(2))


class Overwriting(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.contiguous() for tensor in self.heads(x))
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1)
        q.zero_()
        return self.c_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))


def home_made(cls: type[nn.Module], *args: Any) -> tuple[nn.Module, nn.Module]:
    """Return a patched and a stock module of a class of which no call has been seen."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(cls(*args))
    rule = rule_of_class(cls)
    assert rule is not None
    outcome = rule.patched.outcome  # type: ignore[attr-defined]
    outcome.num_fused = outcome.num_unfused = 0
    outcome.obstacle = outcome.reason = None
    fusedops.patch(modules[0], level="O3")
    for child in modules[0].children():
        fusedops.unpatch(child)
    return modules[0], modules[1]


def rows() -> torch.Tensor:
    return torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(module: nn.Module) -> torch.Tensor:
    x = rows().to(next(module.parameters()).dtype)
    return (module(x).float() * rows().roll(1, 0)).sum()


@pytest.mark.parametrize("cls", [Written, InPlace, Batched, Equations])
def test_home_made_attention_matches_stock(cls: type[nn.Module]) -> None:
    patched, stock = home_made(cls)
    with counted() as calls:
        gradients(patched, loss)
    assert calls["attention"] == 1
    torch.testing.assert_close(gradients(patched, loss), gradients(stock, loss))


def test_it_needs_level_o3() -> None:
    module = Written()
    report = fusedops.patch(module, level="O2")
    with counted() as calls:
        module(rows())
    assert calls["attention"] == 0
    assert "from level O3 on" in str(report)


def test_scores_that_are_used_otherwise_have_the_bits_of_stock() -> None:
    patched, stock = home_made(Regularised)
    for _ in range(4):
        results = []
        for module in (patched, stock):
            output, entropy = module(rows())
            (output.sum() + entropy).backward()
            results.append([output, entropy, *(p.grad for p in module.parameters())])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_the_report_says_what_calls_have_shown() -> None:
    patched, _ = home_made(Regularised)
    assert "its first call shows" in str(fusedops.describe(patched))
    for _ in range(3):
        patched(rows())
    assert "its code uses the scores in log_softmax" in str(fusedops.describe(patched))
    report = fusedops.patch(patched, level="O3")
    entry = next(entry for entry in report.modules if entry.name == "")
    assert not entry.replaced
    patched, _ = home_made(Written)
    patched(rows())
    assert "written out in its own code\n" in f"{fusedops.describe(patched)}\n".replace(" \n", "\n")


def test_patched_children_get_the_numbers_of_the_scores() -> None:
    _, stock = home_made(Activated)
    patched, _ = home_made(Activated)
    fusedops.patch(patched, level="O3")
    with counted() as calls:
        torch.testing.assert_close(patched(rows()), stock(rows()))
    assert calls["layer_norm"] == 1
    assert calls["attention"] == 0
    patched.act = nn.GELU()
    fusedops.patch(patched, level="O3")
    stock.act = nn.GELU()
    torch.testing.assert_close(patched(rows()), stock(rows()))


def test_gradients_of_torch_func_run_the_op() -> None:
    patched, stock = home_made(Written)
    results = []
    for module in (patched, stock):
        with counted() as calls:
            results.append(
                torch.func.grad(
                    lambda values, module=module: (
                        torch.func.functional_call(module, values, (rows(),)).square().sum()
                    )
                )(dict(module.named_parameters()))
            )
        assert calls["attention"] == (1 if module is patched else 0)
    torch.testing.assert_close(*results)


def test_weights_that_are_returned_are_those_that_were_used() -> None:
    patched, stock = home_made(Returning, 0.5)
    output, others, value = patched(rows())
    weights = others["weights"]
    assert type(weights) is torch.Tensor
    assert (weights == 0).any()
    torch.testing.assert_close(output, torch.matmul(weights, value))
    with counted() as calls:  # from now on its own code runs
        torch.manual_seed(2)
        again = patched(rows())
    assert calls["attention"] == 0
    assert "returns its attention weights" in str(fusedops.describe(patched))
    torch.manual_seed(2)
    assert torch.equal(again[0], stock(rows())[0])


def test_scores_that_are_kept_are_computed() -> None:
    patched, stock = home_made(Keeping)
    expected = stock(rows())
    torch.testing.assert_close(patched(rows()), expected)
    torch.testing.assert_close(patched.weights.value(), stock.weights)  # type: ignore[operator]
    assert torch.equal(patched(rows()), expected)
    assert type(patched.weights) is torch.Tensor
    assert "its code keeps its scores" in str(fusedops.describe(patched))


def test_inputs_that_are_overwritten_raise() -> None:
    patched, _ = home_made(Overwriting)
    with torch.no_grad(), pytest.raises(RuntimeError, match="writes to an input of its attention"):
        patched(rows())


def test_nothing_deferred_outlives_a_forward() -> None:
    patched, _ = home_made(Written)
    patched(rows())
    assert not [value for value in gc.get_objects() if type(value) is DeferredScores]


def test_dropout_drops_in_training_only() -> None:
    patched, stock = home_made(Written, 0.9)
    assert not torch.equal(patched(rows()), patched(rows()))
    torch.testing.assert_close(patched.eval()(rows()), stock.eval()(rows()))


class _Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_and_hooks_see_the_calls_of_stock() -> None:
    patched, stock = home_made(Written)
    with _Seeing() as mode:
        assert torch.equal(patched(rows()), stock(rows()))
    assert "matmul" in mode.names
    seen = []
    patched.softmax.register_forward_hook(  # type: ignore[union-attr]
        lambda module, args, output: seen.append(output)
    )
    assert torch.equal(patched(rows()), stock(rows()))
    assert type(seen[0]) is torch.Tensor
    assert "softmax has hooks" in str(fusedops.describe(patched))


def test_other_callers_of_its_methods_get_tensors() -> None:
    patched, _ = pair_of("gptj")
    module = next(value for value in patched.modules() if outcome_of(value) is not None)
    heads = torch.randn(1, 4, 3, 8)
    output, weights = module._attn(heads, heads, heads)  # type: ignore[operator]
    assert type(output) is type(weights) is torch.Tensor


def test_scores_without_gradient_keep_that() -> None:
    patched, stock = home_made(Frozen)
    assert all(
        torch.equal(first, second) if first is not None else second is None
        for first, second in zip(
            *([p.grad for p in trained(module).parameters()] for module in (patched, stock)),
            strict=True,
        )
    )


class Frozen(Written):
    """Only the values get a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        with torch.no_grad():
            weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1)
        return self.c_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))


def trained(module: nn.Module) -> nn.Module:
    loss(module).backward()
    return module
