"""A few samples of an op that together meet every value of every argument.

For tests whose cost is in the call and not in the numbers, above all those that compile: two
samples that differ in sizes alone, or in a combination of options that each were met, ask such a
test the same. All samples run in the second tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusedops.specs import Sample


def covering(samples: Sequence[Sample]) -> list[str]:
    """Return the names of few samples, the first among them, that meet what all of them meet."""
    kinds = [_kinds(sample) for sample in samples]
    chosen = [0]
    left = set[Any]().union(*kinds) - kinds[0]
    while left:
        best = max(range(len(samples)), key=lambda n: len(kinds[n] & left))
        chosen.append(best)
        left -= kinds[best]
    return [samples[n].name for n in sorted(chosen)]


def _kinds(sample: Sample) -> set[tuple[Any, ...]]:
    """Return what kind of value each argument has.

    Of a tensor its dtype, rank, whether it wants a gradient and whether a size is 0 or 1, which
    compilers treat apart; of an option its value; of other numbers the sign.
    """
    found: set[tuple[Any, ...]] = {("random", sample.random), ("args", len(sample.args))}
    leaves, _ = pytree.tree_flatten_with_path((sample.args, dict(sample.kwargs)))
    for path, value in leaves:
        where = pytree.keystr(path)
        if isinstance(value, torch.Tensor):
            found |= {(where, value.dtype), (where, "rank", value.dim())}
            found |= {(where, "gradient", value.requires_grad)}
            found |= {(where, "size", size) for size in value.shape if size < 2}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.add((where, type(value), (value > 0) - (value < 0)))
        else:
            found.add((where, value))
    return found
