"""What each op keeps for its backward: which arguments, and how many bytes beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fusedops.specs import _routing, all_specs, tensors_in

PLAN = _routing.plan(13, 4, 6, device=torch.device("cpu"), dtype=torch.float32)
FIXED = PLAN.with_probs(PLAN.probs.detach())
INDICES = ["plan.offsets", "plan.positions"]
EXPERTS = ["input", *INDICES, "plan.permutation", "plan.probs", "w1", "w2"]
ENDS = torch.tensor([4, 6], dtype=torch.int32)


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def rows(count: int) -> list[torch.Tensor]:
    return [new(6, 8), *(new(10, 8) for _ in range(count))]


def norm(*leading: torch.Tensor) -> list[Any]:
    return [new(6, 16), *leading, (16,), new(16)]


def mlp() -> list[torch.Tensor]:
    return [new(9, 16), new(32, 16), new(32), new(12, 32), new(12)]


def experts() -> list[Any]:
    return [new(13, 8), PLAN, new(6, 8, 10), new(6, 5, 7)]


def classes(*shape: int) -> list[torch.Tensor]:
    return [new(*shape), torch.arange(shape[0])]


# Label, which begins with the op's name -> what makes its arguments, its options, the names of
# arguments and outputs that are kept, and the bytes of each other tensor.
KEPT: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], list[str], list[int]]] = {
    "gelu": (lambda: [new(8, 64)], {}, ["input"], []),
    "bias_gelu": (lambda: [new(8, 64), new(64)], {}, ["bias", "input"], []),
    "swiglu": (lambda: [new(8, 64), new(8, 64)], {}, ["gate", "up"], []),
    "geglu": (lambda: [new(8, 64), new(8, 64)], {}, ["gate", "up"], []),
    "rotary_embedding": (
        lambda: [new(2, 3, 6, 8), new(2, 1, 6, 8), *torch.randn(2, 1, 6, 8)],
        {},
        ["cos", "sin"],
        [],
    ),
    # Mean and reciprocal deviation of a row.
    "layer_norm": (lambda: norm(), {}, ["input", "weight"], [24, 24]),
    "add_layer_norm": (lambda: norm(new(6, 16)), {}, ["output 1", "weight"], [24, 24]),
    "add_layer_norm, dropout": (
        lambda: norm(new(6, 16)),
        {"dropout_p": 0.1},
        ["output 1", "weight"],
        [16, 24, 24],
    ),
    "add_rms_norm, dropout": (
        lambda: norm(new(6, 16)),
        {"dropout_p": 0.1},
        ["output 1", "weight"],
        [16, 24],
    ),
    "linear_act": (lambda: rows(1), {"activation": "gelu"}, ["input", "weight"], [240]),
    "linear_act, identity": (lambda: rows(1), {"activation": "identity"}, ["input", "weight"], []),
    "linear_glu": (lambda: rows(2), {}, ["gate_weight", "input", "up_weight"], [240, 240]),
    "mlp": (mlp, {}, ["b1", "b2", "input", "w1", "w2"], [9 * 32 * 4]),
    "mlp, recompute": (mlp, {"recompute": True}, ["b1", "b2", "input", "w1", "w2"], []),
    "baddbmm": (lambda: [new(2, 3, 5), new(2, 3, 4), new(2, 4, 5)], {}, ["batch1", "batch2"], []),
    "grouped_mm": (
        lambda: [new(6, 8), new(2, 8, 10), ENDS],
        {"activation": "silu"},
        ["input", "offsets", "weight"],
        [240],
    ),
    "grouped_mm, identity": (
        lambda: [new(6, 8), new(2, 8, 10), ENDS],
        {},
        ["input", "offsets", "weight"],
        [],
    ),
    "moe_mlp": (experts, {}, EXPERTS, []),
    "moe_mlp, kept": (experts, {"recompute": False}, EXPERTS, [13 * 4 * 10 * 4]),
    "moe_permute": (lambda: [new(13, 64), PLAN], {}, INDICES, []),
    "moe_unpermute": (lambda: [new(52, 64), PLAN], {}, [*INDICES, "input", "plan.probs"], []),
    # The rows are for the gradient of the probabilities alone.
    "moe_unpermute, fixed": (lambda: [new(52, 64), FIXED], {}, [*INDICES, "plan.probs"], []),
    "moe_unpermute, unweighted": (lambda: [new(52, 64), PLAN], {"weighted": False}, INDICES, []),
    # Two numbers a row.
    "cross_entropy": (lambda: classes(5, 33), {"reduction": "sum"}, ["logits", "target"], [4, 40]),
    # Nothing of the size of the logits.
    "linear_cross_entropy": (
        lambda: [new(300, 4), new(700, 4), torch.arange(300)],
        {"chunk_size": 64, "recompute": True},
        ["hidden", "target", "weight"],
        [4, 2400],
    ),
}


def kept(name: str, args: list[Any], options: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the names of what a call keeps, and the bytes of what has none."""
    op = all_specs()[name].op
    bound = inspect.signature(op).bind(*args, **options).arguments
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        outputs = tensors_in(op(*args, **options))
    names = {output.data_ptr(): f"output {i}" for i, output in enumerate(outputs)}
    for path, value in pytree.tree_flatten_with_path(bound)[0]:
        if isinstance(value, torch.Tensor):
            names[value.data_ptr()] = "".join(map(str, path))[2:].replace("']", "")
    full = {each.data_ptr(): each for each in found if each.numel()}
    others = [tensor.nbytes for address, tensor in full.items() if address not in names]
    return sorted({names[address] for address in full if address in names}), sorted(others)


@pytest.mark.parametrize("label", KEPT)
def test_what_is_kept_for_the_backward(label: str) -> None:
    make, options, names, sizes = KEPT[label]
    found = kept(label.split(",")[0], make(), options)
    assert found == (sorted(names), sizes)


@pytest.mark.parametrize("label", KEPT)
def test_without_gradients_nothing_is_kept(label: str) -> None:
    make, options, *_ = KEPT[label]
    with torch.no_grad():
        assert kept(label.split(",")[0], make(), options) == ([], [])
