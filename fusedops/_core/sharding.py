"""DTensor sharding rules: which placements an op can run on without communication.

A rule is for one mesh dimension; DTensor combines it over all dimensions of the mesh.
Registration waits until somebody imports ``torch.distributed.tensor`` (a DTensor cannot exist
before), because that import costs about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusedops._core import imports

# rule(arguments that it names) -> [(output placements, input placements)], one placement per output
# and one per argument of the schema that is a tensor, whether or not it is given or asked for.
# Written with the words of this module: an int shards that dim, "replicate", or "partial" (a sum
# over ranks); None for a gradient that is not computed.
Placement = int | str | None
Sharding = tuple[Sequence[Placement], Sequence[Placement]]
Rule = Callable[..., Sequence[Sharding]]
# The same with one placement per argument, None for one that is absent or no tensor.
CompleteRule = Callable[..., Sequence[Sharding]]

REPLICATE = "replicate"
PARTIAL = "partial"

# By overload. ``_WAITING`` has those that DTensor does not know yet.
RULES: dict[Any, CompleteRule] = {}
_WAITING: list[Any] = []


def meta(tensor: Any) -> Any:
    """Return a tensor, or in a rule what has the shape and dtype of the one that a spec is of."""
    return getattr(tensor, "tensor_meta", tensor)


def of_gradient(placement: Placement, sharded: bool) -> Placement:
    """Return the placement of the gradient of a tensor, ``sharded``: of an op with sharded results.

    What all ranks of a sharded op read gets a part of its gradient from each. The gradient of a sum
    over ranks is that of each summand.
    """
    if placement == PARTIAL:
        return REPLICATE
    return PARTIAL if placement == REPLICATE and sharded else placement


def register(op: Any, rule: CompleteRule) -> None:
    """Register ``rule`` for the overload ``op`` with DTensor, now or when DTensor is imported."""
    RULES[op] = rule
    _WAITING.append(op)
    imports.after("torch.distributed.tensor", flush)


def flush() -> None:
    """Register all waiting rules; imports ``torch.distributed.tensor``."""
    if not _WAITING:
        return
    from torch.distributed.tensor.experimental import register_sharding

    while _WAITING:
        op = _WAITING.pop()
        register_sharding(op)(_translated(RULES[op]))


def _translated(rule: CompleteRule) -> Callable[..., Any]:
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
