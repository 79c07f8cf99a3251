"""Times the optimizers against torch's fused AdamW: a step alone, and what a backward leaves.

    python bench/optimizers.py                       # a table
    python bench/optimizers.py --csv bench/results/cpu-zen4/optimizers.csv

| row | baseline | fusedops |
|---|---|---|
| ``float32`` | ``torch.optim.AdamW(fused=True)`` | ``optim.AdamW`` |
| ``mixed`` | that, and what bfloat16 gradients beside float32 masters need: casts, norm, clip | \
``optim.AdamW(master_weights=True, max_norm=...)`` |
| ``remaining`` | ``step`` of ``OffloadedAdamW(overlap=False)`` | ``step`` with ``overlap=True`` |

``single`` beside the first is torch's loop over parameters, and ``deepspeed`` beside the first two
DeepSpeed's CPUAdam, in torch's place, where it is installed and builds; else a line says why not.
Rounds are interleaved by
``runtime/timer.py``; a ratio is the median of those of single rounds. The two steps that clip do so
at every step. In ``remaining`` a sample is ``step`` alone, after a forward and a backward of the
same model; copies are those within one memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedops.bench import machine
from fusedops.bench.tables import csv_text
from fusedops.optim import AdamW, OffloadedAdamW
from fusedops.runtime import timer
from fusedops.terminal import files

# The parameters of two layers of a transformer of 1536, with their biases and norms.
HIDDEN = 1536
SHAPES = [
    shape
    for _ in range(2)
    for shape in (
        (3 * HIDDEN, HIDDEN),
        (3 * HIDDEN,),
        (HIDDEN, HIDDEN),
        (HIDDEN,),
        (HIDDEN,),
        (4 * HIDDEN, HIDDEN),
        (4 * HIDDEN,),
        (HIDDEN, 4 * HIDDEN),
        (HIDDEN,),
    )
]
MAX_NORM = 1.0


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    for param in params:
        param.grad = (torch.randn(param.shape) * 1e-3).to(dtype)
    return params


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    return lambda _: optimizer.step()


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def fused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(params, fused=True)


def deepspeeds() -> Make | None:
    """Return what makes DeepSpeed's CPUAdam; ``None``, and a line, where there is none."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made = DeepSpeedCPUAdam([nn.Parameter(torch.ones(8))], adamw_mode=True)
        del made  # it was built
    except Exception as error:  # of a compiler, of a header, of an import: any
        words = str(error).strip().splitlines() or [""]
        print(f"no row of DeepSpeed's CPUAdam: {type(error).__name__}: {words[-1]}", flush=True)
        return None
    return lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, weight_decay=1e-2)


def mixed_by_hand(make: Make = fused) -> Callable[[Any], None]:
    """Return the step that users of torch write for bfloat16 parameters with float32 masters."""
    low = parameters(torch.bfloat16)
    masters = [nn.Parameter(param.detach().float()) for param in low]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = make(masters)

    def run(_: Any) -> None:
        with torch.no_grad():
            torch._foreach_copy_([each.grad for each in masters], [each.grad for each in low])
            torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
            optimizer.step()
            torch._foreach_copy_(low, masters)

    return run


def steps_alone() -> dict[str, list[timer.Variant]]:
    float32 = [
        timer.Variant("torch", step_of(fused(parameters(torch.float32)))),
        timer.Variant("fusedops", step_of(AdamW(parameters(torch.float32)))),
        timer.Variant(
            "single", step_of(torch.optim.AdamW(parameters(torch.float32), foreach=False))
        ),
    ]
    ours = AdamW(parameters(torch.bfloat16), master_weights=True, max_norm=MAX_NORM)
    mixed = [
        timer.Variant("torch", mixed_by_hand()),
        timer.Variant("fusedops", step_of(ours)),
    ]
    theirs = deepspeeds()
    if theirs is not None:
        alone = step_of(theirs(parameters(torch.float32)))
        float32.append(timer.Variant("deepspeed", alone))
        mixed.append(timer.Variant("deepspeed", mixed_by_hand(theirs)))
    return {"float32": float32, "mixed": mixed}


def after_backward() -> dict[str, list[timer.Variant]]:
    variants = []
    for name, overlap in (("torch", False), ("fusedops", True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(12))).bfloat16()
        optimizer = OffloadedAdamW(
            model.parameters(), overlap=overlap, max_norm=1e9, bucket_bytes=8 << 20
        )
        batch = torch.randn(512, HIDDEN).bfloat16()

        def backward(model: nn.Module = model, batch: torch.Tensor = batch) -> None:
            model.zero_grad()
            model(batch).float().square().mean().backward()

        variants.append(timer.Variant(name, step_of(optimizer), backward))
    return {"remaining": variants}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--csv", type=Path)
    arguments.add_argument("--seconds", type=float, default=20.0, help="per row")
    given = arguments.parse_args()
    plan = timer.TimingPlan(least=15, most=200, seconds=given.seconds)
    here = {
        "processor": machine.machine(torch.device("cpu")).name,
        "torch": torch.__version__,
        "commit": machine.git_commit().get("commit", ""),
    }
    rows = []
    for make in (steps_alone, after_backward):
        for name, variants in make().items():
            timing = timer.measure(variants, timer.clock_for(torch.device("cpu")), plan)
            for variant in variants:
                ratio = timing.ratio("torch", variant.name)
                rows.append(
                    {
                        "row": name,
                        "variant": variant.name,
                        "median_ms": f"{1e3 * timing.spread(variant.name).median:.3f}",
                        "times_baseline": f"{ratio.median:.3f}",
                        "q1": f"{ratio.q1:.3f}",
                        "q3": f"{ratio.q3:.3f}",
                        "trusted": timing.trusted(variant.name),
                        **here,
                    }
                )
                print(" ".join(f"{key}={rows[-1][key]}" for key in list(rows[-1])[:7]), flush=True)
    if given.csv:
        files.make_folder(given.csv.parent)
        files.write_text(given.csv, csv_text(rows, rows[0]))


if __name__ == "__main__":
    main()
