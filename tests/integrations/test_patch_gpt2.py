"""What hangs on the modules of a model and what is done to it, with GPT-2 and BERT."""

from __future__ import annotations

import copy

import pytest
import torch
from families import ALL, BERT, GPT2, IDS, loss
from patch_testing import (
    assert_all_close,
    assert_close,
    assert_same_training,
    counted,
)
from torch import nn
from transformers.models.gpt2 import modeling_gpt2

import fusedops
from fusedops.integrations import describe

own_products = pytest.mark.usefixtures("own_products")
ACTIVATIONS = (
    *("gelu_new", "gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast"),
    *("gelu_accurate", "quick_gelu", "relu", "relu2", "silu", "swish", "linear"),
)
# Model -> the option of its activation, and modules that an op serves with every one.
OF_BERT = ("bert.encoder.layer.0.intermediate", "cls.predictions.transform")
SERVED = {
    "GPT2": ("activation_function", {"transformer.h.0.mlp": "mlp"}),
    "BertForMaskedLM": ("hidden_act", dict.fromkeys(OF_BERT, "linear_act")),
}
KNOWN = [("GPT2", activation) for activation in ACTIVATIONS]
KNOWN += [("BertForMaskedLM", activation) for activation in ("gelu_new", "quick_gelu", "silu")]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("name", "activation"), [*KNOWN, ("BertForMaskedLM", "relu")])
@own_products
def test_every_known_activation(name: str, activation: str, autocast: bool) -> None:
    option, modules = SERVED[name]
    patched, stock = ALL[name].pair(**{option: activation})
    assert {module: describe(patched)[module].op for module in modules} == modules
    if autocast and activation == "relu":
        return  # its slope jumps: whichever way bfloat16 rounds an argument near 0 is right
    assert_same_training(patched, stock, ALL[name].loss, autocast=autocast)


@pytest.mark.parametrize("activation", ["gelu_10", "tanh", "mish"])
@own_products
def test_unknown_activation_is_kept_and_reported(activation: str) -> None:
    stock = GPT2.model(activation_function=activation)
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    entry = report["transformer.h.1.mlp"]
    assert not entry.replaced
    assert "no activation of linear_act" in entry.reason
    assert type(patched.transformer.h[0].mlp) is modeling_gpt2.GPT2MLP
    assert report["transformer.h.1.mlp.c_fc"].op == "linear_act"
    assert_same_training(patched, stock, loss)
    classes = [type(module) for module in stock.modules()]
    with pytest.raises(fusedops.UnsupportedError, match=r"2 modules.*h\.0\.mlp: act is a "):
        fusedops.patch(stock, strict=True)
    assert [type(module) for module in stock.modules()] == classes
    fusedops.patch(GPT2.model(), strict=True)


DROPOUTS = ("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout")


@own_products
def test_report_tells_op_and_backend_of_every_module() -> None:
    report = fusedops.patch(GPT2.model())
    kept = {entry.name for entry in report.kept}
    dropouts = {f"transformer.h.{i}.{name}" for i in (0, 1) for name in DROPOUTS}
    assert kept == {"transformer.wte", "transformer.wpe", "transformer.drop", *dropouts}
    norm = report["transformer.h.0.ln_2"]
    assert norm.op == "layer_norm"
    assert norm.backend.startswith(fusedops.resolve("gelu", torch.ones(1), "none").backend)
    assert report.num_replaced == len(report.modules) - len(kept)
    assert repr(report) == "PatchReport(GPT2LMHeadModel, level='O2', 21 of 30 modules replaced)"
    assert "transformer.h.*.mlp (x2)" in str(report)


def test_patching_twice_and_changing_the_level() -> None:
    model = GPT2.model()
    parameters = dict(model.named_parameters())
    first = fusedops.patch(model)
    classes = [type(module) for module in model.modules()]
    assert fusedops.patch(model) == first
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    fusedops.patch(model, level="O1")
    assert type(model.transformer.h[0].mlp) is modeling_gpt2.GPT2MLP
    fusedops.patch(model, level="O0")
    assert all(type(module).__module__.split(".")[0] != "fusedops" for module in model.modules())


def test_backward_hooks_fire_with_the_stock_gradients() -> None:
    names = ["h.0.mlp.c_fc", "h.0.mlp", "h.0.attn", "h.1.ln_2", "h.1.attn.resid_dropout", "h.1"]
    names = [*(f"transformer.{name}" for name in names), "lm_head"]
    patched, stock = GPT2.pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, outputs in zip((patched, stock), seen, strict=True):
        for name in names:
            model.get_submodule(name).register_full_backward_hook(
                lambda module, grad_input, grad_output, outputs=outputs: outputs.append(
                    grad_output[0]
                )
            )
        loss(model).backward()
    assert len(seen[0]) == len(names)
    assert_all_close(*seen)


# A module that has a hook, and what the report says about the one around it.
HOOKED = {
    ("GPT2", "transformer.h.0.ln_2"): "",
    ("GPT2", "transformer.h.1.attn.c_attn"): "",
    ("GPT2", "transformer.h.1.mlp"): "",
    ("GPT2", "transformer.h.0.mlp.c_fc"): "falls back now: c_fc has hooks",
    ("GPT2", "transformer.h.0.mlp.act"): "falls back now: act has hooks",
    ("GPT2", "transformer.h.0.mlp.c_proj"): "linear_act alone: c_proj has hooks",
    ("BertForMaskedLM", "bert.encoder.layer.0.intermediate.dense"): "",
    ("BertForMaskedLM", "bert.encoder.layer.0.intermediate.intermediate_act_fn"): "",
    ("BertForMaskedLM", "bert.encoder.layer.0.output.dense"): "",
    ("BertForMaskedLM", "bert.encoder.layer.0.output.LayerNorm"): "",
    ("BertForMaskedLM", "bert.encoder.layer.1.attention.output.dropout"): "",
    ("BertForMaskedLM", "cls.predictions.transform.dense"): "",
    ("Mixtral", "model.layers.0.mlp.experts.act_fn"): "",
    ("OPT", "model.decoder.layers.0.fc1"): "without mlp: fc1 has hooks",
    ("WhisperForConditionalGeneration", "model.decoder.layers.1.fc1"): "",
    ("T5ForConditionalGeneration", "decoder.block.1.layer.2.DenseReluDense.wi"): "",
}


@pytest.mark.parametrize(("name", "module"), HOOKED)
@own_products
def test_a_hook_may_change_what_a_bypassed_child_returns(name: str, module: str) -> None:
    family, reason = ALL[name], HOOKED[name, module]
    options = {"experts_implementation": "grouped_mm"} if name == "Mixtral" else {}
    patched, stock = family.pair(**options)
    hooks = [
        model.get_submodule(module).register_forward_hook(lambda module, args, output: output * 2)
        for model in (patched, stock)
    ]
    assert_close(family.logits(patched), family.logits(stock))
    if reason:
        assert describe(patched)[module.rpartition(".")[0]].reason == reason
    hooks[0].remove()
    with counted() as calls:
        family.loss(patched)
    assert {op: calls[op] for op in family.ops} == family.ops


class Adapted(nn.Module):
    """What an adapter library puts in a linear layer's place."""

    def __init__(self, base: nn.Module, out_features: int) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((out_features,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


# Where the adapter is, and the op that runs in the other layer.
ADAPTED = {
    "GPT2": ("transformer.h.0.mlp", "c_fc", 4 * 32, "mlp"),
    "Llama": ("model.layers.0.mlp", "gate_proj", 48, "linear_glu"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ADAPTED)
@own_products
def test_an_adapter_in_a_childs_place_is_called(name: str, when: str) -> None:
    path, child, features, op = ADAPTED[name]
    patched, stock = ALL[name].model(), ALL[name].model()
    if when == "after":
        fusedops.patch(patched)
    for model in (patched, stock):
        mlp = model.get_submodule(path)
        setattr(mlp, child, Adapted(getattr(mlp, child), features))
    report = fusedops.patch(patched) if when == "before" else describe(patched)
    assert f"{child} is a Adapted" in report[path].reason
    with counted() as calls:
        loss(patched)
    assert calls[op] == 1
    assert_same_training(patched, stock, loss)
    if name == "Llama":
        assert calls["swiglu"] == 1
        assert report[f"{path}.up_proj"].op == "linear_act"
        assert report[f"{path}.act_fn"].reason == f"inside {path}"


def test_only_the_dropouts_that_are_on_drop() -> None:
    patched, stock = BERT.pair(hidden_dropout_prob=1.0)
    for model in (patched, stock):
        model.bert.embeddings.dropout.p = 0.0
        model.bert.encoder.layer[0].output.dropout.eval()
    with counted() as calls:
        assert_close(BERT.logits(patched), BERT.logits(stock))
    assert calls["add_layer_norm"] == 4


def test_accelerate_offload_still_moves_the_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    patched, stock = GPT2.pair()
    fused = patched(IDS).logits
    accelerate.cpu_offload(patched, execution_device=torch.device("cpu"))
    assert patched.transformer.h[0].mlp.c_fc.weight.is_meta
    assert_close(patched(IDS).logits, fused)
    assert_close(fused, stock(IDS).logits)
