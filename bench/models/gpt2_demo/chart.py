"""The demo's picture: losses by step and by time, and the speeds."""

from __future__ import annotations

import io
from itertools import accumulate

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .report import LOSS_DIFFERENCE_MARK, Results, speed_up
from .training import Comparison

STOCK, STOCK_LIGHT, FUSED = "#7a7f87", "#c9ccd1", "#d9480f"
COLOURS = {"stock": STOCK, "fusedops": FUSED}


def draw(results: Results) -> bytes:
    """Return a PNG: per dtype the loss by step and by time, and one panel of speeds."""
    columns = len(results.tuned)
    figure, axes = plt.subplots(
        2, columns + 1, figsize=(4.6 * (columns + 1), 7.2), squeeze=False, layout="constrained"
    )
    for column, each in enumerate(results.tuned):
        _losses_by_step(axes[0][column], each)
        _losses_by_time(axes[1][column], each)
    _speeds(axes[0][columns], results)
    _differences(axes[1][columns], results.tuned)
    settings = results.settings
    figure.suptitle(
        f"GPT-2 ({settings.layers} layers, hidden {settings.hidden}, "
        f"{results.parameters / 1e6:.1f} M parameters) learns Python",
        fontsize=13,
        fontweight="bold",
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


def _plain(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _losses_by_step(axes: Axes, comparison: Comparison) -> None:
    steps = range(1, len(comparison.losses["stock"]) + 1)
    axes.plot(steps, comparison.losses["stock"], color=STOCK, linewidth=4.5, alpha=0.6)
    axes.plot(steps, comparison.losses["fusedops"], color=FUSED, linewidth=1.4)
    _plain(axes, f"{comparison.dtype}: the same losses step by step", "step", "training loss")
    axes.legend(["stock", "fusedops"], frameon=False)


def _losses_by_time(axes: Axes, comparison: Comparison) -> None:
    for name, colour in COLOURS.items():
        losses = comparison.losses[name]
        untimed = len(losses) - len(comparison.timing.rounds[name])
        median = comparison.timing.spread(name).median
        kept = comparison.timing.kept(name)
        seconds = [
            took if good else median
            for took, good in zip(comparison.timing.rounds[name], kept, strict=True)
        ]
        clock = list(accumulate([median] * untimed + seconds))
        axes.plot(clock, losses, color=colour, linewidth=1.6, label=name)
        axes.plot(clock[-1], losses[-1], "o", color=colour, markersize=5)
    ratio = speed_up(comparison)
    _plain(axes, f"{comparison.dtype}: {ratio:.2f} times as fast", "seconds", "training loss")
    axes.legend(frameon=False)


def _speeds(axes: Axes, results: Results) -> None:
    """Draw a bar per dtype, model and allocator, with its value."""
    untuned = {comparison.dtype: comparison for comparison in results.untuned}
    ticks: list[tuple[float, str]] = []
    position = 0.0
    for tuned in results.tuned:
        rows = [
            ("stock", tuned.tokens_per_second("stock"), STOCK),
            ("fusedops", tuned.tokens_per_second("fusedops"), FUSED),
        ]
        if tuned.dtype in untuned:
            system = untuned[tuned.dtype].tokens_per_second("stock")
            rows.insert(0, ("stock, system allocator", system, STOCK_LIGHT))
        ticks.append((position + (len(rows) - 1) / 2, tuned.dtype))
        for label, value, colour in rows:
            bar = axes.barh(position, value, color=colour)
            axes.bar_label(bar, [f" {label}  {value:,.0f}"], fontsize=9)
            position += 1
        position += 0.6
    axes.set_yticks([at for at, _ in ticks], [dtype for _, dtype in ticks])
    axes.invert_yaxis()
    axes.margins(x=0.6)  # for the labels
    _plain(axes, "training speed", "tokens per second", "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _differences(axes: Axes, comparisons: list[Comparison]) -> None:
    floor = 1e-9  # a difference of 0 has no place on this axis: it is drawn here
    axes.axhline(LOSS_DIFFERENCE_MARK, color=STOCK, linewidth=1, linestyle="--")
    axes.text(1, LOSS_DIFFERENCE_MARK * 1.2, "mark for float32, 20 steps", fontsize=8, color=STOCK)
    for comparison, colour in zip(comparisons, ("#1864ab", "#74c0fc"), strict=False):
        values = [max(floor, value) for value in comparison.loss_differences("stock", "fusedops")]
        axes.semilogy(range(1, len(values) + 1), values, ".-", color=colour, label=comparison.dtype)
    _plain(axes, "relative difference of the losses", "step", "|fusedops - stock| / stock")
    axes.legend(frameon=False)
