"""Causal language models: what patching must keep, with every family, dense and with experts.

What patching is at all (hooks, adapters, pickling, levels) is tested with GPT-2, what only some
families have in ``test_patch_families_decoders.py`` and ``test_patch_families_moe.py``.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from causal_families import DENSE, IDS, SPARSE, Family, loss
from patch_testing import assert_close, assert_same_training, counted, gradients

import fusedops
from fusedops._core import dtypes

FAMILIES = DENSE | SPARSE
of_each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


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
    assert "cross_entropy" not in report.counts
    assert_same_training(patched, stock, loss)


@of_each_family
@pytest.mark.usefixtures("own_products")
def test_every_op_of_the_family_runs(family: Family) -> None:
    patched, _ = family.pair()
    with counted() as calls:
        loss(patched).backward()
    found = {op: count for op, count in calls.items() if not op.startswith("linear_act")}
    backward = {f"{op}_backward": count for op, count in family.ops.items() if op != "moe_sort"}
    assert found == family.ops | backward


@of_each_family
@pytest.mark.usefixtures("own_products")
def test_strict_accepts_the_family(family: Family) -> None:
    report = fusedops.patch(family.model(), strict=True)
    assert not report.failed
    kept = {entry.cls.removeprefix(family.name) for entry in report.kept}
    assert kept <= KEPT
    assert report["loss_function"].op == "cross_entropy"


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
    assert [type(module) for module in patched.modules()] == [
        type(each) for each in stock.modules()
    ]
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
    with counted() as calls:
        tokens = patched.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(tokens, stock.generate(IDS, attention_mask=mask, **options))
    assert calls["moe_mlp"] == 6 * family.ops.get("moe_mlp", 0)


@of_each_family
def test_gradient_checkpointing(family: Family) -> None:
    patched, _ = family.pair()
    whole = gradients(patched, loss)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    with counted() as calls:
        recomputed = gradients(patched, loss)
    for op in ("attention", "moe_mlp"):
        assert calls[op] == 2 * family.ops.get(op, 0)
    assert calls["cross_entropy"] == 1
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


@of_each_family
def test_bfloat16_parameters(family: Family) -> None:
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    truth = family.model().double()
    with counted() as calls:
        found = patched(IDS, labels=IDS)
    eager, expected = stock(IDS, labels=IDS), truth(IDS, labels=IDS)
    assert set(family.ops) <= set(calls)
    assert found.loss.dtype == eager.loss.dtype == torch.float32
    for name in ("logits", "loss"):
        budget = dtypes.error_budget(eager[name], expected[name].double(), torch.bfloat16, depth=64)
        assert ((found[name].double() - expected[name]).abs() <= budget).all(), name


@of_each_family
def test_pickles(family: Family) -> None:
    patched, _ = family.pair()
    twin = pickle.loads(pickle.dumps(patched))
    assert [type(module) for module in twin.modules()] == [type(each) for each in patched.modules()]
    assert torch.equal(loss(twin), loss(patched))


@pytest.mark.parametrize(("name", "options"), [("Gemma2", "eager"), ("Mixtral", None)])
@pytest.mark.usefixtures("own_products")
def test_compiles_into_one_graph_with_every_op(name: str, options: str | None) -> None:
    family = FAMILIES[name]
    patched, stock = family.pair(**({"attn_implementation": options} if options else {}))
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    loss(compiled)
    with counted() as calls:
        assert_close(loss(compiled), loss(stock))
    assert {op: calls[op] for op in family.ops} == family.ops
