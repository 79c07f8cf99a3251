"""A record as one picture: times faster than eager, and the fraction of the machine's limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from fusedops.bench.results import BenchRecord, BenchRow
from fusedops.bench.table import DISTURBED
from fusedops.terminal import files

# From the colour-blind safe palette of Okabe and Ito; who has which colour never changes.
_COLOURS = {"fusedops": "#0072B2", "compile": "#E69F00", "eager": "#999999"}
_PEER_COLOURS = ("#009E73", "#CC79A7", "#D55E00")
_TITLES = {"forward": "forward", "both": "forward + backward"}


def save(path: str | os.PathLike[str], record: BenchRecord) -> None:
    """Write the picture as PNG, all or nothing.

    Raises:
        UserError: when matplotlib is missing or the file cannot be written.
    """
    figure = _draw(record)
    with files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)


def check_installed() -> None:
    """Raise a ``UserError`` when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise files.UserError(
            "a chart needs matplotlib, which is not installed (pip install matplotlib)"
        ) from None


def _draw(record: BenchRecord) -> Any:
    check_installed()
    from matplotlib.figure import Figure

    directions = [title for title in _TITLES if any(row.direction == title for row in record.rows)]
    who = _shown(record.rows)
    labels = list(dict.fromkeys((row.op, row.case, row.dtype) for row in record.rows))
    height = 1.5 + len(directions) * (0.7 + 0.17 * len(labels) * (len(who) + 0.8))
    figure = Figure(figsize=(13, height), layout="constrained")
    axes = figure.subplots(len(directions), 2, squeeze=False, sharey="row")
    for line, direction in zip(axes, directions, strict=True):
        rows = {
            (row.op, row.case, row.dtype, row.variant): row
            for row in record.rows
            if row.direction == direction
        }
        faster = [contender for contender in who if contender != "eager"]
        _bars(line[0], labels, faster, rows, lambda row: row.speedup, "{:.2f}x", errors=True)
        _bars(line[1], labels, who, rows, lambda row: 100 * row.limit_share, "{:.0f}%")
        line[0].axvline(1.0, color="black", linewidth=1)
        line[1].axvline(100.0, color="black", linewidth=1, linestyle=":")
        line[0].set_title(f"{_TITLES[direction]}: times faster than eager (line)", fontsize=10)
        line[1].set_title(f"{_TITLES[direction]}: % of this machine's measured limit", fontsize=10)
    handles, names = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(who), frameon=False)
    figure.suptitle(_headline(record), fontsize=11)
    return figure


def _bars(
    axis: Any,
    labels: Sequence[tuple[str, str, str]],
    who: Sequence[str],
    rows: dict[tuple[str, str, str, str], BenchRow],
    value: Callable[[BenchRow], float],
    text: str,
    *,
    errors: bool = False,
) -> None:
    """Draw a group of horizontal bars per label, the first at the top."""
    thickness = 0.85 / max(1, len(who))
    for variant in who:
        drawn = []
        for at, label in enumerate(labels):
            present = [contender for contender in who if (*label, contender) in rows]
            if variant in present:
                offset = (present.index(variant) - (len(present) - 1) / 2) * thickness
                drawn.append((at + offset, rows[(*label, variant)]))
        bars = axis.barh(
            [at for at, _ in drawn],
            [value(row) if row.trusted else 0.0 for _, row in drawn],
            thickness * 0.92,
            label=variant,
            color=_colour(variant, who),
            xerr=[
                [(row.speedup - row.speedup_q1) * row.trusted for _, row in drawn],
                [(row.speedup_q3 - row.speedup) * row.trusted for _, row in drawn],
            ]
            if errors and drawn
            else None,
            error_kw={"linewidth": 0.8},
        )
        for bar in bars:
            bar.set_edgecolor("white")
        bar_labels = [text.format(value(row)) if row.trusted else DISTURBED for _, row in drawn]
        axis.bar_label(bars, bar_labels, padding=3, fontsize=7)
    axis.set_yticks(range(len(labels)), [f"{op} {case}\n{dtype}" for op, case, dtype in labels])
    axis.tick_params(labelsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _shown(rows: Sequence[BenchRow]) -> list[str]:
    """Return the contenders in the picture: single backends only in the table."""
    names = dict.fromkeys(row.variant for row in rows if ":" not in row.variant)
    first = [name for name in ("fusedops", "compile") if name in names]
    peers = [name for name in names if name not in ("fusedops", "compile", "eager")]
    return [*first, *peers, "eager"]


def _colour(variant: str, who: Sequence[str]) -> str:
    if variant in _COLOURS:
        return _COLOURS[variant]
    peers = [name for name in who if name not in _COLOURS]
    return _PEER_COLOURS[peers.index(variant) % len(_PEER_COLOURS)]


def _headline(record: BenchRecord) -> str:
    machine, versions = record.machine, record.versions
    copy = record.limits["copy"]["rate"] / 1e9
    commit = record.git.get("commit", "")[:10]
    return (
        f"fusedops {commit} on {machine['slug']} ({machine['name']}), torch {versions['torch']}, "
        f"allocator {record.settings['allocator']}, copy {copy:.0f} GB/s"
    )
