"""Every placement that a DTensor rule lists: the parts of a call give the complete call's results.

No ranks: the operators run on the shards of each rank in turn, and the results are put together as
the rule says. ``test_sharding.py`` runs DTensors on processes.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops._core.sharding import PARTIAL, REPLICATE, RULES, Placement
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

NAMES = [name for name in all_specs() if getattr(torch.ops.fusedops, name).default in RULES]

# How many placements the rules of an op and of its backward list, for tensors of all its samples:
# without one of them, arguments that lie so are gathered.
NUM_PLACEMENTS = {"baddbmm": 47, "bias_gelu": 12, "grouped_mm": 15, "linear_glu": 12}
NUM_PLACEMENTS |= {"moe_mlp": 10, "moe_permute": 6, "moe_route": 8, "moe_unpermute": 13}
NUM_PLACEMENTS |= {"moe_router_loss": 16}
# Calls of each operator on which a placement is tried.
_CALLS = 3
# The sizes of samples are small and odd: each has a factor among these.
_RANKS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


def _specs(args: Sequence[Any], ranks: int) -> list[Any]:
    """Return what a rule reads of DTensors on so many ranks."""
    mesh = SimpleNamespace(size=lambda: ranks)
    return [
        SimpleNamespace(tensor_meta=arg, ndim=arg.ndim, shape=arg.shape, mesh=mesh)
        if isinstance(arg, Tensor)
        else arg
        for arg in args
    ]


def _sizes(args: Sequence[Any], placements: Sequence[Placement]) -> list[int]:
    pairs = zip(args, placements, strict=True)
    return [arg.shape[placement] for arg, placement in pairs if isinstance(placement, int)]


def _shards(arg: Any, placement: Placement, ranks: int) -> list[Any]:
    if not isinstance(arg, Tensor) or placement in (None, REPLICATE):
        return [arg] * ranks
    if placement == PARTIAL:
        parts = [torch.randn_like(arg) for _ in range(ranks - 1)]
        return [*parts, arg - sum(parts)]
    return list(arg.chunk(ranks, int(placement)))


def _combined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    if placement == REPLICATE:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0])
        return parts[0]
    return sum(parts[1:], parts[0]) if placement == PARTIAL else torch.cat(parts, int(placement))  # type: ignore[arg-type]


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def check_call(
    op: Any,
    args: Sequence[Any],
    outputs: Sequence[Placement],
    inputs: Sequence[Placement],
    ranks: int,
) -> None:
    """Run the shards of a call and compare their results with the complete ones."""
    complete = _results(op(*args))
    shards = zip(*(_shards(*pair, ranks) for pair in zip(args, inputs, strict=True)), strict=True)
    parts = [_results(op(*rank_args)) for rank_args in shards]
    for index, (expected, placement) in enumerate(zip(complete, outputs, strict=True)):
        if expected is None or placement is None:
            continue
        actual = _combined([part[index] for part in parts], placement)
        where = f"{op}: result {index} of {outputs} from {inputs} on {ranks} ranks"
        torch.testing.assert_close(
            actual, expected, equal_nan=True, msg=functools.partial("{}\n{}".format, where)
        )


@pytest.mark.parametrize("name", NAMES)
def test_shards_give_the_results_of_the_complete_call(name: str) -> None:
    spec = all_specs()[name]
    calls = []
    for sample in spec.samples(torch.device("cpu"), torch.float64):
        if not sample.random:
            with RecordOps() as recorded:
                run(spec.op, fresh(sample))
            calls += [call for call in recorded.calls if call[0] in RULES]
    tried: Counter[Any] = Counter()
    for (op, values), ranks in itertools.product(calls, _RANKS):
        args = [value.detach() if isinstance(value, Tensor) else value for value in values]
        for outputs, inputs in RULES[op](*_specs(args, ranks)):
            sizes = _sizes(args, inputs)
            if any(size < 2 for size in sizes):
                continue  # nothing to divide
            rule = (op, tuple(outputs), tuple(inputs))
            tried[rule] += 0
            if tried[rule] < _CALLS and all(size % ranks == 0 for size in sizes):
                check_call(op, args, outputs, inputs, ranks)
                tried[rule] += 1
    missing = [rule for rule, count in tried.items() if not count]
    assert tried and not missing, f"no sample has sizes that can be divided so: {missing}"
    assert len(tried) >= NUM_PLACEMENTS.get(name, 1), f"{len(tried)} placements"
