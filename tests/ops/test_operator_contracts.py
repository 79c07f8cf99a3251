"""Calls of ``torch.ops.fusedops.*`` that killed or hung the process: what only data can tell.

A public function checks its arguments; an operator is called past it by compiled and exported code.
The fuzzers (``tests/fuzz``) find such calls; those that were found stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits

from fusedops._core import extension
from fusedops.ops._weight_gradients import summed
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

pytestmark = pytest.mark.skipif(
    extension.cpu_library() is not None, reason="the checks are those of the compiled kernels"
)

Change = Callable[[Any], Any]


def to(value: Any) -> Change:
    return lambda _: value


def first(value: float) -> Change:
    """Return what sets the first element of a tensor, or the first of a list."""

    def change(given: Any) -> Any:
        new = list(given) if isinstance(given, (list, tuple)) else given.clone()
        (new if isinstance(new, list) else new.view(-1))[0] = value
        return new

    return change


# operator, the spec's sample that calls it, argument -> change, words of the error
CASES = [
    ("moe_pack", "slots", {"layout": first(-8)}, "layout"),
    ("moe_pack", "slots", {"span": to(-1)}, "span"),
    ("moe_pack", "every_token", {"span": to(3)}, "span"),
    ("moe_unpack", "rows", {"layout": first(0)}, "layout"),
    ("moe_unpack", "rows", {"layout": to([24, 40, 2**40, 2**40 + 16])}, "payload"),
    ("moe_route", "plain", {"top_k": to(0)}, "top_k"),
    ("moe_route", "plain", {"num_groups": to(0)}, "num_groups"),
    ("moe_route", "plain", {"topk_groups": to(-2)}, "topk_groups"),
    ("moe_mlp", "default", {"gated": to(False)}, "w1"),
    ("moe_mlp", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp_backward", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp", "default", {"permutation": first(-1)}, "permutation"),
    ("moe_mlp", "default", {"positions": first(10**6)}, "positions"),
    ("moe_mlp", "default", {"offsets": first(-5)}, "offsets"),
    ("cross_entropy_backward", "rows", {"target": first(33)}, "target"),
    ("cross_entropy_backward", "rows", {"target": first(-1)}, "target"),
    ("linear_cross_entropy", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"target": first(19)}, "target"),
]


def recorded(operator: str, sample_name: str) -> tuple[Any, dict[str, Any]]:
    """Return an operator and the arguments, by name, that a sample calls it with."""
    spec = all_specs()[operator.removesuffix("_backward").removesuffix("_add_gradients")]
    dtype = torch.bfloat16 if operator.endswith("_add_gradients") else torch.float32
    samples = spec.samples(torch.device("cpu"), dtype)
    (sample,) = [each for each in samples if each.name == sample_name]
    with RecordOps() as heard, summed(operator.endswith("_add_gradients")):
        run(spec.op, fresh(sample))
    func, args = next(call for call in heard.calls if call[0]._opname == operator)
    names = [argument.name for argument in func._schema.arguments]
    plain = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return func, dict(zip(names, plain, strict=True))


@pytest.mark.parametrize(
    ("operator", "sample_name", "changes", "words"),
    CASES,
    ids=[f"{case[0]}-{'-'.join(case[2])}-{place}" for place, case in enumerate(CASES)],
)
def test_wrong_data_is_refused(
    operator: str, sample_name: str, changes: dict[str, Change], words: str
) -> None:
    func, arguments = recorded(operator, sample_name)
    func(*arguments.values())
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=words):
        func(*arguments.values())


def test_choices_handed_in_are_looked_through_before_a_drop_counts_them() -> None:
    func, arguments = recorded("moe_route", "plain")
    tokens, top_k = arguments["logits"].shape[0], arguments["top_k"]
    arguments["capacity"] = 1
    for wrong in (-1, arguments["logits"].shape[1], 2**31 - 1):
        arguments["chosen"] = torch.full((tokens, top_k), wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="chosen"):
            func(*arguments.values())


@pytest.mark.parametrize(
    ("operator", "kept"),
    [("linear_glu", "gate"), ("linear_glu", "up"), ("linear_act", "preactivation")],
)
def test_preactivations_that_were_not_kept_are_made_again(operator: str, kept: str) -> None:
    func, arguments = recorded(f"{operator}_backward", "gelu")
    want = func(*arguments.values())
    arguments[kept] = arguments[kept].new_empty(0)
    assert_same_bits(func(*arguments.values()), want)


@pytest.mark.parametrize("change", ["shape", "dtype", "spread"])
@pytest.mark.parametrize(
    ("operator", "buffer"),
    [
        ("moe_mlp_add_gradients", "into_w1"),
        ("moe_mlp_add_gradients", "into_b2"),
        ("grouped_mm_add_gradients", "into_weight"),
        ("grouped_mm_add_gradients", "into_bias"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(operator: str, buffer: str, change: str) -> None:
    """Neither one of another shape nor one that is spread over memory that is not its own."""
    func, arguments = recorded(operator, "biases" if operator.startswith("moe") else "bias")
    func(*arguments.values())
    right = arguments[buffer]
    wrong = {
        "shape": right[..., 1:].contiguous(),
        "dtype": right.double(),
        "spread": right[..., :1].expand_as(right),
    }
    arguments[buffer] = wrong[change]
    with pytest.raises((TypeError, ValueError), match=f"{buffer}|must be dense"):
        func(*arguments.values())
