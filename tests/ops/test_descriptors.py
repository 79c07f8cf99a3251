"""Tensor descriptors and pointers give the same results; descriptors are used where they may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_within_budget

import fusedops
from fusedops.ops import RoutingPlan
from fusedops.specs import Sample, all_specs
from fusedops.specs.comparison import fresh, run

_descriptors = pytest.importorskip("fusedops.kernels._descriptors")
pytestmark = pytest.mark.interpreter
HALF = torch.bfloat16


def random(*shape: int, across: bool = False) -> torch.Tensor:
    """Return a leaf; its last two dims lie the other way round in memory if ``across``."""
    if across:
        return random(*shape[:-2], shape[-1], shape[-2]).detach().mT.requires_grad_()
    return (torch.randn(shape) / 4).to(HALF).requires_grad_()


def linear_act(depth: int, across: bool) -> Sample:
    weight = random(264, depth, across=across)
    return Sample("x", (random(70, depth), weight, random(264)), {"activation": "gelu"})


def linear_glu(depth: int, across: bool) -> Sample:
    weights = (random(136, depth, across=across) for _ in range(2))
    return Sample("x", (random(70, depth), *weights), {"activation": "silu"})


def grouped_mm(depth: int, across: bool) -> Sample:
    # Weights [groups, K, N]: along the sum is transposed. Rows 210 and 211 belong to nobody.
    weight = random(3, depth, 40, across=not across)
    offsets = torch.tensor([90, 95, 210], dtype=torch.int32)
    return Sample("x", (random(212, depth), weight, offsets, random(3, 40)))


def moe_mlp(depth: int, across: bool, **options: Any) -> Sample:
    experts = torch.arange(140)[:, None] % 2
    probs = torch.rand(140, 1).requires_grad_()
    plan = RoutingPlan.from_choices(experts, probs, 2)
    # 40 of the hidden layer: the gates' part of a tile ends inside of the factors'.
    w1, w2 = random(2, depth, 80, across=not across), random(2, 40, depth, across=not across)
    return Sample("x", (random(140, depth), plan, w1, w2), options)


MATRICES: dict[str, Callable[[int, bool], Sample]] = {
    "linear_act": linear_act,
    "linear_glu": linear_glu,
    "grouped_mm": grouped_mm,
    "moe_mlp": moe_mlp,
    "moe_mlp pairs": functools.partial(moe_mlp, interleaved=True),
}


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the shapes of the tensors that descriptors are made of."""
    found: list[tuple[int, ...]] = []
    original = _descriptors.describe

    def describe(tensor: torch.Tensor, block: Any) -> Any:
        found.append(tuple(tensor.shape))
        return original(tensor, block)

    monkeypatch.setattr(_descriptors, "describe", describe)
    return found


def assert_matches_float64(name: str, sample: Sample) -> None:
    spec = all_specs()[name]
    with fusedops.use_backend("triton"):
        actual = run(spec.op, fresh(sample))
    assert_within_budget(actual, spec, sample)


@pytest.mark.ci
@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
@pytest.mark.parametrize("name", list(MATRICES))
def test_matrix_products_by_descriptors_and_by_pointers(
    name: str,
    across: bool,
    available: bool,
    described: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_descriptors, "available", lambda device: available)
    assert_matches_float64(name.split()[0], MATRICES[name](72, across))
    assert bool(described) == available


@pytest.mark.parametrize("name", ["linear_act", "linear_glu", "grouped_mm"])
def test_strides_that_16_bytes_do_not_divide_are_read_by_pointers(
    name: str, described: list[tuple[int, ...]]
) -> None:
    assert_matches_float64(name, MATRICES[name](69, False))
    assert not described


def test_nan_in_the_weights_of_one_group_stays_there() -> None:
    # 72 is no multiple of a block along the sum: what lies behind it is another group's.
    x, weight, offsets, bias = (arg.detach() for arg in grouped_mm(72, False).args)
    weight[1] = torch.nan
    with fusedops.use_backend("triton"):
        y = fusedops.grouped_mm(x, weight, offsets, bias)
    assert y[:90].isfinite().all() and y[95:].isfinite().all()
    assert y[90:95].isnan().all()


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_descriptors_and_by_pointers(
    causal: bool,
    available: bool,
    described: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Heads inside, as projections give them; 24 is no power of two, 37 rows no multiple of a block.
    qkv = (random(2, 37, heads, 24).detach().transpose(1, 2) for heads in (4, 2, 2))
    leaves = tuple(each.requires_grad_() for each in qkv)
    monkeypatch.setattr(_descriptors, "available", lambda device: available)
    assert_matches_float64(
        "attention", Sample("x", leaves, {"is_causal": causal, "enable_gqa": True})
    )
    # Keys and values twice, queries and the incoming gradient once.
    assert len(described) == (6 if available else 0)


@pytest.mark.parametrize(
    ("heads", "boolean"), [(4, False), (1, False), (1, True)], ids=["whole", "shared", "boolean"]
)
def test_masks_with_a_row_per_query_by_descriptors(
    heads: int, boolean: bool, described: list[tuple[int, ...]]
) -> None:
    # 32 keys of 37 queries: no block of either fills both, and rows of 32 bytes can be described.
    qkv = (random(2, 4, 37, 24), random(2, 2, 32, 24), random(2, 2, 32, 24))
    mask = torch.randn(2, heads, 37, 32).to(HALF)
    mask = mask > 0 if boolean else mask.requires_grad_()
    options = {"attn_mask": mask, "enable_gqa": True, "softcap": 3.0}
    assert_matches_float64("attention", Sample("x", qkv, options))
    # Forward and gradient of the queries; a batch that is broadcast is read as one.
    assert described.count((2, heads, 37, 32)) == 2


@pytest.mark.parametrize("kind", ["odd strides", "row of keys", "row of queries"])
def test_masks_that_no_descriptor_reads(kind: str, described: list[tuple[int, ...]]) -> None:
    mask, row = torch.randn(1, 1, 37, 37).to(HALF), torch.randn(37).to(HALF)
    if "row" in kind:
        mask = (row if kind == "row of keys" else row[:, None]).expand(1, 1, 37, 37)
    qkv = tuple(random(2, 2, 37, 24) for _ in range(3))
    assert_matches_float64("attention", Sample("x", qkv, {"attn_mask": mask}))
    assert not any(shape[2:] == (37, 37) for shape in described)


def test_what_a_descriptor_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_descriptors, "available", lambda device: True)
    dense = torch.zeros(8, 16, dtype=HALF)
    assert _descriptors.describable(dense)
    assert not _descriptors.describable(dense, dense.t()), "neighbours apart"
    assert not _descriptors.describable(dense[:, 1:]), "base"
    assert not _descriptors.describable(torch.zeros(8, 12, dtype=HALF)), "stride"
    assert not _descriptors.describable(dense[:0]), "empty"
    assert not _descriptors.describable(dense[:1].expand(8, 16)), "a stride of 0"
    assert not _descriptors.describable(dense.float()), "float32"
    monkeypatch.setattr(_descriptors, "available", lambda device: False)
    assert not _descriptors.describable(dense)
