"""What others put in the place of torch's and transformers' functions is called, not bypassed."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest
import torch
from patch_testing import TABLES, assert_close, counted, rules_of
from torch import nn
from torch.overrides import TorchFunctionMode

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.rules.rule import PatchRule, always, subclass

pytest.importorskip("transformers")

from causal_families import DENSE, IDS, SPARSE, loss
from encoder_families import FAMILIES as ENCODERS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.loss import loss_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

functional = nn.functional


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Put a function into a place that counts its calls and does what the one before did."""
    seen, known = [], getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return known(*args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
    return seen


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "LayerNorm": (lambda: nn.LayerNorm(32), functional, "layer_norm"),
    "RMSNorm": (lambda: nn.RMSNorm(32), functional, "rms_norm"),
    "GELU": (nn.GELU, functional, "gelu"),
    "Linear": (lambda: nn.Linear(32, 8), functional, "linear"),
    "Linear's forward": (lambda: nn.Linear(32, 8), nn.Linear, "forward"),
    "in a sequence": (lambda: nn.Sequential(nn.Linear(32, 8), nn.SiLU()), functional, "linear"),
    "activation": (lambda: nn.Sequential(nn.Linear(32, 8), nn.SiLU()), functional, "silu"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("make", "owner", "name"), MODULES.values(), ids=MODULES)
@pytest.mark.usefixtures("own_products")
def test_torch_modules_step_aside(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    owner: Any,
    name: str,
    compiled: bool,
) -> None:
    stock, rows = make(), torch.linspace(-2, 2, 20 * 32).view(20, 32)
    model, expected = copy.deepcopy(stock), stock(rows)
    fusedops.patch(model)
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    with counted() as calls:
        assert_close(call(rows), expected)
    assert calls
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, lambda *args, **kwargs: torch.full((20, 8), 7.0))
        with counted() as calls:
            found = call(rows)
        assert torch.equal(found, stock(rows)) and not calls.keys() - {"linear_act"}
        reasons = [entry.reason for entry in describe(model).modules]
        assert any(f"{name} was replaced by test_patch_originals." in reason for reason in reasons)
    with counted() as calls:
        assert_close(call(rows), expected)
    assert calls


def other_value(known: Any) -> Any:
    """Return what may be put in the place of a function or value."""
    if isinstance(known, CodeType):
        return known.replace(co_name="other")
    if isinstance(known, (tuple, dict)):
        return type(known)()
    return (lambda *args, **kwargs: None) if callable(known) else object()


@pytest.mark.parametrize("table", TABLES)
def test_every_rule_asks_for_every_place(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """The original's method is called, whatever the patched class would do."""
    for rule in rules_of(table):
        assert original_code.replaced(rule.watched) is None
        for owner, name, known in rule.watched.attributes:
            with monkeypatch.context() as patches:
                patches.setattr(owner, name, other_value(known))
                reason = original_code.replaced(rule.watched)
                assert reason is not None and f".{name} " in reason
                _assert_the_original_is_called(patches, rule)


def _assert_the_original_is_called(monkeypatch: pytest.MonkeyPatch, rule: PatchRule) -> None:
    instance, called = rule.patched.__new__(rule.patched), []
    nn.Module.__init__(instance)
    for method in rule.methods:
        monkeypatch.setattr(rule.original, method, lambda *args, **kwargs: called.append(args))
    for method in rule.methods:
        getattr(instance, method)(torch.zeros(2, 4))
    assert [args[0] for args in called] == [instance] * len(rule.methods)


FAMILIES = DENSE | SPARSE | ENCODERS


def total(family: Any, model: nn.Module) -> torch.Tensor:
    return family.loss(model) if hasattr(family, "loss") else loss(model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "GptOss"])  # has no sdpa
def test_a_replaced_attention_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family = FAMILIES[name]
    model = family.model(attn_implementation="sdpa")
    fusedops.patch(model)
    seen = spy(monkeypatch, functional, "scaled_dot_product_attention")
    with counted() as calls:
        total(family, model)
    assert len(seen) == family.ops["attention"] and "attention" not in calls
    notes = [module.reason for module in describe(model).modules]
    aside = "steps aside now: F.scaled_dot_product_attention was replaced by"
    assert sum(note.startswith(aside) for note in notes) >= len(seen)


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mapping", ["local", "global", "eager"])
def test_a_replaced_entry_of_the_registry_is_called(
    monkeypatch: pytest.MonkeyPatch, mapping: str, compiled: bool
) -> None:
    key = "eager" if mapping == "eager" else "sdpa"
    model = DENSE["Llama"].model(attn_implementation=key)
    expected = model(IDS).logits
    fusedops.patch(model)
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    with counted() as calls:
        assert_close(call(IDS).logits, expected)
    assert calls["attention"] == 2

    def nothing(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(query).transpose(1, 2), None

    if mapping == "local":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, key, nothing)
    elif mapping == "global":
        monkeypatch.setitem(AttentionInterface._global_mapping, key, nothing)
    else:
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", nothing)
    with counted() as calls:
        found = call(IDS).logits
    assert "attention" not in calls
    fusedops.unpatch(model)
    assert_close(found, model(IDS).logits)
    assert not torch.allclose(found, expected)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPTNeoX"])
def test_a_replaced_rotary_function_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family = FAMILIES[name]
    model = family.model()
    fusedops.patch(model)
    modeling = sys.modules[model.__module__]
    seen = spy(monkeypatch, modeling, "apply_rotary_pos_emb")
    with counted() as calls:
        loss(model)
    assert len(seen) == 2 and "rotary_embedding" not in calls and calls["attention"] == 2


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("configured", ["eager", "grouped_mm", "batched_mm"])
def test_a_replaced_experts_function_is_called(
    monkeypatch: pytest.MonkeyPatch, configured: str, compiled: bool
) -> None:
    torch._dynamo.reset()  # code that other tests had compiled counts towards its limit
    model = SPARSE["Mixtral"].model(experts_implementation=configured)
    fusedops.patch(model)
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    expected = call(IDS).logits
    functions = ALL_EXPERTS_FUNCTIONS._local_mapping
    monkeypatch.setitem(functions, configured, lambda module, rows, *args: torch.zeros_like(rows))
    with counted() as calls:
        found = call(IDS).logits
    assert not calls["moe_mlp"]
    entry = describe(model)["model.layers.0.mlp.experts"]
    assert f"the experts function {configured!r} was replaced by" in entry.reason
    fusedops.unpatch(model)
    assert_close(found, model(IDS).logits)
    assert not torch.allclose(found, expected)


@pytest.mark.parametrize("place", ["F", "file", "mapping"])
def test_a_replaced_loss_is_called(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    if place == "mapping":
        name, seen = "ForCausalLM", []
        monkeypatch.setitem(
            loss_utils.LOSS_MAPPING, name, lambda *args, **kwargs: seen.append(0) or torch.ones(())
        )
    elif place == "file":
        seen = spy(monkeypatch, loss_utils, "fixed_cross_entropy")
    else:
        seen = spy(monkeypatch, functional, "cross_entropy")
    with counted() as calls:
        loss(model)
    assert len(seen) == 1 and "cross_entropy" not in calls
    assert "was replaced by" in describe(model)["loss_function"].reason


def test_a_loss_inside_a_forward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ENCODERS["BertForMaskedLM"]
    model = family.model()
    fusedops.patch(model)
    seen = spy(monkeypatch, functional, "cross_entropy")
    with counted() as calls:
        family.loss(model)
    assert len(seen) == 1 and "cross_entropy" not in calls


class _Doubles(TorchFunctionMode):
    """Answers for one function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is functional.scaled_dot_product_attention else result


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.ci
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_function_mode_sees_the_function(compiled: bool) -> None:
    torch._dynamo.reset()  # code that other tests had compiled counts towards its limit
    model = DENSE["Llama"].model(attn_implementation="sdpa").eval()
    stock = copy.deepcopy(model)
    fusedops.patch(model)
    call, wanted = (
        torch.compile(each, fullgraph=True, backend="eager") if compiled else each
        for each in (model, stock)
    )
    with counted() as calls, _Doubles():
        assert_close(call(IDS).logits, wanted(IDS).logits)
        entry = describe(model)["model.layers.0.self_attn"]
        assert entry.reason == "steps aside now: _Doubles intercepts torch's functions"
    assert not calls
    for context in (torch.device("cpu"), default_device()):
        with counted() as calls, context:
            call(IDS)
        assert calls["attention"] == 2 and calls["rms_norm"] == 3


def test_what_was_replaced_before_is_not_taken_for_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule of a class whose forward another library has replaced refuses, by its name."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    attribute, *_ = original_code.watch_list(modeling_llama.LlamaMLP).attributes
    assert attribute.known is None
    reason = original_code.replaced(original_code.WatchList((attribute,)))
    assert reason is not None and reason.startswith("LlamaMLP.forward was replaced by test_patch")
    known = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *args: args)
    (attribute,) = original_code.functions("scaled_dot_product_attention").attributes
    assert attribute.known is known


class UlyssesSPAttentionHF(nn.Module):
    """What DeepSpeed's class of the name is to a patched module, on one process."""

    def __init__(self, attn: Callable[..., Any]) -> None:
        super().__init__()
        self.attn = attn
        self.calls = 0

    def forward(self, module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.attn(module, 2 * query, *args, **kwargs)


UlyssesSPAttentionHF.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"


@pytest.mark.parametrize("core", ["known", "unknown"])
def test_ulysses_runs_around_the_fused_op(monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    stock = DENSE["Llama"].model(attn_implementation="sdpa")
    model = copy.deepcopy(stock)
    fusedops.patch(model)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    exchange = UlyssesSPAttentionHF(
        sdpa if core == "known" else lambda *args, **kwargs: sdpa(*args, **kwargs)
    )

    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        return exchange(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", wrapper)
    with counted() as calls:
        found = model(IDS).logits
    assert_close(found, stock(IDS).logits)
    entry = describe(model)["model.layers.1.self_attn"]
    if core == "known":
        assert calls["attention"] == 2 and entry.reason.startswith("inside test_patch_originals.")
    else:
        assert not calls["attention"] and "'sdpa' was replaced by" in entry.reason
    assert exchange.calls == (2 if core == "known" else 4)  # a copy of it runs, or it runs itself


def test_what_a_base_puts_around_each_forward_stays_around_the_fused_one() -> None:
    """Checkpointing is such a wrapper from transformers 5.23 on; only the outermost one acts."""
    acted = []

    class Base(nn.Module):
        __module__ = "transformers.modeling_layers"

        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            inner = cls.forward

            @functools.wraps(inner)
            def outer(self: Any, x: int) -> int:
                if type(self).forward is outer:
                    acted.append(type(self))
                return inner(self, x)

            cls.forward = outer

    class Layer(Base):
        def forward(self, x: int) -> int:
            return x

    class Fused(nn.Module):
        def forward(self, x: int) -> int:
            return x + 1

    rule = PatchRule(Layer, subclass(Layer, Fused, __name__), "O1", always("gelu"))
    module = Layer()
    assert module(1) == 1
    module.__class__ = rule.patched
    assert module(1) == 2
    assert acted == [Layer, rule.patched]
