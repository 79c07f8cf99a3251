"""What tests of ``fusedops bench`` share: the command, and limits and rows without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fusedops.bench.limits import Limit, Limits
from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.cli.main import app
from fusedops.runtime.timer import Timing, Variant

# The machine copies 1 GB/s.
LIMITS = Limits(Limit(1e9, "copy_", {}), {"float32": Limit(1e12, "torch.mm", {})})


def invoke(*words: str) -> Result:
    """Run ``fusedops`` in this process."""
    return CliRunner().invoke(app, words)


def row(variant: str = "fusedops", median: float = 100.0, **changes: Any) -> BenchRow:
    """Return a row whose quartiles are ``spread`` from its median."""
    spread = changes.pop("spread", 0.01)
    base = BenchRow(
        op="gelu",
        case="16x16",
        dtype="float32",
        direction="forward",
        variant=variant,
        backend="cpp",
        allocator="tuned",
        speedup=2.0,
        speedup_q1=1.9,
        speedup_q3=2.1,
        median_us=median,
        q1_us=median * (1 - spread),
        q3_us=median * (1 + spread),
        samples=20,
        discarded=1,
        trusted=True,
        gb_per_s=10.0,
        tflop_per_s=None,
        limit_share=0.5,
        in_cache=False,
        host_us=None,
        peak_bytes=1024,
        error_max_ulps=0.5,
        error_mean_ulps=0.25,
    )
    return replace(base, **changes)


def record(*rows: BenchRow, **machine: Any) -> BenchRecord:
    """Return the record of a run on one machine."""
    here = {"slug": "cpu-zen5", "device": "cpu", "name": "AMD EPYC", "threads": 2} | machine
    return BenchRecord(
        machine=here,
        versions={"torch": "2.13.0"},
        git={"commit": "0123456789abcdef", "changed": True},
        settings={"allocator": "tuned"},
        limits={"copy": {"rate": 1e10, "way": "copy_", "trusted": True}, "matmul": {}},
        rows=rows,
        notes=("a note",),
        created="2026-01-01T00:00:00+00:00",
    )


def fixed_timing(**seconds: float) -> Any:
    """Return a ``measure`` that gives these seconds, of variants that are not measured as well."""

    def measure(variants: Sequence[Variant], *_: Any, **__: Any) -> Timing:
        names = {*(variant.name for variant in variants), *seconds}
        quiet = {name: [False] * 4 for name in names}
        return Timing({name: [seconds[name]] * 4 for name in names}, quiet, least=1)

    return measure
