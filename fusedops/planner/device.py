"""What a device can do, as data: peak of products, memory, links, and measured efficiencies.

Known devices are the TOML files of ``planner/devices``; a file of one's own has the same tables.
Every number there names its source. The efficiencies are constants of ``step_time.py``: fitted on
published training steps (``tools/fit_clock.py``), the same for every device whose file has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fusedops._core import checks
from fusedops.launch.config_table import InputError, fill, load

FOLDER = Path(__file__).parent / "devices"
DTYPES = ("float32", "bfloat16", "float16", "float8")
# Efficiencies that are shares of a peak, at most 1.
SHARES = (
    *("products", "attention", "elementwise", "optimizer", "overlap"),
    *("node", "ring", "network", "point_to_point", "zero_gather", "overlap_microbatches"),
)
# Octaves of a size by which a measured layer's weight falls to 0.6, and the number of steps that a
# factor of 1 weighs.
_NEAR, _PRIOR = 0.1, 0.5
# Share of the memory that the allocator's caching leaves unused; torchtitan's runs reserve 1 to 3 %
# less than the estimated peak, so that this is a margin.
_FRAGMENTED = 0.02
_OP = "device"


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        bytes: its size.
        bandwidth: bytes/s.
        reserved: bytes that hold no tensors: the CUDA context, workspaces of libraries, buffers of
            communicators.

    Raises:
        ValueError: one is not positive, or ``reserved`` is negative or not below ``bytes``.
    """

    bytes: int
    bandwidth: float
    reserved: int = 3 << 29

    def __post_init__(self) -> None:
        checks.integer(_OP, "memory.bytes", self.bytes, least=1)
        checks.positive(_OP, "memory.bandwidth", self.bandwidth)
        checks.integer(_OP, "memory.reserved", self.reserved, least=0)
        if self.reserved >= self.bytes:
            checks.fail(_OP, "memory.reserved", f"below memory.bytes {self.bytes}", self.reserved)

    @property
    def usable(self) -> int:
        """Bytes for tensors of a step, with a margin for what the allocator cannot use."""
        return int(self.bytes * (1 - _FRAGMENTED)) - self.reserved


@dataclass(frozen=True)
class DeviceLinks:
    """The links of a device, in bytes/s in one direction.

    Attributes:
        devices_per_node: how many devices ``node`` connects.
        node: to the other devices of the node.
        network: of the device's share of the network between nodes.
        host: to the host's memory.
        host_memory: of the device's share of the host's memory, which an offloaded optimizer reads
            and writes.
        host_bytes: of the host's memory that the device may use for what is offloaded.

    Raises:
        ValueError: one is not positive.
    """

    devices_per_node: int
    node: float
    network: float
    host: float
    host_memory: float = 2.5e10
    host_bytes: int = 256 << 30

    def __post_init__(self) -> None:
        checks.integer(_OP, "links.devices_per_node", self.devices_per_node, least=1)
        checks.integer(_OP, "links.host_bytes", self.host_bytes, least=0)
        for name in ("node", "network", "host", "host_memory"):
            checks.positive(_OP, f"links.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class DeviceEfficiency:
    """What training reaches of the peaks: the constants of ``step_time``.

    Attributes:
        products: share of the peak that large matrix products reach.
        float8: the same of products of float8.
        attention: the same of attention, of the peak of half precision.
        inner: length of a product's sum at which it reaches half of that share.
        outer: number of rows or of columns of a product at which it reaches half.
        elementwise: share of the memory's bandwidth, of all operations that are no product.
        optimizer: the same of AdamW.
        accumulation: bytes per parameter that adding the gradients of a further micro-batch moves;
            nearly 0 where the products of gradients add them.
        node: share of the bandwidth inside a node that collectives reach.
        network: share of the bandwidth between nodes that all-to-alls reach.
        ring: the same of the rings of data parallelism.
        point_to_point: share of the bandwidth between nodes that neighbours of a pipeline reach.
        overlap: share of the all-reduce of gradients that the backward hides.
        gather: share of FSDP's gathers that it does not hide.
        zero_gather: the same of the gather of weights after a step of ZeRO 1 and 2.
        sequence: seconds of the collectives of sequence parallelism by those of the all-reduces
            that they replace.
        overlap_microbatches: share of tensor parallelism's collectives that are hidden where a
            layer computes two halves of a micro-batch in turn.
        stage_wait: share of its computation that a pipeline rank waits for its neighbours beyond
            the bubble, because their times vary.
        collective_seconds: of a collective of tensor parallelism, times the root of its ranks.
        layer_seconds: of a layer and micro-batch, in which nothing of the above runs.
        expert_seconds: of a layer with experts and micro-batch: routing, and the host's wait for
            the numbers of rows.
        host_seconds: that the host needs to start the kernels of a layer, forward and backward.
        host_spread: share by which that grows for each doubling of the tensor-parallel ranks above
            four, whose hosts wait for each other.
        microbatch_seconds: of a micro-batch.
        step_seconds: of a step.

    Raises:
        ValueError: one is not positive, or a share of a peak is above 1.
    """

    products: float
    float8: float
    attention: float
    inner: float
    outer: float
    elementwise: float
    optimizer: float
    accumulation: float
    node: float
    network: float
    ring: float
    point_to_point: float
    overlap: float
    gather: float
    zero_gather: float
    sequence: float
    overlap_microbatches: float
    stage_wait: float
    collective_seconds: float
    layer_seconds: float
    expert_seconds: float
    host_seconds: float
    host_spread: float
    microbatch_seconds: float
    step_seconds: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checks.positive(_OP, f"efficiency.{name}", value)
        for name in SHARES:
            if getattr(self, name) > 1:
                checks.fail(_OP, f"efficiency.{name}", "at most 1", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """How long a layer of one shape takes on a device, by what ``step_time`` gives without it.

    Which kernel a library picks for a product, and how its tiles divide over the processors, makes
    up to a fifth of the time and follows no simple formula: it is measured, shape by shape.

    Attributes:
        tokens: of a micro-batch on a rank, before sequence parallelism.
        hidden: width of the residual stream.
        inner: width of the feed-forward layer, or of an expert.
        heads: of the queries.
        tp: tensor-parallel ranks.
        experts: of the layer; 0: none.
        dtype: of products.
        flash: whether attention keeps its scores out of memory.
        factor: measured computation of a layer, by the computed one.
        steps: of how many measured steps it is the mean.

    Raises:
        ValueError: a size or the factor is not positive.
    """

    tokens: float
    hidden: int
    inner: int
    heads: int
    tp: int
    experts: int = 0
    dtype: str = "bfloat16"
    flash: bool
    factor: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "inner", "heads", "tp", "factor", "steps"):
            checks.positive(_OP, f"layers.{name}", getattr(self, name))

    @property
    def kind(self) -> tuple[object, ...]:
        """What another layer must have as well for this one to tell anything of it."""
        return self.experts, self.dtype, self.flash

    @property
    def place(self) -> tuple[float, ...]:
        """``layer_place`` of the sizes."""
        return layer_place(self.tokens, self.hidden, self.inner, self.heads, self.tp)


def layer_place(*sizes: float) -> tuple[float, ...]:
    """Return where a layer of these sizes is among measured ones: logarithms (base 2)."""
    return tuple(math.log2(size) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of a cluster.

    Attributes:
        name: as people call it.
        memory: its memory.
        peak: FLOP/s of dense matrix products by dtype, names of ``DTYPES``.
        links: its links.
        efficiency: what training reaches of all that.
        sources: where the numbers are from, by table or key.
        layers: layers that were measured, in any order.
        threads: of a process on a CPU; 0: the device is none.

    Raises:
        ValueError: a number is not positive, or the peak of ``bfloat16`` is missing.

    Example:
        >>> from fusedops.planner import load_device
        >>> load_device("h100").links.devices_per_node
        8
    """

    name: str
    memory: DeviceMemory
    peak: dict[str, float]
    links: DeviceLinks
    efficiency: DeviceEfficiency
    sources: dict[str, str] = field(default_factory=dict)
    layers: tuple[MeasuredLayer, ...] = ()
    threads: int = 0

    def __post_init__(self) -> None:
        checks.integer(_OP, "threads", self.threads, least=0)
        for dtype, value in self.peak.items():
            checks.choice(_OP, "peak", dtype, DTYPES)
            checks.positive(_OP, f"peak.{dtype}", value)
        if "bfloat16" not in self.peak:
            checks.fail(_OP, "peak", "bfloat16 among the dtypes", sorted(self.peak))

    def peak_of(self, dtype: str) -> float:
        """Return the FLOP/s of a dtype; of bfloat16 where the device has no faster float8."""
        return self.peak.get(dtype, self.peak["bfloat16"])

    def layer_factor(self, kind: tuple[object, ...], place: tuple[float, ...]) -> float:
        """Return the factor of a layer's computation by the measured layers near to it.

        The mean of their logarithms, weighted by a normal distribution of the distance and by the
        number of steps; ``_PRIOR`` steps count for a factor of 1, so that it is 1 far from all.

        Args:
            kind: ``MeasuredLayer.kind``.
            place: ``MeasuredLayer.place``.
        """
        if not self.layers:
            return 1.0
        known = self._known_factors
        if (kind, place) not in known:
            total, weights = 0.0, _PRIOR
            for layer in self.layers:
                if layer.kind == kind:
                    distance = sum((a - b) ** 2 for a, b in zip(layer.place, place, strict=True))
                    weight = layer.steps * math.exp(-distance / (2 * _NEAR**2))
                    total, weights = total + weight * math.log(layer.factor), weights + weight
            known[kind, place] = math.exp(total / weights)
        return known[kind, place]

    @cached_property
    def _known_factors(self) -> dict[tuple[tuple[object, ...], tuple[float, ...]], float]:
        return {}


def known_devices() -> tuple[str, ...]:
    """Return the names that ``load_device`` knows."""
    names = (path.stem for path in FOLDER.glob("*.toml"))
    return tuple(sorted(name for name in names if name not in ("efficiency", "typical")))


def load_device(name: str | Path) -> Device:
    """Return a known device, or the one of a TOML file.

    Args:
        name: one of ``known_devices()``, or the path of a file with the same tables. Efficiencies
            that the file lacks are those of ``devices/efficiency.toml``.

    Raises:
        InputError: there is no such device or file, or a number is missing or impossible.

    Example:
        >>> load_device("a100-80").memory.bytes
        85899345920
    """
    text = str(name)
    known = known_devices()
    path = FOLDER / f"{text}.toml" if text in known else Path(text)
    if text not in known and path.suffix != ".toml":
        near = checks.nearest(text, known)
        hint = f"did you mean {near}" if near else f"known are {', '.join(known)}"
        raise InputError(f"there is no device {text!r}: {hint}; the name of a file ends in .toml")
    table = load(path)
    usual = load(FOLDER / "efficiency.toml")
    own = table.get("efficiency", {})
    if not isinstance(own, dict):
        raise InputError(f"{path}: efficiency must be a table, got {checks.shown(own)}")
    try:
        return fill(Device, {**table, "efficiency": {**usual, **own}})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
