"""Draw the pictures of docs/observe.md: the report of a simulated job with a slow rank.

python tools/report_picture.py          # needs Debian's chromium
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusedops.profiler import RunShape, TimingsWriter  # noqa: E402
from fusedops.profiler.report import METRICS, page  # noqa: E402
from tests.profiler.simulated import Fault, steps  # noqa: E402

SHAPE = RunShape({"pp": 2, "dp": 8, "cp": 1, "tp": 4, "ep": 1})
STEPS = 1000
FAULT = Fault("rank", (37,), "backward", 400, 0.3)


def record(folder: Path) -> None:
    """Write the records of a job of 64 ranks, one of which is slow from step 400 on."""
    writer = TimingsWriter(folder, SHAPE)
    with (folder / METRICS).open("w") as file:
        for step, rows in steps(SHAPE, STEPS, random.Random(1), FAULT):
            writer.write(step, rows)
            line = {"step": step, "loss": 5 * math.exp(-step / 300) + 1}
            file.write(json.dumps(line) + "\n")
    writer.close()


def main() -> None:
    """Write docs/observe-timeline.png."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("there is no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "example"
        folder.mkdir()
        record(folder)
        file = folder / "report.html"
        file.write_text(page(folder), encoding="utf-8")
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--window-size=1200,1080", "--virtual-time-budget=10000"),
                f"--screenshot={ROOT / 'docs' / 'observe-timeline.png'}",
                f"file://{file}#Timeline",
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    main()
