"""Layers of BERT's family in inference: one forward calls the ops of all submodules, or none."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_testing import assert_close, counted, patched_pair
from torch import nn

import fusedops

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "models"))

import encode_queries
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.bert import modeling_bert

from fusedops.integrations.hf.rules import encoder_layer
from fusedops.runtime.host_module import load

pytestmark = [
    pytest.mark.usefixtures("own_products"),
    pytest.mark.skipif(isinstance(load(), str), reason="the kernels are not compiled"),
]
LAYERS, WIDTH = 2, 48
SIZES = {
    "vocab_size": 60,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}
IDS = torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, 4:] = 0
FAMILIES = {
    "bert": (BertModel, BertConfig),
    "roberta": (RobertaModel, RobertaConfig),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig),
    "camembert": (CamembertModel, CamembertConfig),
    "electra": (ElectraModel, ElectraConfig),
}


def make(family: str = "bert", **options: Any) -> Any:
    """Return a small encoder with random weights, biases included, for evaluation."""
    model, config = FAMILIES[family]
    torch.manual_seed(0)
    encoder = model(config(**SIZES, **options)).eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    return encoder


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect an entry for each layer that calls the ops of its submodules itself."""
    calls: list[int] = []
    compute = encoder_layer._compute

    def counting(*args: Any) -> torch.Tensor:
        calls.append(1)
        return compute(*args)

    monkeypatch.setattr(encoder_layer, "_compute", counting)
    return calls


@torch.inference_mode()
def encode(model: Any, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    hidden: torch.Tensor = model(IDS, attention_mask=mask, **options).last_hidden_state
    return hidden.as_subclass(torch.Tensor)


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS), PADDED], ids=["none", "ones", "pad"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_inference_calls_the_ops(
    family: str, mask: torch.Tensor | None, taken: list[int]
) -> None:
    patched, stock = patched_pair(make(family), strict=True)
    with counted() as calls:
        found = encode(patched, mask)
    assert len(taken) == LAYERS
    assert calls["linear_act"] >= 6 * LAYERS
    assert calls["attention"] == LAYERS
    assert calls["add_layer_norm"] == 2 * LAYERS
    assert_close(found, encode(stock, mask), depth=WIDTH)
    with torch.enable_grad():  # its submodules are called, with the same ops
        submodules = patched(IDS, attention_mask=mask).last_hidden_state
    assert len(taken) == LAYERS
    assert torch.equal(found, submodules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_the_bits_of_the_submodules(dtype: torch.dtype, taken: list[int]) -> None:
    patched, _ = patched_pair(make().to(dtype))
    found = encode(patched, PADDED)
    assert len(taken) == (LAYERS if dtype != torch.float64 else 0)
    assert torch.equal(found, patched(IDS, attention_mask=PADDED).last_hidden_state)


def test_autocast_calls_the_submodules(taken: list[int]) -> None:
    patched, _ = patched_pair(make())
    with torch.autocast("cpu", torch.bfloat16):
        found = encode(patched, PADDED)
        submodules = patched(IDS, attention_mask=PADDED).last_hidden_state
    assert not taken
    assert torch.equal(found, submodules)


def submodule(path: str) -> Callable[[Any], Any]:
    return lambda model: model.encoder.layer[1].get_submodule(path)


INNER = [path for path in encoder_layer._PARTS if path]


@pytest.mark.parametrize("path", INNER)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hook_on_a_submodule_runs(path: str, kind: str, taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    called: list[str] = []
    module = submodule(path)(patched)
    register = getattr(module, f"register_{kind}_hook")
    handle = register(lambda *args: called.append(path))
    found = encode(patched)
    assert len(taken) == LAYERS - 1  # the other layer's
    # The attention reads the probability of its dropout and does not call it.
    assert bool(called) == (kind != "full_backward" and path != "attention.self.dropout")
    assert_close(found, encode(stock), depth=WIDTH)
    handle.remove()
    encode(patched)
    assert len(taken) == 2 * LAYERS - 1


def test_hook_that_changes_a_submodule_acts(taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    for model in (patched, stock):
        key = submodule("attention.self.key")(model)
        key.register_forward_hook(lambda module, args, output: output * 2)
    assert_close(encode(patched), encode(stock), depth=WIDTH)
    assert len(taken) == LAYERS - 1


def test_hook_on_the_layer_runs_and_leaves_it_fused(taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    for model in (patched, stock):
        model.encoder.layer[0].register_forward_hook(lambda module, args, output: output * 2)
    assert_close(encode(patched), encode(stock), depth=WIDTH)
    assert len(taken) == LAYERS


def test_hook_on_all_modules_sees_submodules(taken: list[int]) -> None:
    patched, _ = patched_pair(make())
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module).__name__)
    )
    try:
        encode(patched)
    finally:
        handle.remove()
    assert not taken
    assert seen.count("BertIntermediate") == LAYERS


class Adapter(nn.Module):
    """A linear layer and a low-rank branch, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.up(self.down(x))
        return output


@pytest.mark.parametrize("path", ["attention.self.query", "attention.output.dense", "output.dense"])
def test_adapter_in_the_place_of_a_submodule_acts(path: str, taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    parent, _, name = path.rpartition(".")
    for model in (patched, stock):
        torch.manual_seed(1)
        owner = submodule(parent)(model)
        setattr(owner, name, Adapter(getattr(owner, name)).eval())
    found = encode(patched)
    assert len(taken) == LAYERS - 1
    assert_close(found, encode(stock), depth=WIDTH)
    owner = submodule(parent)(patched)
    setattr(owner, name, getattr(owner, name).base)
    encode(patched)
    assert len(taken) == 2 * LAYERS - 1


def _dropout(model: Any) -> None:
    submodule("output.dropout")(model).train()


def _own_forward(model: Any) -> None:
    module = submodule("intermediate")(model)
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


def _own_method(model: Any) -> None:
    layer = model.encoder.layer[1]
    method = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda x: method(x) * 2


def _activation(model: Any) -> None:
    submodule("intermediate")(model).intermediate_act_fn = nn.ReLU()


def _weight(model: Any) -> None:
    class Wrapped(torch.Tensor):
        pass

    dense = submodule("output.dense")(model)
    weight = dense.weight.detach().as_subclass(Wrapped)
    del dense.weight
    dense.weight = weight


def _chunks(model: Any) -> None:
    model.encoder.layer[1].chunk_size_feed_forward = 1


def _causal(model: Any) -> None:
    submodule("attention.self")(model).is_causal = True


CHANGES = [_own_forward, _own_method, _activation, _weight, _chunks, _causal]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layer_computes_what_stock_does(
    change: Callable[[Any], None], taken: list[int]
) -> None:
    patched, stock = patched_pair(make())
    before = encode(patched)
    taken.clear()
    for model in (patched, stock):
        change(model)
    found = encode(patched)
    assert len(taken) == LAYERS - 1
    assert_close(found, encode(stock), depth=WIDTH)
    if change not in (_weight, _chunks):
        assert not torch.equal(found, before)


def test_dropout_that_trains_draws(taken: list[int]) -> None:
    patched, _ = patched_pair(make())
    before = encode(patched)
    taken.clear()
    _dropout(patched)
    assert not torch.equal(encode(patched), before)
    assert len(taken) == LAYERS - 1


@pytest.mark.parametrize(
    "name", ["BertAttention", "BertSelfAttention", "BertSelfOutput", "BertIntermediate"]
)
def test_changed_code_of_a_submodule_runs(
    name: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, stock = patched_pair(make())
    cls = getattr(modeling_bert, name)
    forward = cls.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    encode(patched)
    taken.clear()
    monkeypatch.setattr(cls, "forward", doubled)
    found = encode(patched)
    assert not taken
    assert_close(found, encode(stock), depth=WIDTH)


def test_replaced_function_of_torch_is_called(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, stock = patched_pair(make())
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: linear(x, w, b) * 2)
    found = encode(patched)
    assert not taken
    assert_close(found, encode(stock), depth=WIDTH)


def test_other_attention_implementation_is_called(taken: list[int]) -> None:
    patched, stock = patched_pair(make(attn_implementation="eager"))
    found = encode(patched, PADDED)
    assert not taken
    assert_close(found, encode(stock, PADDED), depth=WIDTH)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_recorded_outputs_are_those_of_stock(attn_implementation: str) -> None:
    patched, stock = patched_pair(make(attn_implementation=attn_implementation))
    options = {"output_hidden_states": True, "output_attentions": attn_implementation == "eager"}
    with torch.inference_mode():
        found, wanted = (model(IDS, PADDED, **options) for model in (patched, stock))
    assert len(found.hidden_states) == len(wanted.hidden_states) == LAYERS + 1
    for ours, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert_close(ours, theirs, depth=WIDTH)
    if attn_implementation == "eager":
        assert len(found.attentions) == len(wanted.attentions) == LAYERS
        for ours, theirs in zip(found.attentions, wanted.attentions, strict=True):
            assert_close(ours, theirs, depth=WIDTH)


def test_training_and_gradients_call_the_submodules(taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    for model in (patched, stock):
        model(IDS, attention_mask=PADDED).last_hidden_state.square().sum().backward()
    assert not taken
    for ours, theirs in zip(patched.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            assert_close(ours.grad, theirs.grad)
    patched.train()
    encode(patched)
    assert not taken


def test_decoder_calls_the_submodules(taken: list[int]) -> None:
    patched, stock = patched_pair(make(is_decoder=True))
    assert_close(encode(patched), encode(stock), depth=WIDTH)
    assert not taken


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_lower_levels_call_the_submodules(level: str, taken: list[int]) -> None:
    patched, stock = patched_pair(make(), level=level)
    assert_close(encode(patched), encode(stock), depth=WIDTH)
    assert not taken


def test_copies_and_unpatched_models(taken: list[int]) -> None:
    patched, stock = patched_pair(make())
    twin = copy.deepcopy(patched)
    assert torch.equal(encode(twin), encode(patched))
    assert len(taken) == 2 * LAYERS
    fusedops.unpatch(patched)
    assert torch.equal(encode(patched), encode(stock))
    assert len(taken) == 2 * LAYERS
    encode(twin)
    assert len(taken) == 3 * LAYERS


def test_benchmark_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(fusedops, "tune_host", partial(fusedops.tune_host, threads=threads))
    sizes = {**encode_queries.ENCODERS, "minilm": (1, 48, 4)}
    monkeypatch.setattr(encode_queries, "ENCODERS", sizes)
    arguments = ["--encoder", "minilm", "--dtype", "bfloat16", "--tokens", "8", "--seconds", "0.01"]
    assert encode_queries.main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "encode_queries.json").read_text())["rows"]
    assert (row["batch"], row["seq_len"]) == (1, 8)
    assert row["variants"].keys() >= {"stock", "fusedops"}
    assert all(result["seconds"]["median"] > 0 for result in row["variants"].values())
    assert row["variants"]["fusedops"]["ratio"]["median"] == 1.0
