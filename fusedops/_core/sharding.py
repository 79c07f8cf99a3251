"""DTensor sharding rules: which placements an op can run on without communication.

A rule is for one mesh dimension; DTensor combines it over all dimensions of the mesh.
Registration waits until somebody imports ``torch.distributed.tensor`` (a DTensor cannot exist
before), because that import costs about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusedops._core import imports

# rule(*schema_args) -> [(output placements, input placements)], one placement per tensor output
# and one per argument (None for what is not a tensor). Written with the words of this module:
# an int shards that dim, "replicate", or "partial" (a sum over ranks).
Placement = int | str | None
Sharding = tuple[list[Placement], list[Placement]]
Rule = Callable[..., Sequence[tuple[Sequence[Placement], Sequence[Placement]]]]

REPLICATE = "replicate"
PARTIAL = "partial"

# Only in ``row_shardings``: the dim that is sharded, and a sum over it.
ROW = "row"
ROW_SUM = "row sum"

_WAITING: list[tuple[Any, Rule]] = []


def where(present: Iterable[Any], placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements, ``None`` for a result not asked for or an argument that is absent.

    A flag that is ``False`` says so, and a tensor that is ``None``.
    """
    return [
        None if value is None or value is False else placement
        for value, placement in zip(present, placements, strict=True)
    ]


def row_shardings(
    dims: Iterable[Placement], outputs: Sequence[Placement], inputs: Sequence[Placement]
) -> list[Sharding]:
    """Return one sharding per dim of ``dims``, written for the placements ``ROW`` and ``ROW_SUM``.

    Where the rows are replicated, so is the sum.
    """

    def placed(placements: Sequence[Placement], dim: Placement) -> list[Placement]:
        row_sum = REPLICATE if dim == REPLICATE else PARTIAL
        meaning: dict[Placement, Placement] = {ROW: dim, ROW_SUM: row_sum}
        return [meaning.get(word, word) for word in placements]

    return [(placed(outputs, dim), placed(inputs, dim)) for dim in dims]


def register(op: Any, rule: Rule) -> None:
    """Register ``rule`` for the overload ``op`` with DTensor, now or when DTensor is imported."""
    _WAITING.append((op, rule))
    imports.after("torch.distributed.tensor", flush)


def flush() -> None:
    """Register all waiting rules; imports ``torch.distributed.tensor``."""
    if not _WAITING:
        return
    from torch.distributed.tensor.experimental import register_sharding

    while _WAITING:
        op, rule = _WAITING.pop()
        register_sharding(op)(_translated(rule))


def _translated(rule: Rule) -> Callable[..., Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(word: Placement) -> Any:
        if word is None:
            return None
        if word == REPLICATE:
            return Replicate()
        return Partial() if word == PARTIAL else Shard(int(word))

    def strategy(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        return [
            ([placement(word) for word in outputs], [placement(word) for word in inputs])
            for outputs, inputs in rule(*args)
        ]

    return strategy
