"""What others put in the place of torch's and transformers' functions is called, not bypassed.

So is the original where a keyword or a class is one that the fused function does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from families import DENSE, ENCODERS, IDS, SPARSE, needs_sdpa
from patch_testing import assert_close, counted, patched_pair
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.loss import loss_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

import fusedops
from fusedops._core.checks import UnsupportedError
from fusedops.integrations import describe
from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.rules import attention
from fusedops.integrations.hf.rules.rule import PatchRule, always

functional = nn.functional
Context = pytest.MonkeyPatch
EAGER_AND_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def compiled_or_not(model: nn.Module, compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return model
    torch._dynamo.reset()  # code that other tests had compiled counts towards its limit
    return torch.compile(model, fullgraph=True, backend="eager")


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "LayerNorm": (lambda: nn.LayerNorm(32), functional, "layer_norm"),
    "RMSNorm": (lambda: nn.RMSNorm(32), functional, "rms_norm"),
    "GELU": (nn.GELU, functional, "gelu"),
    "Linear": (lambda: nn.Linear(32, 8), functional, "linear"),
    "Linear's forward": (lambda: nn.Linear(32, 8), nn.Linear, "forward"),
    "in a sequence": (lambda: nn.Sequential(nn.Linear(32, 8), nn.SiLU()), functional, "linear"),
    "activation": (lambda: nn.Sequential(nn.Linear(32, 8), nn.SiLU()), functional, "silu"),
}


@EAGER_AND_COMPILED
@pytest.mark.parametrize(("make", "owner", "name"), MODULES.values(), ids=MODULES)
@pytest.mark.usefixtures("own_products")
def test_torch_modules_run_what_was_replaced(
    monkeypatch: Context, make: Callable[[], nn.Module], owner: Any, name: str, compiled: bool
) -> None:
    rows = torch.linspace(-2, 2, 20 * 32).view(20, 32)
    model, stock = patched_pair(make())
    expected = stock(rows)
    call = compiled_or_not(model, compiled)
    with counted() as calls:
        assert_close(call(rows), expected)
    assert calls
    with monkeypatch.context() as patches:
        patches.setattr(owner, name, lambda *args, **kwargs: torch.full((20, 8), 7.0))
        with counted() as calls:
            actual = call(rows)
        assert torch.equal(actual, stock(rows)) and not calls.keys() - {"linear_act"}
        reasons = [entry.reason for entry in describe(model).modules]
        assert any(f"{name} was replaced by test_patch_originals." in reason for reason in reasons)
    with counted() as calls:
        assert_close(call(rows), expected)
    assert calls


FAMILIES = DENSE | SPARSE | ENCODERS
_SDPA = "scaled_dot_product_attention"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_replaced_attention_is_called(monkeypatch: Context, name: str) -> None:
    family = FAMILIES[name]
    needs_sdpa(family)
    model, seen = family.model(attn_implementation="sdpa"), []
    fusedops.patch(model)
    known = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, _SDPA, lambda *args, **kwargs: seen.append(0) or known(*args, **kwargs)
    )
    with counted() as calls:
        family.loss(model)
    assert len(seen) == family.ops["attention"] and "attention" not in calls
    notes = [module.reason for module in describe(model).modules]
    reason = f"falls back now: F.{_SDPA} was replaced by"
    assert sum(note.startswith(reason) for note in notes) >= len(seen)


def _no_attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return torch.zeros_like(query).transpose(1, 2), None


def _no_experts(module: Any, rows: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.zeros_like(rows)


def _one(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ones(())


def _unturned(query: torch.Tensor, key: torch.Tensor, *args: Any) -> Any:
    return query, key


class Place(NamedTuple):
    """A function that a model calls in one place, and what replaces it."""

    family: str
    options: dict[str, Any]  # of its configuration
    change: Callable[[Context], object]  # replaces the function
    op: str  # which is not called any more
    entry: str | None  # of the report, with the reason; or None where the others stay fused


def attribute(owner: Any, name: str, value: Any) -> Callable[[Context], object]:
    return lambda context: context.setattr(owner, name, value)


def item(table: Any, key: str, value: Any) -> Callable[[Context], object]:
    return lambda context: context.setitem(table, key, value)


def attends(key: str, change: Callable[[Context], object]) -> Place:
    entry = "model.layers.0.self_attn"
    return Place("Llama", {"attn_implementation": key}, change, "attention", entry)


def turns(name: str) -> Place:
    modeling = sys.modules[type(FAMILIES[name].model()).__module__]
    change = attribute(modeling, "apply_rotary_pos_emb", _unturned)
    return Place(name, {}, change, "rotary_embedding", None)


def chooses(key: str) -> Place:
    change = item(ALL_EXPERTS_FUNCTIONS._local_mapping, key, _no_experts)
    options = {"experts_implementation": key}
    return Place("Mixtral", options, change, "moe_mlp", "model.layers.0.mlp.experts")


def computes_loss(change: Callable[[Context], object]) -> Place:
    return Place("Llama", {}, change, "cross_entropy", "loss_function")


_TORCHS_LOSS = attribute(functional, "cross_entropy", _one)
PLACES = {
    "attention of all models": attends(
        "sdpa", item(AttentionInterface._global_mapping, "sdpa", _no_attention)
    ),
    "attention of the registry": attends(
        "sdpa", item(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _no_attention)
    ),
    "eager attention": attends(
        "eager", attribute(modeling_llama, "eager_attention_forward", _no_attention)
    ),
    **{f"rotary function of {name}": turns(name) for name in ("Llama", "Mixtral", "GPTNeoX")},
    **{f"experts, {key}": chooses(key) for key in ("eager", "grouped_mm", "batched_mm")},
    "loss of torch": computes_loss(_TORCHS_LOSS),
    "loss of the file": computes_loss(attribute(loss_utils, "fixed_cross_entropy", _one)),
    "loss of the registry": computes_loss(item(loss_utils.LOSS_MAPPING, "ForCausalLM", _one)),
    "loss in a forward": Place("BertForMaskedLM", {}, _TORCHS_LOSS, "cross_entropy", ""),
}


COMPILED = [name for name, place in PLACES.items() if place.op in ("attention", "moe_mlp")]


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in PLACES),
        *(pytest.param(name, True, marks=pytest.mark.ci(every=3)) for name in COMPILED),
    ],
)
def test_a_replaced_function_of_transformers_is_called(
    monkeypatch: Context, name: str, compiled: bool
) -> None:
    place = PLACES[name]
    family = FAMILIES[place.family]
    layers = 1 if compiled else 2
    model, stock = family.pair(num_hidden_layers=layers, **place.options)
    inputs = {"input_ids": IDS} | ({} if compiled else {"labels": IDS})
    call = compiled_or_not(model, compiled)
    with counted() as calls:
        unchanged = call(**inputs)
    assert calls[place.op] == (1 if place.op == "cross_entropy" else layers)
    place.change(monkeypatch)
    with counted() as calls:
        actual = call(**inputs)
    expected = stock(**inputs)
    assert not calls[place.op] and (place.op == "attention" or calls["attention"] == layers)
    assert_close(actual.logits, expected.logits)
    if compiled:
        assert not torch.allclose(actual.logits, unchanged.logits)
    else:
        assert_close(actual.loss, expected.loss)
        assert not torch.allclose(actual.loss, unchanged.loss)
    if place.entry is not None:
        assert "was replaced by" in describe(model)[place.entry].reason
        with pytest.raises(fusedops.UnsupportedError, match="was replaced by"):
            fusedops.patch(model, strict=True)
    fusedops.unpatch(model)
    with counted() as calls:
        model(**inputs)
    assert not calls


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


@pytest.mark.ci(every=2)
@EAGER_AND_COMPILED
def test_a_function_mode_sees_the_function(compiled: bool) -> None:
    options = {"attn_implementation": "sdpa", "num_hidden_layers": 1}
    model, stock = (model.eval() for model in DENSE["Llama"].pair(**options))
    call = compiled_or_not(model, compiled)
    expected = torch.compile(stock, fullgraph=True, backend="eager") if compiled else stock
    with counted() as calls, _Doubles():
        assert_close(call(IDS).logits, expected(IDS).logits)
        entry = describe(model)["model.layers.0.self_attn"]
        assert entry.reason == "falls back now: _Doubles intercepts torch's functions"
    assert not calls
    for context in (torch.device("cpu"), default_device()):
        with counted() as calls, context:
            call(IDS)
        assert calls["attention"] == 1 and calls["rms_norm"] == 3


def test_what_was_replaced_before_is_not_taken_for_the_original(monkeypatch: Context) -> None:
    """The rule of a class whose forward another library has replaced refuses, by its name."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    attribute, *_ = original_code.watch_list(modeling_llama.LlamaMLP).attributes
    assert attribute.known is None
    reason = original_code.replaced(original_code.WatchList((attribute,)))
    assert reason is not None and reason.startswith("LlamaMLP.forward was replaced by test_patch")
    known = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, _SDPA, lambda *args: args)
    (attribute,) = original_code.functions(_SDPA).attributes
    assert attribute.known is known


@pytest.mark.parametrize("name", ["sdpa", "fusedops"])
def test_an_exchange_of_heads_for_tokens_is_called(monkeypatch: Context, name: str) -> None:
    """As DeepSpeed's Ulysses: a function in the place of an entry calls what stood there."""
    model, stock = DENSE["Llama"].pair(attn_implementation=name)
    core, calls_of = ALL_ATTENTION_FUNCTIONS[name], []

    def exchange(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls_of.append(module)
        return core(module, 2 * query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, exchange)
    with counted() as calls:
        logits = model(IDS).logits
    assert len(calls_of) == 2 and calls["attention"] == (2 if name == "fusedops" else 0)
    assert_close(logits, stock(IDS).logits)
    reason = describe(model)["model.layers.1.self_attn"].reason
    assert f"the attention function {name!r} was replaced by" in reason


class Later(nn.Module):
    """A class that a later version has given two more arguments."""

    def forward(self, x: Any, y: Any = None, *, cache: Any = None, scale: float = 1.0) -> Any:
        return "original", x, y, cache, scale


@pytest.mark.parametrize("hands_on", [False, True])
def test_a_rule_of_a_later_original(hands_on: bool) -> None:
    def closed(self: Any, x: Any) -> Any:
        return "fused", x

    def hands_further_keywords_on(self: Any, x: Any, **kwargs: Any) -> Any:
        return "fused", x

    forward = hands_further_keywords_on if hands_on else closed
    patched = type("Later", (Later,), {"forward": forward})
    module: Any = Later()
    module.__class__ = PatchRule(Later, patched, "O1", always("gelu")).patched
    assert module(1) == module(x=1) == ("fused", 1)
    assert module(1, 2) == ("original", 1, 2, None, 1.0)
    assert module(1, cache=3) == ("original", 1, None, 3, 1.0)
    assert module(1, scale=2.0)[0] == "original"
    assert module(1, cache=None)[0] == "original"


def _sdpa_with_cache(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
    return "sdpa", cache, kwargs


def test_attention_hands_what_only_sdpa_knows_to_sdpa(monkeypatch: Context) -> None:
    """As ``cache`` of transformers 5.23, which ``sdpa`` must update."""
    known = attention._further_arguments(_sdpa_with_cache, attention.attend)
    monkeypatch.setattr(attention, "_SDPA_ARGUMENTS", known)
    monkeypatch.setattr(attention, "sdpa_attention_forward", _sdpa_with_cache)
    heads = torch.randn(1, 2, 3, 8)
    call: Any = attention.attend_as_sdpa
    module = SimpleNamespace(is_causal=True)
    name, cache, options = call(module, heads, heads, heads, None, scaling=0.5, cache="paged")
    assert (name, cache, options["scaling"]) == ("sdpa", "paged", 0.5)
    output, _ = call(module, heads, heads, heads, None, cache=None)
    assert output.shape == (1, 3, 2, 8)
    with pytest.raises(UnsupportedError, match="cache is an argument of transformers' sdpa"):
        attention.attend(module, heads, heads, heads, None, cache="paged")


def _eager_with_cache(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, dropout: Any, cache: Any
) -> Any:
    return "eager", scaling, dropout, cache


def test_eager_attention_hands_what_only_the_original_knows_to_it(monkeypatch: Context) -> None:
    monkeypatch.setitem(globals(), "eager_attention_forward", _eager_with_cache)
    interface = attention.FusedInterface(globals(), eager=True)
    module, heads = nn.Module().eval(), torch.randn(1, 2, 3, 8)
    output = interface.attend_as_eager(module, heads, heads, heads, None, 0.5, cache="paged")
    assert output == ("eager", 0.5, 0.0, "paged")
    assert interface.attend_as_eager(module, heads, heads, heads, None, 0.5)[1] is None


def test_activations_that_all_models_share_stay_stock() -> None:
    from transformers import XLMConfig, XLMModel, activations

    model = XLMModel(XLMConfig(vocab_size=50, emb_dim=32, n_layers=1, n_heads=4))
    report = fusedops.patch(model)
    assert report["ffns.0"].replaced and model.ffns[0].act is activations.gelu
    assert type(activations.gelu) is activations.GELUActivation
    reason = fusedops.patch(nn.ModuleList([activations.gelu]))["0"].reason
    assert reason is not None and "a global of transformers.activations" in reason


def test_an_inner_function_that_reads_a_global_and_an_attribute_of_its_name() -> None:
    def both(values: Any) -> Any:
        return functional, [(functional, value.functional) for value in values]

    def attribute(values: Any) -> Any:
        return functional, [value.functional for value in values]

    others, values = {"functional": 1}, [SimpleNamespace(functional=2)]
    assert original_code.with_others(both, others, "tests.user") is None
    copy = original_code.with_others(attribute, others, "tests.user")
    assert copy is not None and copy(values) == (1, [2])
