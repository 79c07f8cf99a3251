"""Decoder families: a patched model trains and generates as the stock one, as it is configured.

What patching is at all (hooks, adapters, pickling, levels) is tested with GPT-2. Here is what every
family must do, and what only some have.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from patch_testing import assert_close, assert_same_training, counted, gradients
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe
from fusedops.integrations.hf.residual import unknown_names

pytest.importorskip("transformers")

import transformers

IDS = torch.arange(2 * 12).mul(7).remainder(97).view(2, 12)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """A family in a size that runs in milliseconds.

    Attributes:
        name: what its classes begin with.
        options: of the configuration, beside ``SIZES``.
        ops: how often each op runs in a step of training without checkpointing.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)

    def model(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        config_class = getattr(transformers, f"{self.name}Config")
        config = config_class(**(SIZES | self.options | options))
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # ones and zeros hide which of two norms a weight was for
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        stock = self.model(**options)
        patched = copy.deepcopy(stock)
        fusedops.patch(patched)
        return patched, stock


def without(ops: dict[str, int], name: str) -> dict[str, int]:
    return {op: count for op, count in ops.items() if op != name}


LLAMA_OPS = {
    "attention": 2,
    "rotary_embedding": 2,
    "rms_norm": 3,
    "add_rms_norm": 2,
    "linear_glu": 2,
}
PARALLEL_OPS = {"attention": 2, "rotary_embedding": 2, "mlp": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.1}
OPT_OPS = {
    "attention": 2,
    "layer_norm": 3,
    "add_layer_norm": 2,
    "mlp": 2,
    "bias_dropout_add": 2,
}
GEMMA2 = GROUPED | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
FAMILIES = {
    each.name: each
    for each in (
        Family("Llama", GROUPED, LLAMA_OPS),
        Family("Mistral", GROUPED | {"sliding_window": 5}, LLAMA_OPS),
        Family("Qwen2", GROUPED, LLAMA_OPS),
        Family("Qwen3", GROUPED | {"head_dim": 16}, LLAMA_OPS | {"rms_norm": 3 + 4}),
        Family("Gemma", GROUPED | {"head_dim": 8}, LLAMA_OPS),
        Family("Gemma2", GEMMA2, LLAMA_OPS | {"rms_norm": 3 + 4}),
        Family("Phi", GROUPED, PARALLEL_OPS | {"layer_norm": 3}),
        Family("GPTNeoX", {}, PARALLEL_OPS | {"layer_norm": 5}),
        Family("OPT", OPT, OPT_OPS),
        Family("Phi3", GROUPED, without(LLAMA_OPS, "linear_glu") | {"swiglu": 2}),
    )
}
of_each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
EAGER = {"attn_implementation": "eager"}


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@of_each_family
def test_training_matches_stock(family: Family, autocast: bool) -> None:
    patched, stock = family.pair()
    assert_same_training(patched, stock, loss, autocast=autocast)


@of_each_family
def test_norms_alone_match_stock(family: Family) -> None:
    stock = family.model()
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched, level="O1")
    assert report.num_replaced >= 5
    assert_same_training(patched, stock, loss)


@of_each_family
def test_every_op_of_the_family_runs(family: Family) -> None:
    patched, _ = family.pair()
    with counted() as calls:
        loss(patched).backward()
    found = {op: count for op, count in calls.items() if not op.startswith("linear_act")}
    assert found == family.ops | {f"{op}_backward": count for op, count in family.ops.items()}


@of_each_family
def test_strict_accepts_the_family(family: Family) -> None:
    report = fusedops.patch(family.model(), strict=True)
    assert not report.failed
    kept = {entry.cls.removeprefix(family.name) for entry in report.kept}
    assert kept <= KEPT


KEPT = {
    "Embedding",
    "RotaryEmbedding",
    "TextScaledWordEmbedding",
    "LearnedPositionalEmbedding",
    "Dropout",
}


@of_each_family
def test_state_dict_and_unpatch(family: Family) -> None:
    patched, stock = family.pair()
    assert list(patched.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(patched.state_dict())
    fusedops.unpatch(patched)
    assert [type(each) for each in patched.modules()] == [type(each) for each in stock.modules()]
    before, after = gradients(stock, loss), gradients(patched, loss)
    assert all(torch.equal(before[name], after[name]) for name in before)


@of_each_family
def test_padding_and_generation(family: Family) -> None:
    patched, stock = (model.eval() for model in family.pair())
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    found, expected = (model(IDS, attention_mask=mask).logits for model in (patched, stock))
    assert_close(found[mask.bool()], expected[mask.bool()])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens, wanted = (
        model.generate(IDS, attention_mask=mask, **options) for model in (patched, stock)
    )
    assert torch.equal(tokens, wanted)


@of_each_family
def test_gradient_checkpointing(family: Family) -> None:
    patched, _ = family.pair()
    whole = gradients(patched, loss)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    with counted() as calls:
        recomputed = gradients(patched, loss)
    assert calls["attention"] == 4
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


@of_each_family
def test_bfloat16_parameters(family: Family) -> None:
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    with counted() as calls:
        value = loss(patched)
    assert set(family.ops) <= set(calls)
    error = (loss(stock) - loss(family.model())).abs()
    assert (value - loss(family.model())).abs() <= 2 * error + 1e-2
    assert value.dtype == loss(stock).dtype


@of_each_family
def test_hooks_see_the_stock_values(family: Family) -> None:
    patched, stock = family.pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, found in zip((patched, stock), seen, strict=True):
        for module in model.modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            module.register_forward_hook(
                lambda module, args, output, found=found: found.append(output)
            )
        loss(model)
    for actual, expected in zip(*seen, strict=True):
        assert_close(actual, expected)


@of_each_family
def test_attentions_and_hidden_states_are_recorded(family: Family) -> None:
    patched, stock = family.pair(**EAGER)
    found, expected = (
        model(IDS, output_attentions=True, output_hidden_states=True) for model in (patched, stock)
    )
    for kind in ("attentions", "hidden_states"):
        assert len(found[kind]) == len(expected[kind]) > 0
        for actual, wanted in zip(found[kind], expected[kind], strict=True):
            assert_close(actual, wanted)


@of_each_family
def test_eager_attention_is_served_until_somebody_records_the_weights(family: Family) -> None:
    patched, stock = family.pair(**EAGER)
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert calls["attention"] == 2
    assert any("until a hook asks" in entry.reason for entry in describe(patched).replaced)
    for module in patched.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(lambda module, args, output: None)
    with counted() as calls:
        assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["attention"] == 0


@of_each_family
def test_pickles(family: Family) -> None:
    patched, _ = family.pair()
    twin = pickle.loads(pickle.dumps(patched))
    assert [type(each) for each in twin.modules()] == [type(each) for each in patched.modules()]
    assert torch.equal(twin(IDS).logits, patched(IDS).logits)


def test_compiles_into_one_graph_with_every_op() -> None:
    family = FAMILIES["Gemma2"]
    patched, stock = family.pair(**EAGER)
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    compiled(IDS)
    with counted() as calls:
        assert_close(compiled(IDS).logits, stock(IDS).logits)
    assert {op: calls[op] for op in family.ops} == family.ops


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "mish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_gated_mlp_variants(name: str, bias: bool, activation: str) -> None:
    patched, stock = FAMILIES[name].pair(hidden_act=activation, mlp_bias=bias)
    assert_same_training(patched, stock, loss)


def test_gemma2_caps_the_scores_as_it_is_configured_to() -> None:
    for options in ({}, EAGER):
        patched, stock = FAMILIES["Gemma2"].pair(attn_logit_softcapping=0.1, **options)
        assert_same_training(patched, stock, loss)
    capped, free = (FAMILIES["Gemma2"].model(attn_logit_softcapping=cap) for cap in (0.1, None))
    assert torch.equal(capped(IDS).logits, free(IDS).logits)  # by sdpa
    for model in (capped, free):
        model.set_attn_implementation("eager")
        fusedops.patch(model)
    assert not torch.equal(capped(IDS).logits, free(IDS).logits)


def test_float64_is_normalised_in_float32_as_the_models_do() -> None:
    patched, stock = (model.double() for model in FAMILIES["Llama"].pair())
    with counted() as calls:
        found = patched(IDS).logits
    assert (calls["rms_norm"], calls["add_rms_norm"], calls["attention"]) == (0, 0, 2)
    expected = stock(IDS).logits
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=64)
    assert ((found - expected).abs() <= budget).all()


def test_dropout_of_phi3_drops_in_training_only() -> None:
    patched, stock = FAMILIES["Phi3"].pair(resid_pdrop=1.0)
    with counted() as calls:
        assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["add_rms_norm"] == 2
    assert_close(patched.eval()(IDS).logits, stock.eval()(IDS).logits)


def test_static_cache_and_packed_sequences() -> None:
    patched, stock = (model.eval() for model in FAMILIES["Mistral"].pair())
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    tokens, wanted = (model.generate(IDS, **options) for model in (patched, stock))
    assert torch.equal(tokens, wanted)
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    assert_close(*(model(IDS, position_ids=packed).logits for model in (patched, stock)))


def test_gpt_neox_with_branches_in_sequence() -> None:
    patched, stock = FAMILIES["GPTNeoX"].pair(use_parallel_residual=False)
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert calls["add_layer_norm"] == 2
    patched, stock = FAMILIES["GPTNeoX"].pair(use_parallel_residual=False, hidden_dropout=1.0)
    assert_close(patched(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize("before", [False, True], ids=["norm after", "norm before"])
def test_opt_variants(before: bool) -> None:
    options = {"do_layer_norm_before": before}
    patched, stock = FAMILIES["OPT"].pair(**options)
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert calls["add_layer_norm"] == (2 if before else 4)
    bare = {"enable_bias": False, "layer_norm_elementwise_affine": False}
    assert_same_training(*FAMILIES["OPT"].pair(**options, **bare), loss)
    patched, stock = FAMILIES["OPT"].pair(**options, dropout=1.0)
    with counted() as calls:
        assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["add_layer_norm"] > 0
    patched.eval()
    assert torch.equal(patched(IDS).logits, patched(IDS).logits)


def test_opt_calls_the_feed_forward_children_that_have_hooks() -> None:
    patched, stock = FAMILIES["OPT"].pair()
    shapes: dict[nn.Module, torch.Size] = {}
    for model in (patched, stock):
        model.model.decoder.layers[0].fc1.register_forward_hook(
            lambda module, args, output, model=model: shapes.__setitem__(model, output.shape)
        )
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert (calls["mlp"], calls["add_layer_norm"]) == (1, 2)
    assert shapes[patched] == shapes[stock]
    report = describe(patched)
    assert report["model.decoder.layers.0"].reason == "without mlp: fc1 has hooks"
    assert report["model.decoder.layers.0.fc2"].op == "linear_act"
    assert report["model.decoder.layers.1.fc2"].reason == "inside model.decoder.layers.1"


def test_a_layer_of_another_transformers_is_not_taken_for_the_known_one() -> None:
    class Known(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.mlp(x)).view(-1)

    class Later(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.mlp(x) * self.gain).view(-1)

    assert unknown_names(Known, Known) is None
    assert unknown_names(Later, Known) is None
    assert unknown_names(Known, Later) == "Later.forward of this transformers uses gain"


class _Adapted(nn.Module):
    """What an adapter library puts in a linear layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((base.out_features,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def test_adapted_projections_are_called_and_the_gate_is_still_one_op() -> None:
    patched, stock = FAMILIES["Llama"].pair()
    for model in (patched, stock):
        mlp = model.model.layers[0].mlp
        mlp.gate_proj = _Adapted(mlp.gate_proj)
    with counted() as calls:
        loss(patched)
    assert (calls["swiglu"], calls["linear_glu"]) == (1, 1)
    assert_same_training(patched, stock, loss)
    report = describe(patched)
    assert "gate_proj is a _Adapted" in report["model.layers.0.mlp"].reason
    assert report["model.layers.0.mlp.up_proj"].op == "linear_act"
    assert report["model.layers.0.mlp.act_fn"].reason == "inside model.layers.0.mlp"
