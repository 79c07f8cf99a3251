"""DTensor sharding rules: which placements an op can run on without communication.

A rule is written per mesh dimension and says nothing of how many there are: DTensor combines.
Registration waits until somebody imports ``torch.distributed.tensor`` (a DTensor cannot exist
before), because that import costs about a second: a one-shot import hook then registers.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

# rule(*schema_args) -> [(output placements, input placements)], one placement per tensor output
# and one per argument (None for what is not a tensor). Written with the words of this module:
# an int shards that dim, "replicate", or "partial" (a sum over ranks).
Placement = int | str | None
Rule = Callable[..., Sequence[tuple[Sequence[Placement], Sequence[Placement]]]]

REPLICATE = "replicate"
PARTIAL = "partial"

_WAITING: list[tuple[Any, Rule]] = []
_MODULE = "torch.distributed.tensor"


def register(op: Any, rule: Rule) -> None:
    """Register ``rule`` for the overload ``op`` with DTensor, now or when DTensor is imported."""
    _WAITING.append((op, rule))
    if _MODULE in sys.modules:
        flush()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


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


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``flush`` right after ``torch.distributed.tensor`` has been imported, once."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_flush(module: Any) -> None:
                execute(module)
                flush()

            spec.loader.exec_module = execute_and_flush  # type: ignore[method-assign]
        return spec
