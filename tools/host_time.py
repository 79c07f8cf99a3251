"""What a call costs the processor before the GPU has anything to do, measured without a GPU.

    python tools/host_time.py            # a table
    python tools/host_time.py --json F   # and its rows

Each op is called on CPU tensors that stand for a GPU's (``stand_in_cuda.py``): everything runs but
the launches, which return at once. ``python`` is a call whose launcher runs in Python, as the first
two of a signature do, ``plan`` one that repeats a recorded plan. Left out are what a launch itself
costs in the driver (2 to 4 us on a GPU) and what CUDA's caching allocator costs beside ``malloc``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

import stand_in_cuda  # noqa: E402
import torch  # noqa: E402

import fusedops  # noqa: E402

CALLS, TURNS = 200, 15


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls that are timed, by name: small sizes, whose kernels take a few us."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    rows, weight, bias = random(64, 1024), random(1024), random(1024)
    query, key, value = (random(1, 16, 256, 128) for _ in range(3))
    token, keys, values = random(4, 32, 1, 128), random(4, 8, 1024, 128), random(4, 8, 1024, 128)
    lengths = torch.tensor([100, 1000, 512, 7])
    wide, matrix, gate = random(64, 4096), random(4096, 1024), random(64, 4096)
    logits, targets = random(64, 32000), torch.randint(0, 32000, (64,))
    return {
        "rms_norm": lambda: fusedops.rms_norm(rows, (1024,), weight),
        "layer_norm": lambda: fusedops.layer_norm(rows, (1024,), weight, bias),
        "add_rms_norm": lambda: fusedops.add_rms_norm(rows, rows, (1024,), weight),
        "swiglu": lambda: fusedops.swiglu(wide, gate),
        "linear_act": lambda: fusedops.linear_act(rows, matrix, activation="gelu"),
        "cross_entropy": lambda: fusedops.cross_entropy(logits, targets),
        "attention": lambda: fusedops.attention(query, key, value, is_causal=True),
        "attention_decode": lambda: fusedops.attention_decode(token, keys, values, lengths),
    }


def microseconds(call: Callable[[], object]) -> float:
    """Return the time of one of many calls in a row."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def measure() -> list[dict[str, object]]:
    """Return a row per call: medians over turns, in which the two ways take turns."""
    rows: list[dict[str, object]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        stand_in_cuda.installed(Path(folder), notes=False) as gpu,
        gpu.plans(),
        torch.no_grad(),
    ):
        for name, call in calls().items():
            for _ in range(3):
                call()
            python, plan = [], []
            for _ in range(TURNS):
                with fusedops.use_backend("triton"):
                    python.append(microseconds(call))
                plan.append(microseconds(call))
            counted = fusedops.counters().get((name, "triton"), 0)
            if counted < CALLS * TURNS * 2:
                raise RuntimeError(f"{name}: {counted} calls ran on Triton")
            rows.append(
                {
                    "op": name,
                    "python_us": round(statistics.median(python), 1),
                    "plan_us": round(statistics.median(plan), 1),
                }
            )
            fusedops.reset_counters()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows = measure()
    print(f"{'op':<20}{'python, us':>12}{'plan, us':>10}")
    for row in rows:
        print(f"{row['op']:<20}{row['python_us']:>12}{row['plan_us']:>10}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
