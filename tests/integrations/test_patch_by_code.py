"""Classes without a table that are known by what their code computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import home_made
import pytest
import torch
import torch.nn.functional as F
from home_made import WIDTH
from patch_testing import counted, patched_pair
from torch import nn

import fusedops
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.recognition import norm_of
from fusedops.integrations.hf.symbolic import paths_of

ROWS = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
BROADCAST = nn.Parameter(torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(0)))
# A norm, an attribute that its code asks for at every call, values, and whether the op runs then.
ATTRIBUTES: dict[str, tuple[type[nn.Module], str, dict[Any, bool]]] = {
    "condition": (home_made.LitgptRMSNorm, "add_unit_offset", {False: True, True: True}),
    "unknown function": (home_made.ChoosingLayerNorm, "in_low_precision", {True: False}),
    "dimension": (home_made.DimRMSNorm, "dim", {-2: False, -1: True}),
    "scale": (home_made.OptionalScaleNorm, "weight", {None: True}),
    "broadcast weight": (home_made.DividingRMSNorm, "weight", {BROADCAST: False}),
}


@pytest.mark.parametrize(("cls", "attribute", "values"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_are_read_at_every_call(
    cls: type[nn.Module], attribute: str, values: dict[Any, bool]
) -> None:
    patched, stock = patched_pair(cls())
    for value, fused in values.items():
        for module in (patched, stock):
            setattr(module, attribute, value)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), counted() as calls:
                actual = patched(ROWS)
                expected = stock(ROWS)
            assert bool(calls) == fused
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: home_made.NanoGPTMLP(0.5),
        lambda: home_made.TimmMlp(0.5),
        home_made.ConvertedMLP,  # with a second argument
    ],
)
@pytest.mark.usefixtures("own_products")
def test_dropout_draws_what_stock_draws(make: Callable[[], nn.Module]) -> None:
    patched, stock = patched_pair(make())
    options = {"residual": ROWS.roll(2, 1)} if isinstance(stock, home_made.ConvertedMLP) else {}
    for training in (True, False):
        outputs = []
        for module in (patched.train(training), stock.train(training)):
            torch.manual_seed(1)
            with counted() as calls:
                outputs.append(module(ROWS, **options))
            needs_numbers = training and type(stock) is home_made.TimmMlp  # inside of the op
            assert calls["mlp"] == (module is patched and not needs_numbers)
        torch.testing.assert_close(*outputs)


@pytest.mark.usefixtures("own_products")
def test_what_prevents_fusion_is_reported() -> None:
    model = nn.ModuleDict({"a": home_made.TimmMlp(activation=nn.Mish), "b": home_made.TimmMlp()})
    model.b.fc2.register_forward_hook(lambda *args: None)
    report = fusedops.patch(model)
    assert "Mish" in report["a"].reason and not report["a"].replaced
    assert report["b"].reason == "linear_act alone: fc2 has hooks"
    expected = copy.deepcopy(model)
    fusedops.unpatch(expected)
    torch.testing.assert_close(model.b(ROWS), expected.b(ROWS))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


def _scale(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls = 1
    return _normed(self, x)


def _asks_configuration(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if self.config.type == "plain" else _normed(self, x)


def _asks_for_gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _normed(self, x) if torch.is_grad_enabled() else x


def _asks_for_types(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else _normed(self, x)


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


# Forwards of norms, and the op of their rule.
FORWARDS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str | None]] = {
    "norm": (_normed, "rms_norm"),
    "formula": (lambda self, x: x * _scale(self, x) * self.weight, "rms_norm"),
    "sum": (
        lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight,
        None,
    ),
    "eps outside of the root": (
        lambda self, x: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps) * self.weight,
        None,
    ),
    "another dimension": (
        lambda self, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight,
        None,
    ),
    "another row": (lambda self, x: x * _scale(self, x - 1) * self.weight, None),
    "result in float32": (
        lambda self, x: x.float() * _scale(self, x.float()) * self.weight,
        None,
    ),
    "weight in float32": (lambda self, x: x * _scale(self, x) * self.weight.float(), None),
    "weight in float32 first": (
        lambda self, x: self.weight.float() * (x.float() * _scale(self, x.float())).to(x.dtype),
        None,
    ),
    "without gradient": (torch.no_grad()(_normed), None),
    "own backward": (lambda self, x: OwnFunction.apply(x), None),
    "counts": (_counts, None),
    "asks for the configuration": (_asks_configuration, None),
    "asks for gradients": (_asks_for_gradients, None),
    "asks for types": (_asks_for_types, None),
}


@pytest.mark.parametrize(("forward", "op"), FORWARDS.values(), ids=FORWARDS)
def test_what_computes_something_else_is_not_recognised(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any], op: str | None
) -> None:
    body = {"forward": forward, "__module__": __name__}
    cls = type("Layer", (home_made.Scaled,), body)
    monkeypatch.setattr(f"{__name__}.Layer", cls, raising=False)
    rule = tables.rule_of_class(cls)
    assert (rule is not None) == (op is not None)
    if rule is not None:
        assert rule.plan(cls()).ops == (op,)


@pytest.mark.parametrize("cls", [OwnCall, Derived, FirstDimension])
def test_a_class_that_computes_something_else_is_not_recognised(cls: type[nn.Module]) -> None:
    assert tables.rule_of_class(cls.__base__) is not None
    assert tables.rule_of_class(cls) is None


def test_a_formula_has_one_expression_however_it_is_written() -> None:
    classes = (home_made.DividingRMSNorm, home_made.TorchtitanRMSNorm)
    first, second = (norm_of(paths_of(cls)[0].result) for cls in classes)
    assert first is not None and first == second
    assert (first.op, first.rounding) == ("rms_norm", "hf")
