"""What only some model types have: options, dtypes, caches, experts and modules of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import (
    BERT,
    DENSE,
    ENCODERS,
    IDS,
    LEFT_PADDING,
    MASK,
    SPARSE,
    SPECTRUM,
    TOKENS,
    Family,
    loss,
)
from families import transformers as library
from patch_testing import assert_all_close, assert_close, assert_same_training, counted
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe
from fusedops.integrations.hf.rules.experts import experts_forward

EAGER = {"attn_implementation": "eager"}
WHISPER = ENCODERS["WhisperForConditionalGeneration"]
each_t5 = pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "gated T5"])
own_products = pytest.mark.usefixtures("own_products")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "mish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_gated_mlp_variants(name: str, bias: bool, activation: str) -> None:
    patched, stock = DENSE[name].pair(hidden_act=activation, mlp_bias=bias)
    assert_same_training(patched, stock, loss)


def test_gemma2_caps_the_scores_as_it_is_configured_to() -> None:
    patched, stock = DENSE["Gemma2"].pair(attn_logit_softcapping=0.1, **EAGER)
    assert_same_training(patched, stock, loss)
    capped, free = (DENSE["Gemma2"].model(attn_logit_softcapping=cap) for cap in (0.1, None))
    if capped._supports_sdpa:  # which ignores the cap; transformers 5.23 no longer allows it
        assert torch.equal(capped(IDS).logits, free(IDS).logits)
    for model in (capped, free):
        model.set_attn_implementation("eager")
        fusedops.patch(model)
    assert not torch.equal(capped(IDS).logits, free(IDS).logits)


def test_float64_is_normalised_in_float32_as_the_models_do() -> None:
    patched, stock = (model.double() for model in DENSE["Llama"].pair())
    with counted() as calls:
        logits = patched(IDS).logits
    assert (calls["rms_norm"], calls["attention"]) == (0, 2)
    expected = stock(IDS).logits
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=64)
    assert ((logits - expected).abs() <= budget).all()


@each_t5
def test_t5_with_its_second_product_kept_in_float32(name: str) -> None:
    """As transformers loads T5 in half precision; the stream after it is then float32 too."""
    family = ENCODERS[name]
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    for model in (patched, stock):
        for module in model.modules():
            if hasattr(module, "wo"):
                module.wo.float()
    exact = family.logits(family.model().double())
    logits, expected = family.logits(patched), family.logits(stock)
    assert logits.dtype == expected.dtype
    assert (logits.double() - exact).norm() <= 1.5 * (expected.double() - exact).norm()


@each_t5
def test_dropout_of_t5_sublayers_drops_all_branches(name: str) -> None:
    """Alone: one option has the dropouts of attention and feed-forward layers in it as well."""
    patched, stock = ENCODERS[name].pair(dropout_rate=1.0)
    for model in (patched, stock):
        for path, module in model.named_modules():
            is_layer = path.split(".")[-2:-1] in (["0"], ["1"], ["2"])
            if isinstance(module, nn.Dropout) and not is_layer:
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    assert_close(ENCODERS[name].logits(patched), ENCODERS[name].logits(stock))


@own_products
def test_whisper_in_training_calls_the_second_product_after_its_inner_dropout() -> None:
    patched, stock = WHISPER.pair(activation_dropout=1.0)
    assert describe(patched)["model.encoder.layers.0.fc2"].op == "linear_act"
    assert_close(WHISPER.logits(patched), WHISPER.logits(stock))
    assert describe(patched.eval())["model.encoder.layers.0.fc2"].reason.startswith("inside")


def test_whisper_in_float16_is_clamped() -> None:
    patched, stock = (model.eval().half() for model in WHISPER.pair())
    hidden_states = []
    for model in (patched, stock):
        for layer in model.model.encoder.layers:
            layer.fc2.bias.data.fill_(65000.0)
        output = model.model.encoder(SPECTRUM.half(), output_hidden_states=True)
        hidden_states.append(output.hidden_states[1])
    assert torch.equal(*hidden_states)
    assert hidden_states[0].max() == 65504.0 - 1000


@own_products
def test_classifier_with_pooler() -> None:
    patched, stock = replace(BERT, cls="BertForSequenceClassification").pair()
    inputs = {"attention_mask": MASK, "labels": torch.tensor([0, 1])}
    assert_same_training(patched, stock, lambda model: model(TOKENS, **inputs).loss)
    assert describe(patched)["bert.pooler.dense"].op == "linear_act"
    assert not describe(patched)["bert.pooler.activation"].replaced


# Implementations that a model asks for by name. sdpa knows neither soft-cap nor sinks.
RIGHT_PADDING = LEFT_PADDING.flip(1)
STOCK_ATTENTION = dict.fromkeys(ENCODERS, "sdpa") | dict.fromkeys(SPARSE, "eager")
STOCK_ATTENTION |= {"Llama": "sdpa", "Mistral": "sdpa", "Gemma2": "eager"}


def padded_loss(model: Any) -> torch.Tensor:
    labels = IDS.masked_fill(RIGHT_PADDING == 0, -100)
    return model(IDS, attention_mask=RIGHT_PADDING, labels=labels).loss


@pytest.fixture
def registered() -> None:
    fusedops.register_attention()
    fusedops.register_experts()


@pytest.mark.parametrize("name", STOCK_ATTENTION)
@pytest.mark.usefixtures("registered")
def test_registered_implementations_need_no_patch(name: str) -> None:
    family = (DENSE | SPARSE | ENCODERS)[name]
    stock = family.model(attn_implementation=STOCK_ATTENTION[name])
    named = family.model(attn_implementation="fusedops")
    if name in SPARSE:
        named.set_experts_implementation("fusedops")
    with counted() as calls:
        assert_same_training(named, stock, family.loss if name in ENCODERS else padded_loss)
    assert calls["attention"] == family.ops["attention"]
    assert calls["moe_mlp"] == family.ops.get("moe_mlp", 0)


@pytest.mark.usefixtures("registered")
def test_a_model_that_asks_by_name_can_be_patched() -> None:
    named, stock = (DENSE["Llama"].model(attn_implementation="sdpa") for _ in range(2))
    named.set_attn_implementation("fusedops")
    report = fusedops.patch(named)
    assert report["model.layers.0.self_attn"].op is not None
    assert_same_training(named, stock, padded_loss)
    fusedops.unpatch(named)
    assert named.config._attn_implementation == "fusedops"
    assert_close(named(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("by_name", [False, True], ids=["patched", "by name"])
@pytest.mark.usefixtures("registered")
def test_caches_and_packed_sequences(by_name: bool, cache: str) -> None:
    model, stock = (DENSE["Mistral"].model(attn_implementation="sdpa").eval() for _ in range(2))
    if by_name:
        model.set_attn_implementation("fusedops")
    else:
        fusedops.patch(model)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": LEFT_PADDING, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), stock.generate(IDS, **options))
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    assert_close(model(IDS, position_ids=packed).logits, stock(IDS, position_ids=packed).logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_keeps_its_paged_cache(implementation: str) -> None:
    model = DENSE["Llama"].model(attn_implementation=implementation).eval()
    settings = library.generation.configuration_utils
    if not hasattr(settings, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has no configuration of continuous batching")
    batching = settings.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def generated() -> list[list[int]]:
        outputs = model.generate_batch(
            inputs=[[5, 6, 7], [9, 3, 4, 1, 2]],
            generation_config=library.GenerationConfig(max_new_tokens=6, **options),
            continuous_batching_config=batching,
        )
        outputs = sorted(outputs.values(), key=lambda output: output.prompt_ids)
        assert all(output.error is None and output.status.name == "FINISHED" for output in outputs)
        return [output.generated_tokens for output in outputs]

    expected = generated()
    assert [len(tokens) for tokens in expected] == [6, 6]
    fusedops.patch(model)
    assert generated() == expected


# Families with experts.
of_each_family = pytest.mark.parametrize("family", SPARSE.values(), ids=SPARSE)


@of_each_family
def test_other_implementations_are_served_and_match(family: Family) -> None:
    for name in ("grouped_mm", "batched_mm"):
        patched, stock = family.pair(experts_implementation=name)
        with counted() as calls:
            assert_close(patched(IDS).logits, stock(IDS).logits)
        assert calls["moe_mlp"] == family.ops["moe_mlp"]


@pytest.mark.parametrize(
    "name", sorted(SPARSE.keys() - {"DeepseekV3"})
)  # has none of which to record
def test_router_logits_are_recorded(name: str) -> None:
    patched, stock = SPARSE[name].pair()
    with counted() as calls:
        output, expected = (
            model(IDS, output_router_logits=True, labels=IDS) for model in (patched, stock)
        )
    assert calls["moe_mlp"] == 2
    assert len(output.router_logits) == 2
    assert_all_close(output.router_logits, expected.router_logits)
    assert_close(output.aux_loss, expected.aux_loss)
    assert_close(output.loss, expected.loss)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def _choices(experts: Any, tokens: int = 9, k: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    input = torch.randn(tokens, 32, requires_grad=True)
    ids = torch.rand(tokens, experts.num_experts).topk(k)[1]
    return input, ids, torch.rand(tokens, k).requires_grad_()


@of_each_family
def test_experts_of_another_process_are_left_out(family: Family) -> None:
    """Expert parallelism names them by ``num_experts``; their weight is 0 or anything."""
    patched, stock = family.pair(experts_implementation="grouped_mm")
    ours, theirs = _experts(patched)[0], _experts(stock)[0]
    theirs._is_expert_parallel = True  # as transformers 5.23 sets on modules that it splits
    input, ids, weights = _choices(theirs)
    ids[::2, 0] = theirs.num_experts
    ids[4] = theirs.num_experts
    masked = weights.masked_fill(ids == theirs.num_experts, 0.0)
    output, expected = ours(input, ids, weights), theirs(input, ids, masked)
    assert_close(output, expected)
    assert (output[4] == 0).all()
    names = ["input", "weights", *dict(theirs.named_parameters())]
    gradients = torch.autograd.grad(output.square().sum(), [input, weights, *ours.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [input, weights, *theirs.parameters()])
    for name, actual, gradient in zip(names, gradients, wanted, strict=True):
        # Transformers 5.15 adds up memory that nobody wrote in the gradient of this bias.
        if name != "gate_up_proj_bias" or not library.__version__.startswith("5.15."):
            assert_close(actual, gradient)


def test_a_norm_at_the_end_of_each_expert_is_applied() -> None:
    """Before the weights, by ``has_post_expert_norm`` of transformers 5.23."""
    experts = _experts(SPARSE["Mixtral"].model())[0]
    experts.has_post_expert_norm = True
    experts.post_expert_norm = nn.RMSNorm(32)
    input, ids, weights = _choices(experts)
    output = experts_forward(experts, input, ids, weights)
    gate, up = (experts.gate_up_proj[ids] @ input[:, None, :, None]).squeeze(-1).chunk(2, -1)
    outputs = (experts.down_proj[ids] @ (experts.act_fn(gate) * up)[..., None]).squeeze(-1)
    assert_close(output, (experts.post_expert_norm(outputs) * weights[..., None]).sum(1))


def test_a_gate_of_its_own_is_called_between_two_products() -> None:
    patched, stock = SPARSE["GptOss"].pair()
    for experts in [*_experts(patched), *_experts(stock)]:
        experts.limit = 0.5
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert (calls["moe_mlp"], calls["grouped_mm"]) == (0, 4)
    report = describe(patched)
    assert report["model.layers.0.mlp.experts"].reason == "its own gate between two grouped_mm"


def test_an_implementation_for_a_device_is_kept() -> None:
    patched, _ = SPARSE["Mixtral"].pair()
    patched.config._experts_implementation_internal = "sonicmoe"
    report = describe(patched)
    assert "configured as 'sonicmoe'" in report["model.layers.0.mlp.experts"].reason


def test_norms_of_gpt_oss_stay_float32_in_bfloat16() -> None:
    model = SPARSE["GptOss"].model().to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    stock = copy.deepcopy(model)
    fusedops.patch(model)
    with counted() as calls:
        value = loss(model)
    assert calls["rms_norm"] == 5
    assert (value - loss(stock)).abs() <= torch.finfo(torch.bfloat16).eps * value
