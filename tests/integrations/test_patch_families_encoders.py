"""Encoder and encoder-decoder families: a patched model trains as the stock one, as configured.

What patching is at all (hooks, adapters, pickling, levels) is tested with GPT-2 and BERT. Here is
what every family must do, and what only some have.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from patch_testing import assert_close, assert_same_training, counted, gradients
from torch import nn

import fusedops

pytest.importorskip("transformers")

import transformers

IDS = torch.arange(2, 2 * 12 + 2).mul(7).remainder(97).view(2, 12)
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
BERT_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def masked(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a masked language model."""
    return {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


@dataclass(frozen=True)
class Family:
    """A model in a size that runs in milliseconds.

    Attributes:
        name: of the model's class.
        config: of its configuration's class.
        options: of the configuration.
        ops: how often each op runs in a step of training without checkpointing.
        fused: modules of which a fused op does the work at level O2, with the ops.
        inputs: the arguments of the model, labels included.
        valid: takes from the logits those that are not of padding.
        dropout: the options that are probabilities of dropout.
    """

    name: str
    config: str
    options: dict[str, Any]
    ops: dict[str, int]
    fused: dict[str, str]
    inputs: Callable[[nn.Module], dict[str, torch.Tensor]] = masked
    valid: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda logits: logits[MASK > 0])
    dropout: tuple[str, ...] = DROPOUT

    def model(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.options | options))
        model = getattr(transformers, self.name)(config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name.lower():  # ones and zeros hide which norm a weight was for
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        stock = self.model(**options)
        patched = copy.deepcopy(stock)
        fusedops.patch(patched)
        return patched, stock

    def loss(self, model: nn.Module) -> torch.Tensor:
        return model(**self.inputs(model)).loss

    def logits(self, model: nn.Module) -> torch.Tensor:
        return self.valid(model(**self.inputs(model)).logits)


def bert_like(prefix: str, *, base: str, head: str, norms: int = 2) -> Family:
    """Return a family whose modules are BERT's; ``head`` is the layer before the projection."""
    layer = f"{base}.encoder.layer.1"
    return Family(
        f"{prefix}ForMaskedLM",
        f"{prefix}Config",
        BERT_SIZES | {"embedding_size": 32} if prefix == "Electra" else BERT_SIZES,
        {"attention": 2, "add_layer_norm": 4, "layer_norm": norms},
        {
            f"{layer}.attention.self": "attention",
            f"{layer}.attention.output": "add_layer_norm",
            f"{layer}.intermediate": "linear_act",
            f"{layer}.output": "add_layer_norm",
            head: "linear_act",
        },
    )


DISTILBERT = Family(
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    {
        "vocab_size": 97,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 40,
        "initializer_range": 0.2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    {"attention": 2, "add_layer_norm": 4, "layer_norm": 2, "mlp": 2, "gelu": 1},
    {
        "distilbert.transformer.layer.0": "add_layer_norm",
        "distilbert.transformer.layer.0.attention": "attention",
        "distilbert.transformer.layer.1.ffn": "mlp",
    },
    dropout=("dropout", "attention_dropout"),
)
FAMILIES = {
    each.name: each
    for each in (
        bert_like("Bert", base="bert", head="cls.predictions.transform"),
        bert_like("Roberta", base="roberta", head="lm_head"),
        bert_like("XLMRoberta", base="roberta", head="lm_head"),
        bert_like("Camembert", base="roberta", head="lm_head"),
        bert_like("Electra", base="electra", head="generator_predictions"),
        DISTILBERT,
    )
}
of_each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@of_each_family
def test_training_matches_stock(family: Family, autocast: bool) -> None:
    patched, stock = family.pair()
    assert_same_training(patched, stock, family.loss, autocast=autocast)


@of_each_family
def test_every_op_of_the_family_runs(family: Family) -> None:
    patched, _ = family.pair()
    with counted() as calls:
        family.loss(patched).backward()
    found = {op: count for op, count in calls.items() if not op.startswith("linear_act")}
    assert found == family.ops | {f"{op}_backward": count for op, count in family.ops.items()}


@of_each_family
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
    assert [type(each) for each in patched.modules()] == [type(each) for each in stock.modules()]
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
            if any(True for _ in module.parameters(recurse=False)):
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
    assert [type(each) for each in twin.modules()] == [type(each) for each in patched.modules()]
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
