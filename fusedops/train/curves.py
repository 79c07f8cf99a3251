"""The curves of a run as one SVG, written when it ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CURVES = "curves.svg"
# From the colour-blind safe palette of Okabe and Ito.
_COLOURS = ("#0072B2", "#E69F00")
_PLOTS = (("loss", "validation_loss"), ("tokens_per_second",), ("lr",))


def draw_curves(metrics: Path, file: Path) -> bool:
    """Draw losses, speed and learning rate over the steps.

    Args:
        metrics: a run's ``metrics.jsonl``.
        file: that gets the SVG.

    Returns:
        Whether it was drawn: matplotlib is installed, and there are two steps.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    if len(lines) < 2:
        return False
    # The same curves give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "fusedops", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 8), layout="constrained")
        plots = figure.subplots(len(_PLOTS), 1, sharex=True)
        for axes, names in zip(plots, _PLOTS, strict=True):
            for name, colour in zip(names, _COLOURS, strict=False):
                steps, values = _points(lines, name)
                style = {"marker": "o"} if len(steps) < 20 else {}
                axes.plot(steps, values, color=colour, label=name.replace("_", " "), **style)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        plots[-1].set_xlabel("step")
        figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _points(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [
        (line["step"], line[name])
        for line in lines
        if isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
    ]
    return [step for step, _ in points], [value for _, value in points]
