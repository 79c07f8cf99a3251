"""What ``fusedops bench models`` measures, and which of its rows are slower than asked for."""

from __future__ import annotations

import itertools
from functools import partial

from fusedops.bench import models as bench
from fusedops.bench import report
from fusedops.bench.model_zoo import FAMILIES, HEADLINE, ModelFamily, ModelSize
from fusedops.bench.results import BenchRecord
from fusedops.bench.runner import BenchRun, BenchSettings, Job
from fusedops.cli.bench import options
from fusedops.terminal import files


def plan_of(family: str, mode: str, size: ModelSize) -> list[tuple[ModelFamily, str, ModelSize]]:
    """Return what to measure, in order."""
    chosen = list(HEADLINE)
    if family:
        names = options.words(family, (*FAMILIES, "all"), "family")
        chosen = list(FAMILIES) if "all" in names else list(dict.fromkeys(names))
    modes = options.words(mode, bench.MODES, "mode")
    plan = [
        (FAMILIES[name], chosen_mode, of)
        for name in chosen
        for chosen_mode in modes
        for of in bench.sizes(FAMILIES[name], chosen_mode, size)
    ]
    if not plan:
        raise files.UserError(
            f"{', '.join(chosen)}: no decoder among them, nothing to measure: add gpt2 to --family"
        )
    return plan


def jobs_of(
    run: BenchRun, plan: list[tuple[ModelFamily, str, ModelSize]], *, fixed: bool
) -> tuple[list[Job], list[str]]:
    """Return what measures each case, and a list that gets what our models compute wrong.

    Unless the size is ``fixed``, what would take minutes on a CPU is measured at a smaller one.
    """
    wrong: list[str] = []

    def measure(case: bench.ModelCase, settings: BenchSettings) -> None:
        result = bench.run_case(case, settings)
        run.rows += result.rows
        run.notes += result.notes
        wrong.extend(result.wrong)

    jobs: list[Job] = []
    for (chosen, of, asked), at in itertools.product(plan, run.dtypes):
        fits = asked if fixed else bench.affordable(of, asked, at, run.device)
        case = bench.ModelCase(chosen, of, fits, at)
        jobs.append((case.title, partial(measure, case)))
    return jobs, wrong


def judge(record: BenchRecord, ratio: float | None) -> bool:
    """Print which rows are slower than asked for; return whether one is."""
    if ratio is None:
        return False
    below, doubtful = bench.slower(record.rows, ratio)
    judged = sum(row.lead is not None for row in record.rows) - len(doubtful)
    for line in report.verdict(below, doubtful, ratio, judged):
        print(line)
    return bool(below)
