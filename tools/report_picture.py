"""Draw the pictures of docs/observe.md: a simulated job with a slow rank, and the memory of a run.

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
from fusedops.train import train  # noqa: E402
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


def train_with_memory(folder: Path) -> None:
    """Train a small model and record what one step allocates."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} plus {n} is {2 * n}.\n" for n in range(400)))
    table = {
        "out": str(folder / "small"),
        "steps": 12,
        "batch": 8,
        "device": "cpu",
        "model": {"preset": "tiny-llama", "num_layers": 6, "hidden_size": 256},
        "data": {"train": [str(text)], "seq_len": 128},
        "log": {"peak_tflops": 1.0, "memory_step": 4},
    }
    train(table)


def draw(browser: str, run: Path, tab: str, height: int, picture: Path) -> None:
    """Write a picture of a tab of a run's report."""
    file = run / "report.html"
    file.write_text(page(run), encoding="utf-8")
    command = (browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    size = (f"--window-size=1200,{height}", "--virtual-time-budget=10000")
    target = (f"--screenshot={picture}", f"file://{file}#{tab}")
    subprocess.run([*command, *size, *target], check=True, capture_output=True)


def main() -> None:
    """Write docs/observe-timeline.png and docs/observe-memory.png."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("there is no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "example"
        folder.mkdir()
        record(folder)
        draw(browser, folder, "Timeline", 1080, ROOT / "docs" / "observe-timeline.png")
        train_with_memory(Path(name))
        draw(browser, Path(name) / "small", "Memory", 1860, ROOT / "docs" / "observe-memory.png")


if __name__ == "__main__":
    main()
