"""Encoder and encoder-decoder families: a patched model trains as the stock one, as configured.

What patching is at all (hooks, adapters, pickling, levels) is tested with GPT-2 and BERT. Here is
what every family must do, and what only some have.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from encoder_families import FAMILIES, SPECTRUM, Family
from patch_testing import assert_close, assert_same_training, counted, gradients
from torch import nn

import fusedops
from fusedops.integrations import describe

GENERATING = ("T5ForConditionalGeneration", "gated T5", "WhisperForConditionalGeneration")
of_each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@of_each_family
def test_training_matches_stock(family: Family, autocast: bool) -> None:
    patched, stock = family.pair(**(family.smooth if autocast else {}))
    draws = family.draws if autocast else 0
    assert_same_training(patched, stock, family.loss, autocast=autocast, draws=draws)


@of_each_family
@pytest.mark.usefixtures("own_products")
def test_every_op_of_the_family_runs(family: Family) -> None:
    patched, _ = family.pair()
    with counted() as calls:
        family.loss(patched).backward()
    found = {op: count for op, count in calls.items() if not op.startswith("linear_act")}
    assert found == family.ops | {f"{op}_backward": count for op, count in family.ops.items()}


@of_each_family
@pytest.mark.usefixtures("own_products")
def test_strict_accepts_the_family_and_the_report_names_its_modules(family: Family) -> None:
    report = fusedops.patch(family.model(), strict=True)
    assert not report.failed
    for name, op in family.fused.items():
        assert report[name].replaced
        assert op in report[name].op.split(", ")


@of_each_family
def test_state_dict_and_unpatch(family: Family) -> None:
    patched, stock = family.pair()
    before, values = stock.state_dict(), patched.state_dict()
    assert list(values) == list(before)
    assert all(torch.equal(values[name], before[name]) for name in before)
    stock.load_state_dict(values)
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(each) for each in stock.modules()
    ]
    first, again = gradients(stock, family.loss), gradients(patched, family.loss)
    assert all(torch.equal(first[name], again[name]) for name in first)


@of_each_family
def test_evaluation_of_a_padded_batch(family: Family) -> None:
    patched, stock = (model.eval() for model in family.pair(**dict.fromkeys(family.dropout, 0.5)))
    with torch.inference_mode():
        assert_close(family.logits(patched), family.logits(stock))


@of_each_family
def test_dropout_of_everything_is_seen_wherever_stock_has_it(family: Family) -> None:
    patched, stock = family.pair(**dict.fromkeys(family.dropout, 1.0))
    assert_close(family.logits(patched), family.logits(stock))


@of_each_family
def test_gradient_checkpointing_repeats_the_dropout(family: Family) -> None:
    patched, _ = family.pair(**dict.fromkeys(family.dropout, 0.3))
    whole = gradients(patched, family.loss)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    with counted() as calls:
        recomputed = gradients(patched, family.loss)
    assert calls["attention"] == 2 * family.ops["attention"]
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


@of_each_family
def test_bfloat16_parameters(family: Family) -> None:
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    exact = family.logits(family.model().double())
    with counted() as calls:
        found = family.logits(patched)
    expected = family.logits(stock)
    assert found.dtype == expected.dtype
    assert set(family.ops) <= set(calls)
    error = (expected.double() - exact).norm()
    assert (found.double() - exact).norm() <= 1.5 * error


@of_each_family
def test_hooks_see_the_stock_values(family: Family) -> None:
    patched, stock = family.pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, found in zip((patched, stock), seen, strict=True):
        for module in model.modules():
            if module is not model and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(
                    lambda module, args, output, found=found: found.append(output)
                )
        family.loss(model)
    for actual, expected in zip(*seen, strict=True):
        assert_close(actual, expected)


@of_each_family
def test_attentions_and_hidden_states_are_recorded(family: Family) -> None:
    patched, stock = family.pair(attn_implementation="eager")
    found, expected = (
        model(**family.inputs(model), output_attentions=True, output_hidden_states=True)
        for model in (patched, stock)
    )
    for kind in (name for name in expected if name.endswith(("attentions", "hidden_states"))):
        assert len(found[kind]) == len(expected[kind]) > 0
        for actual, wanted in zip(found[kind], expected[kind], strict=True):
            assert_close(actual, wanted)


@of_each_family
def test_pickles(family: Family) -> None:
    patched, _ = family.pair()
    twin = pickle.loads(pickle.dumps(patched))
    assert [type(module) for module in twin.modules()] == [type(each) for each in patched.modules()]
    assert torch.equal(family.logits(twin), family.logits(patched))


@of_each_family
def test_hooks_on_all_modules_fire(family: Family) -> None:
    counts = []
    for model in family.pair():
        fired: list[nn.Module] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, fired=fired: fired.append(module)
        )
        family.loss(model)
        handle.remove()
        counts.append(len(fired))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", GENERATING)
def test_generation(name: str) -> None:
    family = FAMILIES[name]
    patched, stock = (model.eval() for model in family.pair())
    given = {name: value for name, value in family.inputs(stock).items() if name in PROMPTS}
    options = {"max_new_tokens": 8, "do_sample": False}
    with counted() as calls:
        tokens = patched.generate(**given, **options)
    assert calls["attention"] > 8
    assert torch.equal(tokens, stock.generate(**given, **options))


PROMPTS = ("input_ids", "attention_mask", "input_features")


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "gated T5"])
def test_t5_with_its_second_product_kept_in_float32(name: str) -> None:
    """As transformers loads T5 in half precision; the stream after it is then float32 too."""
    family = FAMILIES[name]
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    for model in (patched, stock):
        for module in model.modules():
            if hasattr(module, "wo"):
                module.wo.float()
    exact = family.logits(family.model().double())
    found, expected = family.logits(patched), family.logits(stock)
    assert found.dtype == expected.dtype
    assert (found.double() - exact).norm() <= 1.5 * (expected.double() - exact).norm()


@pytest.mark.parametrize(("gate", "is_fused"), [("gated-relu", True), ("gated-tanh", False)])
def test_t5_with_another_gate(gate: str, is_fused: bool) -> None:
    family = FAMILIES["gated T5"]
    stock = family.model(feed_forward_proj=gate)
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    ops = {entry.name: entry.op for entry in report.replaced}
    name = "encoder.block.0.layer.1.DenseReluDense"
    assert ops.get(name) == ("linear_glu" if is_fused else None)
    assert_same_training(patched, stock, family.loss)


@pytest.mark.usefixtures("own_products")
def test_whisper_in_training_calls_the_second_product_after_its_inner_dropout() -> None:
    family = FAMILIES["WhisperForConditionalGeneration"]
    patched, stock = family.pair(activation_dropout=1.0)
    assert describe(patched)["model.encoder.layers.0.fc2"].op == "linear_act"
    assert_close(family.logits(patched), family.logits(stock))
    assert describe(patched.eval())["model.encoder.layers.0.fc2"].reason.startswith("inside")


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_hook_on_a_bypassed_product_is_called(name: str) -> None:
    family = FAMILIES[name]
    patched, stock = family.pair()
    for model in (patched, stock):
        linears = [each for key, each in model.named_modules() if key.endswith(("fc1", ".wi"))]
        assert len(linears) == 4
        linears[-1].register_forward_hook(lambda module, args, output: output * 2)
    assert_close(family.logits(patched), family.logits(stock))


def test_whisper_in_float16_is_clamped() -> None:
    family = FAMILIES["WhisperForConditionalGeneration"]
    patched, stock = (model.eval().half() for model in family.pair())
    for model in (patched, stock):
        model.model.encoder.layers[0].fc2.bias.data.fill_(65000.0)
        model.model.encoder.layers[1].fc2.bias.data.fill_(65000.0)
    states, expected = (
        model.model.encoder(SPECTRUM.half(), output_hidden_states=True).hidden_states
        for model in (patched, stock)
    )
    assert torch.equal(states[1], expected[1])
    assert states[1].max() == 65504.0 - 1000
