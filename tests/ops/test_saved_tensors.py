"""What each op keeps for its backward: which arguments, and how many bytes beside them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fusedops.specs import _routing, all_specs, tensors_in

PLAN = _routing.plan(13, 4, 6, device=torch.device("cpu"), dtype=torch.float32)
FIXED = PLAN.with_probs(PLAN.probs.detach())
INDICES = "plan.offsets plan.positions"
EXPERTS = f"input {INDICES} plan.permutation plan.probs w1 w2"


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


NORM = [(16,), new(16)]
ADDED = [new(6, 16), new(6, 16), *NORM]
LINEAR = [new(6, 8), new(10, 8)]
GROUPS = [new(6, 8), new(2, 8, 10), torch.tensor([4, 6], dtype=torch.int32)]
MLP = [new(9, 16), new(32, 16), new(32), new(12, 32), new(12)]
MOE = [new(13, 8), PLAN, new(6, 8, 10), new(6, 5, 7)]
ROTARY = [new(2, 3, 6, 8), new(2, 1, 6, 8), *torch.randn(2, 1, 6, 8)]
ROWS = new(52, 64)
LCE = [new(300, 4), new(700, 4), torch.arange(300)]
SUM, DROPS, SILU = {"reduction": "sum"}, {"dropout_p": 0.1}, {"activation": "silu"}

# Label, which begins with the op's name -> arguments, options, names of arguments and outputs that
# are kept, and the bytes of each other tensor.
KEPT: dict[str, tuple[list[Any], dict[str, Any], str, list[int]]] = {
    "gelu": ([new(8, 64)], {}, "input", []),
    "bias_gelu": ([new(8, 64), new(64)], {}, "bias input", []),
    "swiglu": ([new(8, 64), new(8, 64)], {}, "gate up", []),
    "geglu": ([new(8, 64), new(8, 64)], {}, "gate up", []),
    "rotary_embedding": (ROTARY, {}, "cos sin", []),
    # Mean and reciprocal deviation of a row; a seed.
    "layer_norm": ([new(6, 16), *NORM], {}, "input weight", [24, 24]),
    "add_layer_norm": (ADDED, {}, "output_1 weight", [24, 24]),
    "add_layer_norm, drops": (
        ADDED,
        DROPS,
        "output_1 weight",
        [16, 24, 24],
    ),
    "add_rms_norm, drops": (ADDED, DROPS, "output_1 weight", [16, 24]),
    "linear_act": (LINEAR, {"activation": "gelu"}, "input weight", [240]),
    "linear_act, identity": (LINEAR, {"activation": "identity"}, "input weight", []),
    "linear_glu": ([*LINEAR, new(10, 8)], {}, "gate_weight input up_weight", [240, 240]),
    "mlp": (MLP, {}, "b1 b2 input w1 w2", [9 * 32 * 4]),
    "mlp, recompute": (MLP, {"recompute": True}, "b1 b2 input w1 w2", []),
    "baddbmm": ([new(2, 3, 5), new(2, 3, 4), new(2, 4, 5)], {}, "batch1 batch2", []),
    "grouped_mm": (GROUPS, SILU, "input offsets weight", [240]),
    "grouped_mm, identity": (GROUPS, {}, "input offsets weight", []),
    "moe_mlp": (MOE, {}, EXPERTS, []),
    "moe_mlp, kept": (MOE, {"recompute": False}, EXPERTS, [13 * 4 * 10 * 4]),
    "moe_permute": ([new(13, 64), PLAN], {}, INDICES, []),
    # The rows are for the gradient of the probabilities alone.
    "moe_unpermute": ([ROWS, PLAN], {}, f"{INDICES} input plan.probs", []),
    "moe_unpermute, fixed": ([ROWS, FIXED], {}, f"{INDICES} plan.probs", []),
    "moe_unpermute, unweighted": ([ROWS, PLAN], {"weighted": False}, INDICES, []),
    # Two numbers a row, and nothing of the size of the logits.
    "cross_entropy": (
        [new(5, 33), torch.arange(5)],
        {"reduction": "sum"},
        "logits target",
        [4, 40],
    ),
    "linear_cross_entropy": (
        LCE,
        {"chunk_size": 64, "recompute": True},
        "hidden target weight",
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
    names = {output.data_ptr(): f"output_{i}" for i, output in enumerate(outputs)}
    for path, value in pytree.tree_flatten_with_path(bound)[0]:
        if isinstance(value, torch.Tensor):
            names[value.data_ptr()] = "".join(map(str, path))[2:].replace("']", "")
    full = {each.data_ptr(): each for each in found if each.numel()}
    others = [tensor.nbytes for address, tensor in full.items() if address not in names]
    return sorted({names[address] for address in full if address in names}), sorted(others)


@pytest.mark.parametrize("label", KEPT)
def test_what_is_kept_for_the_backward(label: str) -> None:
    args, options, names, sizes = KEPT[label]
    assert kept(label.split(",")[0], args, options) == (sorted(names.split()), sizes)


@pytest.mark.parametrize("label", KEPT)
def test_without_gradients_nothing_is_kept(label: str) -> None:
    args, options, *_ = KEPT[label]
    with torch.no_grad():
        assert kept(label.split(",")[0], args, options) == ([], [])
