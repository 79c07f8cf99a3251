"""The figures that decide whether the kernels are as fast as promised, and the table of them.

A figure is an op at a size that fills the chip, beside the best there is, in bfloat16. Its mark is
a share of the measured limit of the machine, or how many times faster than a rival it must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"


@dataclass(frozen=True)
class Figure:
    """One op at one size.

    Attributes:
        group: figures of a group share a process.
        op: the op, or ``"optimizer"``.
        sizes: positional arguments of the spec's ``bench_case``.
        options: keyword arguments of the same.
        directions: what is timed.
        rivals: beside the spec's peers (``figures.py`` has the names).
        mark: ``("limit", 0.9)``: nine tenths of the machine's limit; ``("flex", 1.2)``: 1.2 times
            as fast as that rival.
        host: whether the host's time per call is measured instead of the GPU's.
        alibi: whether attention has ALiBi slopes, which ``bench_case`` does not make.
    """

    group: str
    op: str
    sizes: tuple[int | str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    rivals: tuple[str, ...] = ("eager", "compile")
    mark: tuple[str, float] | None = None
    host: bool = False
    alibi: bool = False

    @property
    def name(self) -> str:
        """Return the name of the figure, by which it is an item."""
        words = [f"{value}" for value in (*self.sizes, *self.options.values())]
        extra = (" alibi" if self.alibi else "") + (" host" if self.host else "")
        return f"{self.op} {'x'.join(words)}{extra}"


BANDWIDTH = ("limit", 0.9)
_TORCH_ATTENTION = ("cudnn", "flash", "flex")


def _all() -> list[Figure]:
    norms = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    return [
        *(
            Figure("norms", op, (16384, columns), mark=BANDWIDTH)
            for columns in (4096, 8192)
            for op in norms
        ),
        *(
            Figure("attention", "attention", (1, 16, 8192, size, "causal"), mark=("cudnn", 1.0),
                   directions=(FORWARD,), rivals=_TORCH_ATTENTION)
            for size in (128, 64, 256)
        ),
        *(
            Figure("attention training", "attention", (1, 16, rows, 128, "causal"),
                   directions=(FORWARD, BOTH), rivals=_TORCH_ATTENTION, mark=("cudnn", 1.0))
            for rows in (4096, 16384, 32768)
        ),
        *(
            Figure("products", "linear_act", (8192, depth, 4096, "gelu_tanh"),
                   directions=(FORWARD, BOTH), rivals=("eager", "compile", "bare"),
                   mark=("bare", 0.95))
            for depth in (4096, 1024)
        ),
        Figure("products", "linear_glu", (8192, 4096, 4096), directions=(FORWARD, BOTH),
               rivals=("eager", "compile", "bare"), mark=("bare", 0.95)),
        *(
            Figure("elementwise", op, (16384, 14336), mark=BANDWIDTH)
            for op in ("swiglu", "geglu")
        ),
        Figure("loss", "cross_entropy", (8192, 128256), mark=BANDWIDTH),
        *(
            Figure("attention options", "attention", (1, 16, 8192, 128, what),
                   directions=(FORWARD, BOTH), rivals=("flex",), mark=("flex", 1.2), alibi=alibi)
            for what, alibi in (("softcap", False), ("bias", False), ("window", False),
                                ("causal", True))
        ),
        Figure("decoding", "attention_decode", (32, 32, 8, 8192, 128), directions=(FORWARD,),
               rivals=("eager",), mark=BANDWIDTH),
        Figure("experts", "moe_mlp", (8192, 8, 64, 2048, 1024), directions=(FORWARD, BOTH),
               rivals=("eager", "grouped_mm"), mark=("grouped_mm", 1.3)),
        Figure("experts", "grouped_mm", (65536, 64, 2048, 2048), directions=(FORWARD, BOTH),
               rivals=("eager",)),
        Figure("optimizer", "optimizer", (64, 15_625_000), rivals=("torch fused",),
               directions=(FORWARD,), mark=BANDWIDTH),
        Figure("host", "rms_norm", (16, 768), host=True, rivals=("eager",)),
        Figure("host", "attention", (1, 12, 16, 64, "causal"), host=True, rivals=("eager",)),
        Figure("host", "attention_decode", (1, 12, 12, 512, 64), host=True, rivals=("eager",),
               directions=(FORWARD,)),
        Figure("host", "optimizer", (400, 1024), host=True, rivals=("torch fused",),
               directions=(FORWARD,)),
    ]  # fmt: skip


FIGURES = {figure.name: figure for figure in _all()}


def groups() -> dict[str, list[str]]:
    """Return the names of the figures of each group, in order."""
    names: dict[str, list[str]] = {}
    for figure in FIGURES.values():
        names.setdefault(figure.group, []).append(figure.name)
    return names


def words(row: dict[str, Any]) -> str:
    """Return a row as one line."""
    line = f"{row['figure']} {row['direction']}: {row['ours_us']:.1f} us"
    if row["ratio"] is not None:
        line += f", {row['ratio']:.2f} times {row['rival']}"
    if row["of_limit"] is not None:
        line += f", {row['of_limit']:.0%} of the limit"
    return line + (f", {row['of_mark']:.2f} of its mark" if row["of_mark"] is not None else "")
