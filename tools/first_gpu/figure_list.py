"""The figures that decide whether the kernels are as fast as expected, and the table of them.

A figure is an op at a size that fills the chip, in bfloat16, compared with the best there is. Its
mark is a fraction of the limit of the machine, or how many times faster than a rival it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Mark = tuple[str, float]  # ("limit", 0.9): of the machine's limit; ("flex", 1.2): of that rival
BANDWIDTH: Mark = ("limit", 0.9)
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Figure:
    """One op at one size."""

    group: str  # figures of a group share a process
    op: str  # the op, or ``OPTIMIZER``
    sizes: tuple[int | str, ...]  # arguments of the spec's ``bench_case``
    rivals: tuple[str, ...] = ()  # contenders of ``fusedops bench``; eager is always one
    mark: Mark | None = None  # what is expected, if anything

    @property
    def name(self) -> str:
        """Return the name by which a figure is asked for."""
        return f"{self.op} {'x'.join(map(str, self.sizes))}"


_COMPILE, _LIGER, _FLEX = ("compile",), ("compile", "liger"), ("flex", "flash_attn")
# Group, op, rivals, mark, sizes.
_TABLE: tuple[tuple[str, str, tuple[str, ...], Mark | None, list[tuple[int | str, ...]]], ...] = (
    ("norms", "rms_norm", _LIGER, BANDWIDTH, [(16384, 4096), (16384, 8192)]),
    ("norms", "layer_norm", _LIGER, BANDWIDTH, [(16384, 4096), (16384, 8192)]),
    ("norms", "add_rms_norm", _LIGER, BANDWIDTH, [(16384, 4096), (16384, 8192)]),
    ("norms", "add_layer_norm", _COMPILE, BANDWIDTH, [(16384, 4096), (16384, 8192)]),
    (
        *("attention", "attention", _FLEX, ("eager", 1.0)),
        [(1, 16, 8192, size, "causal") for size in (128, 64, 256)],
    ),
    (
        *("attention training", "attention", _FLEX, ("eager", 1.0)),
        [(1, 16, rows, 128, "causal") for rows in (4096, 16384, 32768)],
    ),
    (
        *("products", "linear_act", _COMPILE, ("eager", 1.0)),
        [(8192, 4096, 4096, "gelu_tanh"), (8192, 1024, 4096, "gelu_tanh")],
    ),
    ("products", "linear_glu", _COMPILE, ("eager", 1.0), [(8192, 4096, 4096)]),
    ("elementwise", "swiglu", _LIGER, BANDWIDTH, [(16384, 14336)]),
    ("elementwise", "geglu", _LIGER, BANDWIDTH, [(16384, 14336)]),
    ("loss", "cross_entropy", _LIGER, BANDWIDTH, [(8192, 128256)]),
    (
        *("attention options", "attention", _FLEX, ("flex", 1.2)),
        [(1, 16, 8192, 128, option) for option in ("softcap", "bias", "window")],
    ),
    ("decoding", "attention_decode", (), BANDWIDTH, [(32, 32, 8, 8192, 128)]),
    ("experts", "moe_mlp", ("hf_grouped_mm",), ("hf_grouped_mm", 1.3), [(8192, 8, 64, 2048, 1024)]),
    ("experts", "grouped_mm", ("torch_grouped_mm",), None, [(65536, 64, 2048, 2048)]),
    (OPTIMIZER, OPTIMIZER, (), BANDWIDTH, [(64, 15_625_000), (400, 1024)]),
)
FIGURES = {
    figure.name: figure
    for group, op, rivals, mark, every_size in _TABLE
    for figure in (Figure(group, op, sizes, rivals, mark) for sizes in every_size)
}


def groups() -> dict[str, list[str]]:
    """Return the names of the figures of each group, in order."""
    names: dict[str, list[str]] = {}
    for figure in FIGURES.values():
        names.setdefault(figure.group, []).append(figure.name)
    return names


def words(row: dict[str, Any]) -> str:
    """Return a row as one line."""
    line = f"{row['op']} {row['case']} {row['direction']}: {row['us']['fusedops']:.1f} us"
    line += f", {row['lead']:.2f} times {row['rival']}"
    line += f", {row['limit_share']:.0%} of the limit"
    line += "" if row["host_us"] is None else f", {row['host_us']:.0f} us of the host"
    return line + (f", {row['of_mark']:.2f} of its mark" if row["of_mark"] is not None else "")
