"""Time a training step of each model type of transformers, stock and patched, interleaved.

Types are those of docs/coverage.md, at their own widths with at most two layers, a vocabulary of
1,024 words, 16 experts at most and 2 x 128 tokens. A type with more parameters than --most is left
out. The file is written after each type, so that a run that is stopped keeps what it has; with
--only, rows of other types stay in the file.

    python tools/bench_types.py --dtype bfloat16 --results bench/results
    python tools/bench_types.py --only llama,gemma3_text --task causal
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import coverage_page
import torch
from torch import nn

import fusedops
from fusedops.bench import machine
from fusedops.bench.models import time_steps
from fusedops.runtime import host
from fusedops.runtime.timer import CpuClock, TimingPlan
from fusedops.terminal import files

SLOW = 0.97  # of stock's speed: below it a type is named
ROWS, TOKENS = 2, 128


def inputs_of(model: Any, task: str) -> dict[str, torch.Tensor]:
    """Return a batch of a task with labels, where the model takes them."""
    given = coverage_page.example_inputs(model, task)
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name, value in given.items():
        if value.is_floating_point():
            shape = (ROWS, *value.shape[1:])
            batch[name] = torch.randn(shape, generator=generator).to(model.dtype)
        else:
            batch[name] = torch.randint(5, 1000, (ROWS, TOKENS), generator=generator)
    if task in ("causal", "masked"):
        batch["labels"] = batch[next(iter(batch))]
    elif task == "sequence to sequence":
        batch["labels"] = batch.pop("decoder_input_ids")
    else:
        batch["labels"] = torch.zeros(ROWS, dtype=torch.long)
    return batch


def parameters_of(name: str, auto: str) -> int:
    """Return how many parameters the small model of a type has."""
    model = coverage_page.small_model(name, auto, few=True, or_large=False)
    return sum(parameter.numel() for parameter in model.parameters())


def row(name: str, task: str, auto: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Return the medians of a type in milliseconds, and how many times the patched step is faster.

    Raises:
        Exception: the type does not build, or its step does not run stock.
    """
    torch.manual_seed(0)
    model = coverage_page.small_model(name, auto, "cpu", few=True, or_large=False).to(dtype).train()
    inputs = inputs_of(model, task)
    patched = copy.deepcopy(model)
    fusedops.patch(patched, level="O3")

    def step(trained: nn.Module) -> None:
        trained(**inputs).loss.backward()

    step(model)
    step(patched)
    steps = {"stock": (model, partial(step, model)), "patched": (patched, partial(step, patched))}
    timing = time_steps(steps, CpuClock(), TimingPlan(least=5, most=40, seconds=seconds))
    return {
        "type": name,
        "task": task,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ms": {word: 1e3 * timing.spread(word).median for word in steps},
        "times_faster": vars(timing.ratio("stock", "patched")),
    }


def main() -> None:
    """Measure the types that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--task", choices=list(coverage_page.TASKS), default="causal")
    parser.add_argument("--only", default="", help="types, by commas; default: all")
    parser.add_argument("--most", type=float, default=4e8, help="parameters of a model, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each type")
    parser.add_argument("--results", type=Path, help="folder: <device>/types-<task>-<dtype>.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    host.tune_host()
    # A type that needs more memory than there is fails alone, and does not end the process.
    most = int(0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    mapping, auto = coverage_page.TASKS[arguments.task]
    names = [name for name in arguments.only.split(",") if name] or sorted(mapping)
    here = machine.describe(torch.device("cpu"))
    slug = here["slug"]
    word = arguments.task.replace(" ", "-")
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    file = None
    if arguments.results:
        file = arguments.results / slug / f"types-{word}-{arguments.dtype}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        if arguments.only and file.exists():
            before = json.loads(file.read_text())
            rows = [entry for entry in before["rows"] if entry["type"] not in names]
            left_out = {key: why for key, why in before["left_out"].items() if key not in names}
    for number, name in enumerate(names, 1):
        try:
            count = parameters_of(name, auto)
            if count > arguments.most:
                left_out[name] = f"{count / 1e6:.0f} M parameters"
                continue
            dtype = getattr(torch, arguments.dtype)
            rows.append(row(name, arguments.task, auto, dtype, arguments.seconds))
        except Exception as error:  # another package, values that a config needs
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        finally:
            gc.collect()
            if file:
                ordered = sorted(rows, key=lambda entry: entry["type"])
                files.write_json(file, here | {"rows": ordered, "left_out": left_out})
        ratio = rows[-1]["times_faster"]["median"]
        slow = "  SLOW" if ratio < SLOW else ""
        print(f"[{number}/{len(names)}] {name} {ratio:.2f}{slow}", flush=True)
    below = [entry["type"] for entry in rows if entry["times_faster"]["median"] < SLOW]
    print(f"{len(rows)} types measured, {len(left_out)} left out; below {SLOW}: {below}")
    sys.exit(bool(below))


if __name__ == "__main__":
    main()
