"""A layout by recursive bisection: symbolic, without any measured constant.

Devices are divided by one prime factor after the other. Each factor goes to the kind of parallelism
with which a rank sends the fewest bytes in a step (``step_traffic``, whose formulae are exact). The
shortest pipeline and the least recomputation that fit are taken, with the micro-batch and the stage
of ZeRO that send the least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.planner.layout import Layout
from fusedops.planner.memory import estimate_unchecked
from fusedops.planner.search import MOST_TENSOR, PlannedLayout, fitted
from fusedops.planner.traffic import step_traffic, total

_OP = "recursive_layout"
_AXES = ("dp", "tp", "cp")
_ZERO, _MICRO_BATCHES = (0, 1, 2, 3), (1, 2, 4, 8, 16)
_RECOMPUTE = ("none", "selective", "full")  # what costs least time first


def recursive_layout(
    model: TransformerConfig,
    devices: int,
    global_batch: int,
    memory: int,
    base: Layout | None = None,
) -> PlannedLayout | None:
    """Return a layout that fits, found without estimating any time; ``None``: none fits.

    Args:
        model: what is trained.
        devices: how many there are.
        global_batch: sequences of a step, of all devices together.
        memory: bytes of a device that a step may take.
        base: what is not searched for: precision, kernels, length of the sequences.

    Raises:
        ValueError: a number is not positive.
        TypeError: a number is no integer.

    Example:
        >>> from fusedops.planner import preset, recursive_layout
        >>> found = recursive_layout(preset("llama3-8b"), 16, 64, 80 << 30)
        >>> found.layout.devices
        16
    """
    for name, value in (("devices", devices), ("global_batch", global_batch), ("memory", memory)):
        checks.integer(_OP, name, value, least=1)
    base = base or Layout()
    for pp in range(1, min(devices, model.depth) + 1):
        if devices % pp:
            continue
        sizes = _divided(model, devices // pp, pp, global_batch, base)
        if sizes is None:
            continue
        rows = list(_fitting(model, devices, global_batch, memory, base, sizes, pp))
        if rows:
            return min(rows, key=lambda row: _cost(model, row))
    return None


def _fitting(
    model: TransformerConfig,
    devices: int,
    global_batch: int,
    memory: int,
    base: Layout,
    sizes: dict[str, int],
    pp: int,
) -> Iterator[PlannedLayout]:
    """Yield the layouts of given sizes that fit."""
    choices = itertools.product(_ZERO, _RECOMPUTE, _MICRO_BATCHES)
    for zero, words, rows in choices:
        if global_batch % (sizes["dp"] * rows):
            continue
        options = _options(model, sizes, pp, global_batch, zero=zero, recompute=words)
        options |= {"micro_batch": rows, "microbatches": global_batch // (sizes["dp"] * rows)}
        try:
            layout = fitted(model, devices, base, options)
        except ValueError:
            continue
        row = PlannedLayout(layout, estimate_unchecked(model, layout))
        if row.left(memory) >= 0:
            yield row


def _cost(model: TransformerConfig, row: PlannedLayout) -> tuple[int, float]:
    """Return how much is recomputed, then the bytes that a rank sends."""
    sent = total(step_traffic(model, row.layout)).bytes
    return _RECOMPUTE.index(row.layout.recompute), sent


def _divided(
    model: TransformerConfig, devices: int, pp: int, global_batch: int, base: Layout
) -> dict[str, int] | None:
    """Return the sizes of a stage's devices; ``None``: a factor fits no kind of parallelism."""
    sizes = dict.fromkeys(_AXES, 1)
    for factor in sorted(_prime_factors(devices), reverse=True):
        choices = []
        for axis in _AXES:
            larger = sizes | {axis: sizes[axis] * factor}
            share = global_batch * math.prod(larger.values()) // devices
            sent = _sent(model, larger, pp, max(share, larger["dp"]), base)
            if sent is not None:
                choices.append((sent, axis))
        if not choices:
            return None
        sizes[min(choices)[1]] *= factor
    return sizes


def _sent(
    model: TransformerConfig, sizes: dict[str, int], pp: int, batch: int, base: Layout
) -> float | None:
    """Return the bytes that a rank sends in a step; ``None`` where the sizes cannot be."""
    if sizes["tp"] > MOST_TENSOR or batch % sizes["dp"]:
        return None
    try:
        layout = fitted(
            model, math.prod(sizes.values()) * pp, base, _options(model, sizes, pp, batch)
        )
        return total(step_traffic(model, layout)).bytes
    except ValueError:
        return None


def _options(
    model: TransformerConfig, sizes: dict[str, int], pp: int, batch: int, **more: Any
) -> dict[str, Any]:
    """Return fields of a layout: micro-batches of one sequence, experts on as many ranks as can."""
    ranks = sizes["dp"] * sizes["cp"]
    experts = model.num_experts if model.sparse_layers else 1
    return {
        **sizes,
        "pp": pp,
        "sp": sizes["tp"] > 1,
        "ep": math.gcd(experts, ranks),
        "micro_batch": 1,
        "microbatches": max(1, batch // sizes["dp"]),
        **more,
    }


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number.

    Example:
        >>> _prime_factors(24)
        [2, 2, 2, 3]
    """
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors
