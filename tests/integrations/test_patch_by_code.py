"""Classes without a table that are known by what their code computes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import home_made
import pytest
import torch
import torch.nn.functional as F
from home_made import FEED_FORWARDS, NORMS, WIDTH
from patch_testing import assert_same_training, counted, patched_pair
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.recognition import norm_of
from fusedops.integrations.hf.symbolic import paths_of

MODULES = {f"norm {name}": value for name, value in NORMS.items()} | FEED_FORWARDS
each_module = pytest.mark.parametrize("name", MODULES)


def module_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[name][0]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss(module: nn.Module) -> torch.Tensor:
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    output = module(rows(dtype))
    return (output.float() * rows().roll(1, 0)).sum()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"norm no weight"}))
@pytest.mark.usefixtures("own_products")
def test_training_matches_stock(name: str, autocast: bool) -> None:
    patched, stock = patched_pair(module_of(name))
    assert type(patched) is not type(stock)
    with counted() as calls:
        loss(patched)
    assert calls[MODULES[name][1]] == 1
    assert_same_training(patched, stock, loss, autocast=autocast, draws=3)


def assert_as_precise(patched: nn.Module, stock: nn.Module, want: torch.Tensor) -> None:
    """Check the result for bfloat16 rows, of which the stock module computes ``want``."""
    got = patched(rows(torch.bfloat16))
    assert got.dtype == want.dtype
    exact = copy.deepcopy(stock).double()(rows(torch.bfloat16).double())
    # Inside both round to bfloat16, whatever the dtype of the result is.
    budget = dtypes.error_budget(want, exact, torch.bfloat16, depth=WIDTH)
    assert ((got.double() - exact).abs() <= budget).all()


@pytest.mark.parametrize("name", NORMS)
def test_values_in_half_precision_match_stock(name: str) -> None:
    patched, stock = patched_pair(module_of(f"norm {name}").to(torch.bfloat16))
    assert_as_precise(patched, stock, stock(rows(torch.bfloat16)))


@each_module
def test_float64_matches_stock(name: str) -> None:
    patched, stock = patched_pair(module_of(name).double())
    got, want = (module(rows(torch.float64)) for module in (patched, stock))
    torch.testing.assert_close(got, want)


@each_module
def test_a_patched_module_is_pickled_and_restored(name: str) -> None:
    patched, stock = patched_pair(module_of(name))
    loaded = pickle.loads(pickle.dumps(patched))
    assert type(loaded) is type(patched)
    assert torch.equal(loaded(rows()), patched(rows()))
    fusedops.unpatch(patched)
    assert type(patched) is type(stock)
    assert torch.equal(patched(rows()), stock(rows()))


def test_a_condition_of_the_code_is_asked_at_every_call() -> None:
    patched, stock = patched_pair(module_of("norm litgpt"))
    for unit_offset in (False, True):
        patched.add_unit_offset = stock.add_unit_offset = unit_offset
        with counted() as calls:
            torch.testing.assert_close(patched(rows()), stock(rows()))
        assert calls["rms_norm"] == 1


def test_a_way_through_an_unknown_function_is_stock() -> None:
    patched, stock = patched_pair(module_of("norm two ways"))
    patched.in_low_precision = stock.in_low_precision = True
    with torch.autocast("cpu", torch.bfloat16), counted() as calls:
        assert torch.equal(patched(rows()), stock(rows()))
    assert calls["layer_norm"] == 0


def test_an_attribute_may_be_none() -> None:
    for scale in (True, False):
        patched, stock = patched_pair(home_made.OptionalScaleNorm(scale=scale))
        with counted() as calls:
            torch.testing.assert_close(patched(rows()), stock(rows()))
        assert calls["rms_norm"] == 1


@pytest.mark.parametrize("cls", [home_made.NanoGPTMLP, home_made.TimmMlp])
@pytest.mark.usefixtures("own_products")
def test_dropout_draws_what_stock_draws(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(cls(0.5))
    outputs = []
    for module in (patched, stock):
        torch.manual_seed(1)
        outputs.append(module(rows()))
    torch.testing.assert_close(*outputs)
    with counted() as calls:
        torch.testing.assert_close(patched.eval()(rows()), stock.eval()(rows()))
    assert calls["mlp"] == 1


@pytest.mark.usefixtures("own_products")
def test_a_second_argument_is_added() -> None:
    patched, stock = patched_pair(home_made.ConvertedMLP())
    with counted() as calls:
        for training in (True, False):
            outputs = []
            for module in (patched.train(training), stock.train(training)):
                torch.manual_seed(1)
                outputs.append(module(rows(), residual=rows().roll(2, 1)))
            torch.testing.assert_close(*outputs)
    assert calls["mlp"] == 2


class OptionalScale(home_made.ConvertedMLP):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        output = self.down(F.gelu(self.up(x))) + x
        return output if scale is None else output * scale


@pytest.mark.usefixtures("own_products")
def test_an_argument_with_a_default_is_not_added() -> None:
    patched, stock = patched_pair(OptionalScale())
    for options in ({}, {"scale": None}, {"scale": rows()}):
        with counted() as calls:
            for args, keywords in (
                ((rows(), *options.values()), {}),
                ((rows(),), options),
                ((), {"x": rows()} | options),
            ):
                torch.testing.assert_close(patched(*args, **keywords), stock(*args, **keywords))
        assert calls["mlp"] == (0 if options else 2)  # its own name for the input is not known


@pytest.mark.usefixtures("own_products")
def test_what_stands_in_the_way_is_told() -> None:
    model = nn.ModuleDict({"a": home_made.TimmMlp(activation=nn.Mish), "b": home_made.TimmMlp()})
    model.b.fc2.register_forward_hook(lambda *args: None)
    report = fusedops.patch(model)
    assert "Mish" in report["a"].reason and not report["a"].replaced
    assert report["b"].reason == "linear_act alone: fc2 has hooks"
    expected = copy.deepcopy(model)
    fusedops.unpatch(expected)
    torch.testing.assert_close(model.b(rows()), expected.b(rows()))


def test_a_float32_weight_keeps_the_dtype_of_the_result() -> None:
    for name in NORMS:
        module = module_of(f"norm {name}")
        patched, stock = patched_pair(module)
        try:
            want = stock(rows(torch.bfloat16))
        except RuntimeError:  # torch's own functions want one dtype
            continue
        assert_as_precise(patched, stock, want)


def test_a_weight_that_is_broadcast_is_left_to_torch() -> None:
    patched, stock = patched_pair(home_made.DividingRMSNorm())
    for module in (patched, stock):
        module.weight = nn.Parameter(
            torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(0))
        )
    assert torch.equal(patched(rows()), stock(rows()))


class SumNorm(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class OutsideEps(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps) * self.weight


class OtherDimension(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight


class OtherRow(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x - 1).pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class StaysWide(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class WideWeight(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight.float()


class WideWeightLast(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return self.weight.float() * normed


class NamedLikeAMethod(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.type == "plain":
            return x
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class Counting(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class AsksForGradients(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)
        return x


class AsksForTypes(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class WithoutGradient(home_made.Scaled):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class OwnBackward(home_made.Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnFunction.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class OwnCall(home_made.PlainRMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + 1


class Derived(home_made.PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class FirstDimension(home_made.PackedSwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = self.w12(x).chunk(2)
        return self.w3(F.silu(x1) * x2)


NEAR = [
    *(WideWeight, WideWeightLast, NamedLikeAMethod, home_made.DimRMSNorm),
    *(SumNorm, OutsideEps, OtherDimension, OtherRow, StaysWide, Counting, AsksForGradients),
    *(AsksForTypes, WithoutGradient, OwnBackward, OwnCall, Derived, FirstDimension),
]


@pytest.mark.parametrize("cls", NEAR, ids=lambda cls: cls.__name__)
def test_what_computes_something_else_is_not_taken(cls: type[nn.Module]) -> None:
    assert tables.rule_of_class(cls) is None


def test_a_formula_has_one_expression_however_it_is_written() -> None:
    ways = (home_made.DividingRMSNorm, home_made.TorchtitanRMSNorm)
    first, second = (norm_of(paths_of(cls)[0].result) for cls in ways)
    assert first is not None and first == second
    assert (first.op, first.rounding) == ("rms_norm", "hf")


def test_a_forward_that_is_replaced_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, _ = patched_pair(module_of("timm"))
    monkeypatch.setattr(home_made.TimmMlp, "forward", lambda self, x: x + 1)
    assert torch.equal(patched(rows()), rows() + 1)
    assert "TimmMlp.forward was replaced" in str(fusedops.describe(patched))
