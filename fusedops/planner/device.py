"""What a device can do, as data: peak of products, memory, links, and measured efficiencies.

Known devices are the TOML files of ``planner/devices``; a file of one's own has the same tables.
Every number there names its source. The efficiencies are constants of ``step_time.py``: fitted on
published training steps (``bench/planner/fit.py``), the same for every device whose file has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
        ring: the same of all-reduces, all-gathers and reduce-scatters.
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
class Device:
    """A device of a cluster.

    Attributes:
        name: as people call it.
        memory: its memory.
        peak: FLOP/s of dense matrix products by dtype, names of ``DTYPES``.
        links: its links.
        efficiency: what training reaches of all that.
        sources: where the numbers are from, by table or key.
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

    @property
    def elementwise_rate(self) -> float:
        """Bytes/s of operations that are no product."""
        return self.memory.bandwidth * self.efficiency.elementwise

    def collective_rate(self, ranks: int, apart: int = 1) -> float:
        """Return the bytes/s of an all-reduce, all-gather or reduce-scatter.

        As many rings as the group has ranks on a node leave it, each by a network link of its own.

        Args:
            ranks: of the group.
            apart: devices between neighbours of the group; the others have groups of their own.
        """
        links, usual = self.links, self.efficiency
        inside = links.node * usual.node
        if apart * ranks <= links.devices_per_node:
            return inside
        per_node = min(ranks, max(1, links.devices_per_node // apart))
        return min(inside, per_node * links.network * usual.ring)


def known_devices() -> tuple[str, ...]:
    """Return the names that ``load_device`` knows."""
    return tuple(sorted({path.stem for path in FOLDER.glob("*.toml")} - {"efficiency"}))


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
