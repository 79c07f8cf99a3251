"""Writes docs/pipeline-*.svg and the table of docs/pipeline.md: what each schedule does when.

    python docs/gen_pipeline.py

Source: ``fusedops.parallel.timeline`` of each schedule, whose forward, gradient of inputs and
gradient of weights take a unit of time each. Where the field has a formula for the bubble or for
the activations that live at a time, the table must agree with it. It stands between two markers;
the rest of the page is written by hand.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from fusedops.parallel import timeline
from fusedops.parallel.pipeline.schedules import SCHEDULES
from fusedops.parallel.pipeline.timeline import Timeline

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "pipeline.md"
MARKERS = "<!-- made by docs/gen_pipeline.py -->", "<!-- end -->"
RANKS, MICROBATCHES = 4, 8


def main() -> None:
    lines = [
        "| `pipeline_schedule` | stages of a rank | bubbles | kept micro-batches, by rank |",
        "|---|---|---|---|",
    ]
    for name, schedule in SCHEDULES.items():
        found = timeline(name, RANKS, MICROBATCHES)
        _check(name, schedule.virtual, found)
        found.save(DOCS / f"pipeline-{name}.svg")
        alive = ", ".join(f"{each:g}" for each in found.alive())
        share = f"{100 * found.bubble():.1f} %"
        lines.append(f"| `{name}` | {schedule.virtual} | {share} | {alive} |")
    begin, end = MARKERS
    table = "\n".join([begin, *lines, end])
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    PAGE.write_text(re.sub(pattern, lambda _: table, PAGE.read_text(), flags=re.DOTALL))


def _check(name: str, virtual: int, found: Timeline) -> None:
    """Raise unless a schedule that has formulae agrees with them."""
    if name in ("gpipe", "1f1b", "interleaved"):
        wanted = (RANKS - 1) / (virtual * MICROBATCHES + RANKS - 1)
        assert math.isclose(found.bubble(), wanted), (name, found.bubble(), wanted)
    if name == "gpipe":
        assert found.alive() == [MICROBATCHES] * RANKS
    if name == "1f1b":
        assert found.alive() == [RANKS - rank for rank in range(RANKS)]


if __name__ == "__main__":
    main()
