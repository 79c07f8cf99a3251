"""Which rows ``fusedops bench`` measures of ops and of models, and how two records differ.

``--shape rows=4096,columns=1024`` is a size of the user's own. The names of the dimensions are the
parameters of the function that makes the op's benchmark rows (``Spec.bench_case``), their types
those of its annotations.
"""

from __future__ import annotations

import inspect
import itertools
import re
import types
import typing
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusedops import specs
from fusedops._core import backends
from fusedops.bench import models, report
from fusedops.bench.cases import host_overhead, run_case
from fusedops.bench.compare import RecordComparison, RowChange
from fusedops.bench.layers import GROUPS, LAYERS, members
from fusedops.bench.model_zoo import FAMILIES, HEADLINE, ModelFamily, ModelSize
from fusedops.bench.results import BenchRecord, dtype_name, save_json
from fusedops.bench.runner import BenchRun, BenchSettings, Job
from fusedops.cli.bench import options
from fusedops.specs import BenchCase, Spec
from fusedops.terminal import files


def specs_of(ops: list[str]) -> list[Spec]:
    """Return the specs of ops, of layers, and of all in a group, in the order of the names."""
    known = specs.all_specs()
    for name in ops:
        if name in backends.op_names() and name not in known:
            raise files.UserError(f"op {name!r} has no spec: write fusedops/specs/{name}.py")
        options.check_known(name, (*known, *LAYERS, *GROUPS), "op")
    chosen = [member for name in ops for member in members(name, known)]
    return [{**known, **LAYERS}[name] for name in dict.fromkeys(chosen or known)]


def cases_of(
    chosen: list[Spec], sizes: str, all_sizes: bool, quick: bool, shapes: list[str]
) -> list[tuple[Spec, BenchCase]]:
    """Return what to measure, in order."""
    if shapes:
        return [(spec, case_of(spec, text)) for spec in chosen for text in shapes]
    every = [(spec, case) for spec in chosen for case in spec.bench_cases]
    if sizes:
        exact = [(spec, case) for spec, case in every if case.label == sizes]
        if exact:
            return exact
        known = dict.fromkeys(_size(case) for _, case in every)
        try:
            requested = options.words(sizes, known, "sizes")
        except files.UserError as error:
            own = ""
            if len(chosen) == 1 and chosen[0].bench_case:
                own = f"; a size of your own is --shape {example(chosen[0])}"
            raise files.UserError(f"{error}{own}") from None
        return [(spec, case) for spec, case in every if _size(case) in requested]
    if all_sizes:
        return every
    plan = []
    for spec in chosen:
        cases = [case for case in spec.bench_cases if case.headline] or spec.bench_cases[:1]
        plan += [(spec, case) for case in (cases[:1] if quick else cases)]
    return plan


def _size(case: BenchCase) -> str:
    """Return the size alone of a label such as ``4096x1024, dropout 0.1``."""
    return re.split(r"[ ,]", case.label)[0]


def op_jobs(run: BenchRun, plan: list[tuple[Spec, BenchCase]], json_file: Path | None) -> list[Job]:
    """Return what measures each op, size and dtype.

    After each the file has all rows so far: a process that runs out of memory is not asked.
    """
    overhead: dict[tuple[str, torch.dtype], dict[tuple[str, str], float]] = {}

    def measure(spec: Spec, case: BenchCase, dtype: torch.dtype, settings: BenchSettings) -> None:
        if (spec.name, dtype) not in overhead:
            settings.report("host overhead")
            overhead[spec.name, dtype] = host_overhead(spec, dtype, settings)
        rows, notes = run_case(spec, case, dtype, settings, overhead[spec.name, dtype])
        run.rows += rows
        run.notes += notes
        if json_file is not None:
            with suppress(OSError, files.UserError):  # reported when all is written
                save_json(json_file, run.record())

    return [
        (f"{spec.name} {case.label} {dtype_name(dtype)}", partial(measure, spec, case, dtype))
        for spec, case in plan
        for dtype in run.dtypes
    ]


def show_verdict(verdict: RecordComparison, allowed: float) -> None:
    """Print the rows that changed."""
    judged = [change for change in verdict.changes if change.after.ours]
    print(f"{len(judged)} rows of fusedops compared, {100 * allowed:g}% slower allowed")
    for word, changes in (
        ("slower", verdict.slower),
        ("faster", verdict.faster),
        ("not judged, disturbed while measured", verdict.doubtful),
    ):
        for change in changes:
            print(f"{word}: {_line(change)}")
    for key in verdict.missing:
        print(f"only in the first record: {' '.join(key)}")
    if abs(verdict.drift) > 0.02:
        print(
            f"note: the rows that are not ours moved by {100 * verdict.drift:+.0f}% (median): "
            "the machine or torch changed too"
        )
    if not verdict.slower:
        print("no row became slower beyond its spread")


def _line(change: RowChange) -> str:
    before, after = change.before, change.after
    return (
        f"{' '.join(after.key)}: {before.median_us:.1f} -> {after.median_us:.1f} us "
        f"({100 * change.slower_by:+.1f}%; middle halves {before.q1_us:.1f}-{before.q3_us:.1f} and "
        f"{after.q1_us:.1f}-{after.q3_us:.1f})"
    )


def case_of(spec: Spec, text: str) -> BenchCase:
    """Return the benchmark row of an op at a size such as ``rows=4096,columns=1024``."""
    if spec.bench_case is None:
        raise files.UserError(f"{spec.name} has no --shape: --sizes chooses one of its sizes")
    parameters = _parameters(spec)
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise files.UserError(f"--shape must be {example(spec)}, got {word.strip()!r}")
        options.check_known(name, parameters, f"dimension of {spec.name}")
        if name in values:
            raise files.UserError(f"--shape has {name} twice: give it once")
        _, expected, parse = _KINDS[_kind(parameters[name])]
        try:
            values[name] = parse(value)
        except (KeyError, ValueError):
            raise files.UserError(f"--shape: {name} must be {expected}, got {value!r}") from None
    missing = [name for name in parameters if name not in values and _required(parameters[name])]
    if missing:
        raise files.UserError(
            f"--shape of {spec.name} lacks {', '.join(missing)}: it takes {example(spec)}"
        )
    try:
        return spec.bench_case(**values)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise files.UserError(f"--shape {text} of {spec.name}: {error}") from None


def example(spec: Spec) -> str:
    """Return what an op takes, as a user writes it; what may be left out is in brackets."""
    words = []
    for name, parameter in _parameters(spec).items():
        word = f"{name}={_KINDS[_kind(parameter)][0]}"
        words.append(word if _required(parameter) else f"[{word}]")
    return ",".join(words)


def _parameters(spec: Spec) -> dict[str, inspect.Parameter]:
    if spec.bench_case is None:
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(spec.bench_case, eval_str=True).parameters.values()
    return {one.name: one for one in parameters if one.kind in named}


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _kind(parameter: inspect.Parameter) -> Any:
    """Return the type without ``None``, and ``tuple`` for a tuple of sizes."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return typing.get_origin(annotation) or annotation


def _extent(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise ValueError
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_extent, text.split("x")))


# By the type of a dimension: how a user writes it, what it must be, and how it is read.
_KINDS: dict[Any, tuple[str, str, Any]] = {
    int: ("N", "an integer from 1 on", _extent),
    tuple: ("NxN", "sizes from 1 on, such as 16x64", _sizes),
    float: ("0.1", "a number", float),
    bool: ("true", "true or false", {"true": True, "false": False}.__getitem__),
    str: ("WORD", "a word", str),
}


def plan_of(family: str, mode: str, size: ModelSize) -> list[tuple[ModelFamily, str, ModelSize]]:
    """Return what to measure, in order."""
    chosen = list(HEADLINE)
    if family:
        names = options.words(family, (*FAMILIES, "all"), "family")
        chosen = list(FAMILIES) if "all" in names else list(dict.fromkeys(names))
    modes = options.words(mode, models.MODES, "mode")
    plan = [
        (FAMILIES[name], chosen_mode, of)
        for name in chosen
        for chosen_mode in modes
        for of in models.sizes(FAMILIES[name], chosen_mode, size)
    ]
    if not plan:
        raise files.UserError(
            f"{', '.join(chosen)}: no decoder among them, nothing to measure: add gpt2 to --family"
        )
    return plan


def model_jobs(
    run: BenchRun, plan: list[tuple[ModelFamily, str, ModelSize]], *, fixed: bool
) -> tuple[list[Job], list[str]]:
    """Return what measures each case, and a list that gets what our models compute wrong.

    Unless the size is ``fixed``, what would take minutes on a CPU is measured at a smaller one.
    """
    wrong: list[str] = []

    def measure(case: models.ModelCase, settings: BenchSettings) -> None:
        result = models.run_case(case, settings)
        run.rows += result.rows
        run.notes += result.notes
        wrong.extend(result.wrong)

    jobs: list[Job] = []
    for (chosen, of, asked), at in itertools.product(plan, run.dtypes):
        fits = asked if fixed else models.affordable(of, asked, at, run.device)
        case = models.ModelCase(chosen, of, fits, at)
        jobs.append((case.title, partial(measure, case)))
    return jobs, wrong


def judge(record: BenchRecord, ratio: float | None) -> bool:
    """Print which rows are slower than asked for; return whether one is."""
    if ratio is None:
        return False
    below, doubtful = models.slower(record.rows, ratio)
    judged = sum(row.lead is not None for row in record.rows) - len(doubtful)
    for line in report.verdict(below, doubtful, ratio, judged):
        print(line)
    return bool(below)
