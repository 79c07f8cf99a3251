"""A layout by recursive bisection, without any constant measured on the devices.

For each length of the pipeline and each least size of tensor parallelism, the remaining devices are
divided by one prime factor after the other. Each factor goes to the kind of parallelism with which
a step is shortest. ``step_time`` computes that with a typical accelerator: only ratios of data
sheets, which differ little between the devices of a decade, and no fitted efficiency. The shortest
step that fits into the memory is the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.planner.device import load_device
from fusedops.planner.layout import Layout
from fusedops.planner.memory import estimate_unchecked
from fusedops.planner.search import PlannedLayout
from fusedops.planner.space import MOST_TENSOR, OFFLOAD, fitted, powers_of_two
from fusedops.planner.step_time import step_time
from fusedops.planner.timed_search import step_shape

_OP = "recursive_layout"
_AXES = ("dp", "tp", "cp")
_ZERO, _MICRO_BATCHES = (0, 1, 2, 3), (1, 2, 4, 8, 16)
_RECOMPUTE = ("none", "selective", "full")
# Schedules of a pipeline with the stages of a rank; ``None``: the schedule's own number.
_SCHEDULES = (("1f1b", None), ("interleaved", 2), ("zbv", None))
_TYPICAL = Path(__file__).with_name("typical.toml")


def recursive_layout(
    model: TransformerConfig,
    devices: int,
    global_batch: int,
    memory: int,
    base: Layout | None = None,
) -> PlannedLayout | None:
    """Return a layout that fits, found without a measured constant; ``None``: none fits.

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
        >>> from fusedops.planner import preset
        >>> planned = recursive_layout(preset("llama3-8b"), 16, 64, 80 << 30)
        >>> planned.layout.devices
        16
    """
    for name, value in (("devices", devices), ("global_batch", global_batch), ("memory", memory)):
        checks.integer(_OP, name, value, least=1)
    search = _Bisection(model, devices, global_batch, base or Layout())
    for _, layout in sorted(search.timed(), key=lambda row: row[0]):
        row = PlannedLayout(layout, estimate_unchecked(model, layout))
        if row.left(memory) >= 0 and row.estimate.host <= search.device.links.host_bytes:
            return row
    return None


class _Bisection:
    """The arguments of ``recursive_layout``."""

    def __init__(
        self, model: TransformerConfig, devices: int, global_batch: int, base: Layout
    ) -> None:
        self.model, self.devices, self.global_batch, self.base = model, devices, global_batch, base
        self.device = load_device(_TYPICAL)

    def timed(self) -> Iterator[tuple[float, Layout]]:
        """Yield layouts with the seconds of their steps on a typical accelerator."""
        for mesh in self.meshes():
            choices = itertools.product(
                self.expert_ranks(mesh), _ZERO, _RECOMPUTE, _MICRO_BATCHES, OFFLOAD
            )
            for ep, zero, words, micro_batch, offload in choices:
                sizes = {**mesh, "ep": ep}
                options = {"zero": zero, "recompute": words, "offload": offload}
                for schedule, virtual in _SCHEDULES if sizes["pp"] > 1 else (("1f1b", None),):
                    options |= {"pipeline_schedule": schedule, "pipeline_virtual": virtual}
                    row = self.row(sizes, self.global_batch, micro_batch, **options)
                    if row is not None:
                        yield row

    def meshes(self) -> list[dict[str, int]]:
        """Return parallel sizes of all devices, a few of each length of the pipeline."""
        meshes: list[dict[str, int]] = []
        for pp, tp in itertools.product(
            range(1, self.model.num_layers + 1), powers_of_two(MOST_TENSOR)
        ):
            if self.devices % (pp * tp) == 0:
                sizes = self.divided({"dp": 1, "tp": tp, "cp": 1, "pp": pp})
                if sizes is not None and sizes not in meshes:
                    meshes.append(sizes)
        return meshes

    def divided(self, sizes: dict[str, int]) -> dict[str, int] | None:
        """Return sizes of all devices from those of some; ``None``: a factor fits nowhere."""
        factors = _prime_factors(self.devices // math.prod(sizes.values()))
        for factor in sorted(factors, reverse=True):
            larger = [sizes | {axis: sizes[axis] * factor} for axis in _AXES]
            shortest = min(larger, key=self.seconds)
            if self.seconds(shortest) == math.inf:
                return None
            sizes = shortest
        return sizes

    def seconds(self, sizes: dict[str, int]) -> float:
        """Return the time of a step of some devices with their share of the global batch."""
        share = self.global_batch * math.prod(sizes.values()) // self.devices
        row = self.row(sizes, max(share, sizes["dp"]), 1, zero=1)
        return math.inf if row is None else row[0] / max(share, sizes["dp"])

    def expert_ranks(self, sizes: dict[str, int]) -> list[int]:
        """Return sizes of expert parallelism, ascending: of a node, of two, and the largest."""
        experts = self.model.num_experts if self.model.sparse_layers else 1
        ranks = sizes["dp"] * sizes["cp"]
        node = max(1, self.device.links.devices_per_node // sizes["tp"])
        largest = math.gcd(experts, ranks)
        return sorted({math.gcd(largest, node), math.gcd(largest, 2 * node), largest})

    def row(
        self, sizes: dict[str, int], batch: int, micro_batch: int, **options: Any
    ) -> tuple[float, Layout] | None:
        """Return the seconds of a step and its layout; ``None`` where that cannot be."""
        if sizes["tp"] > MOST_TENSOR or batch % (sizes["dp"] * micro_batch):
            return None
        options |= {
            "ep": self.expert_ranks(sizes)[-1],
            **sizes,
            "sp": sizes["tp"] > 1,
            "micro_batch": micro_batch,
            "microbatches": batch // (sizes["dp"] * micro_batch),
        }
        devices = math.prod(sizes[axis] for axis in (*_AXES, "pp"))
        try:
            layout = fitted(self.model, devices, self.base, options)
        except ValueError:
            return None
        return step_time(step_shape(self.model, layout), self.device).seconds, layout


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
