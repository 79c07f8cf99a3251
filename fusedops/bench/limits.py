"""What this machine can do: copy bandwidth and matrix-product rate, measured here and now.

The fraction of the limit of a row is the time that the larger of the two would need, divided by
the row's own time. The best of several ways counts, because the usual one is often not the
limit: torch's float32 matmul (MKL) runs at 37 % of peak on a Zen 5, oneDNN at 78 to 86 %.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from fusedops.runtime.timer import Clock, TimingPlan, Variant, measure

_PLAN = TimingPlan(least=5, most=15, seconds=0.4)


@dataclass(frozen=True)
class Limit:
    """A measured rate and the way that reached it."""

    rate: float  # bytes or floating-point operations per second, of the best sample
    way: str  # which of the ways was the fastest
    others: dict[str, float]  # the other ways and their rates
    trusted: bool = True  # whether the machine was quiet enough; else the rate may be too low


@dataclass(frozen=True)
class Limits:
    """The limits of a machine."""

    copy: Limit  # bytes read plus bytes written per second, far beyond every cache
    matmul: dict[str, Limit]  # per dtype name, floating-point operations per second

    def least_seconds(self, bytes_moved: int, flops: int, dtype: str) -> float:
        """Return the time below which this machine cannot do so much work."""
        product = self.matmul.get(dtype)
        return max(bytes_moved / self.copy.rate, flops / product.rate if product else 0.0)


@dataclass(frozen=True)
class LeastWork:
    """What a run has to do at least, and whether memory is what limits it."""

    bytes_moved: int
    flops: int
    least_seconds: float
    in_memory: bool

    @staticmethod
    def of(parts: Sequence[tuple[int, int]], dtype: str, limits: Limits) -> LeastWork:
        """Return the work of parts that follow each other: bytes and operations of each."""
        least = sum(limits.least_seconds(moved, flops, dtype) for moved, flops in parts)
        return LeastWork(
            bytes_moved=sum(moved for moved, _ in parts),
            flops=sum(flops for _, flops in parts),
            least_seconds=least,
            in_memory=least == sum(limits.least_seconds(moved, 0, dtype) for moved, _ in parts),
        )


def measure_limits(device: torch.device, dtypes: Iterable[torch.dtype], clock: Clock) -> Limits:
    """Measure the copy bandwidth and the matrix-product rate of each dtype (about 2 s)."""
    matmul = {str(dtype).removeprefix("torch."): _matmul(device, dtype, clock) for dtype in dtypes}
    return Limits(_copy(device, clock), matmul)


def _copy(device: torch.device, clock: Clock) -> Limit:
    size = (1 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(source)}
    if device.type == "cpu":
        # memmove writes large blocks past the cache, which saves reading the target first.
        threads = torch.get_num_threads()
        part = -(-size // threads)

        def move(start: int) -> None:
            count = min(part, size - start)
            ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, count)

        pool = ThreadPoolExecutor(threads)
        ways["memmove"] = lambda: list(pool.map(move, range(0, size, part)))
    return _best(ways, 2 * size, clock)


def _matmul(device: torch.device, dtype: torch.dtype, clock: Clock) -> Limit:
    # On a CPU whose other cores are busy the smaller product is the faster one.
    sizes = [8192] if device.type == "cuda" else [512, 1536]
    factor = 2 if dtype == torch.float64 else 1
    limits = [_matmul_of_size(device, dtype, clock, size // factor) for size in sizes]
    return max(limits, key=lambda limit: limit.rate)


def _matmul_of_size(device: torch.device, dtype: torch.dtype, clock: Clock, size: int) -> Limit:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    ways: dict[str, Callable[[], object]] = {"torch.mm": lambda: torch.mm(a, b, out=out)}
    if device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        onednn = partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")
        # Some builds and dtypes have no oneDNN kernel; torch.mm then is the only way.
        with suppress(RuntimeError, NotImplementedError):
            onednn()
            ways["oneDNN"] = onednn
    return _best(ways, 2 * size**3, clock)


def _best(ways: dict[str, Callable[[], object]], work: int, clock: Clock) -> Limit:
    variants = [Variant(name, lambda _, run=run: run()) for name, run in ways.items()]  # type: ignore[misc]
    timing = measure(variants, clock, _PLAN)
    rates = {name: work / timing.best(name) for name in ways}
    way = max(rates, key=rates.__getitem__)
    rate = rates.pop(way)
    return Limit(rate, way, rates, timing.trusted(way))
