"""Measure what recording the times of the steps costs: steps with and without it, in turn.

    python tools/timings_overhead.py --processes 2

The model has two layers of width 256; the median step and the ratio of neighbouring steps are
printed. Tokenizing the text is part of the first start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fusedops._core import env
from fusedops.launch.processes import StopSignals, initialize_distributed
from fusedops.parallel.comm import collectives
from fusedops.train.builder import build_run
from fusedops.train.config import load_config
from fusedops.train.loop import _timed
from fusedops.train.step import backward, update

WARM_UP = 10


def configuration(folder: str, processes: int, layers: int) -> dict[str, Any]:
    """Return the configuration of a small model on this file's text."""
    sizes = {"hidden_size": 256, "num_layers": layers, "num_heads": 4, "intermediate_size": 1024}
    return {
        "out": f"{folder}/run",
        "steps": 1_000_000,
        "batch": 8 * processes,
        "device": "cpu",
        "model": {"preset": "gpt2", **sizes},
        "data": {"train": [str(Path(__file__).resolve())], "seq_len": 128},
        "log": {"peak_tflops": 1.0, "timings": 5},
        "parallel": {"dp": processes},
    }


def measure(folder: str, processes: int, steps: int, layers: int) -> None:
    """Run pairs of steps, with and without the recorder; print the median of their ratios."""
    config = load_config(configuration(folder, processes, layers))
    with (
        StopSignals(),
        initialize_distributed("cpu") as ranks,
        build_run(config, ranks) as run,
    ):
        recorder, seconds = run.recorder, ([], [])
        for number in range(2 * (steps + WARM_UP)):
            recorded = number % 4 in (1, 2)  # without, with, with, without
            run.recorder = recorder if recorded else None
            began = time.perf_counter()
            with collectives.recorded() as log, _timed(run, log):
                losses = backward(run)
                with run.section("optimizer"):
                    update(run, losses, stop=False)
            run.step += 1
            if number >= 2 * WARM_UP:
                seconds[recorded].append(time.perf_counter() - began)
        run.recorder = recorder
        ratios = [b / a for a, b in zip(*seconds, strict=True)]
        if ranks.rank == 0:
            plain = statistics.median(seconds[0])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{processes} processes, {1e3 * plain:.2f} ms a step: with times "
                f"{100 * (middle - 1):+.2f} % (quartiles {100 * (low - 1):+.2f}, "
                f"{100 * (high - 1):+.2f}), {steps} pairs"
            )


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    if env.launched() is not None or arguments.processes == 1:
        with tempfile.TemporaryDirectory() as folder:
            shared = str(Path(tempfile.gettempdir()) / "timings_overhead")
            place = shared if arguments.processes > 1 else folder
            measure(place, arguments.processes, arguments.steps, arguments.layers)
        return
    from torch.distributed.run import main as torchrun

    torchrun([f"--nproc-per-node={arguments.processes}", "--standalone", *sys.argv])


if __name__ == "__main__":
    main()
