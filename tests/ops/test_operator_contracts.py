"""Calls of ``torch.ops.fusedops.*`` that killed or hung the process: what only data can tell.

A public function checks its arguments; an operator is called past it by compiled and exported code.
The fuzzers (``tests/fuzz``) find such calls; those that were found stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedops._core import extension
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
    ("moe_pack", "slots", {"layout": first(2**63 - 1)}, "layout"),
    ("moe_pack", "slots", {"layout": to([8, 16])}, "layout"),
    ("moe_pack", "slots", {"span": to(-1)}, "span"),
    ("moe_pack", "every_token", {"span": to(3)}, "span"),
    ("moe_unpack", "rows", {"layout": first(0)}, "layout"),
    ("moe_unpack", "rows", {"layout": to([24, 40, 2**40, 2**40 + 16])}, "payload"),
    ("moe_route", "plain", {"top_k": to(0)}, "top_k"),
    ("moe_route", "plain", {"top_k": to(2**31)}, "top_k"),
    ("moe_route", "plain", {"top_k": to(-1)}, "top_k"),
    ("moe_route", "plain", {"num_groups": to(0)}, "num_groups"),
    ("moe_route", "plain", {"num_groups": to(7)}, "num_groups"),
    ("moe_route", "plain", {"topk_groups": to(-2)}, "topk_groups"),
    ("moe_route", "plain", {"topk_groups": to(2)}, "topk_groups"),
    ("moe_mlp", "default", {"gated": to(False)}, "w1"),
    ("moe_mlp", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp_backward", "plain", {"gated": to(True)}, "w1"),
    ("moe_mlp", "default", {"permutation": first(-1)}, "permutation"),
    ("moe_mlp", "default", {"positions": first(10**6)}, "positions"),
    ("moe_mlp", "default", {"offsets": first(-5)}, "offsets"),
    ("cross_entropy_backward", "rows", {"target": first(33)}, "target"),
    ("cross_entropy_backward", "rows", {"target": first(-1)}, "target"),
    ("cross_entropy_backward", "rows", {"target": first(2**62)}, "target"),
    ("linear_cross_entropy", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy", "rows", {"chunk_size": to(-64)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"chunk_size": to(0)}, "chunk_size"),
    ("linear_cross_entropy_backward", "rows", {"target": first(19)}, "target"),
]


def recorded(operator: str, sample_name: str) -> tuple[Any, dict[str, Any]]:
    """Return an operator and the arguments, by name, that a sample calls it with."""
    spec = all_specs()[operator.removesuffix("_backward")]
    samples = spec.samples(torch.device("cpu"), torch.float32)
    (sample,) = [each for each in samples if each.name == sample_name]
    with RecordOps() as heard:
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


def test_a_gate_without_its_up_is_made_again() -> None:
    func, arguments = recorded("linear_glu_backward", "default")
    want = func(*arguments.values())
    for name in ("gate", "up"):
        got = func(*{**arguments, name: arguments[name].new_empty(0)}.values())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("operator", "buffer", "shape"),
    [
        ("moe_mlp", "into_w1", (3, 8, 9)),
        ("moe_mlp", "into_b2", (3, 5)),
        ("grouped_mm", "into_weight", (3, 8, 9)),
        ("grouped_mm", "into_bias", (2, 10)),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(
    operator: str, buffer: str, shape: tuple[int, ...]
) -> None:
    """Neither one of another shape nor one that is spread over memory that is not its own."""
    x, ends = torch.randn(4, 8), torch.tensor([1, 2, 4], dtype=torch.int32)
    w1, w2 = torch.randn(3, 8, 10), torch.randn(3, 5, 6)
    if operator == "grouped_mm":
        call = [torch.randn(4, 10), x, w1, ends, None, x.new_empty(0), "identity", False, [True]]
        places, sizes = ["into_weight", "into_bias"], [w1.shape, (3, 10)]
    else:
        order = torch.arange(4, dtype=torch.int32)
        plan = torch.ones(4, 1), order, order.view(4, 1), ends
        kept = x.new_empty(0, 10)
        flags = ["silu", True, False, False, [True, True]]
        call = [torch.randn(4, 6), x, *plan, w1, w2, None, None, kept, *flags]
        places, sizes = [f"into_{each}" for each in ("w1", "w2", "b1", "b2")], [w1.shape, w2.shape]
        sizes += [(3, 10), (3, 6)]
    func = getattr(torch.ops.fusedops, f"{operator}_add_gradients")
    right = {place: torch.zeros(size) for place, size in zip(places, sizes, strict=True)}
    func(*right.values(), *call)
    assert all(each.any() for each in right.values())
    with pytest.raises(ValueError, match=buffer):
        func(*{**right, buffer: torch.zeros(shape)}.values(), *call)
    with pytest.raises(TypeError, match=buffer):
        func(*{**right, buffer: right[buffer].double()}.values(), *call)
    spread = torch.zeros(right[buffer].shape[:-1] + (1,)).expand_as(right[buffer])
    with pytest.raises(ValueError, match="must be dense"):
        func(*{**right, buffer: spread}.values(), *call)
