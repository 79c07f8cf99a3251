"""The command lines of ``fusedops bench`` and ``bench compare``."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fusedops.cli import output
from fusedops.cli.bench import communication, memory, models, options, small_models
from fusedops.cli.default_group import DefaultGroup
from fusedops.terminal import files

if TYPE_CHECKING:
    import torch

    from fusedops.bench.compare import RecordComparison, RowChange
    from fusedops.bench.runner import BenchRun, BenchSettings, Job
    from fusedops.specs import BenchCase, Spec


app = typer.Typer(
    cls=DefaultGroup,
    add_completion=False,
    help="Measure ops and whole models, compare two measurements.",
)


@app.command(
    epilog="Also `fusedops bench models` (whole models) and `fusedops bench compare BEFORE.json "
    "AFTER.json` (which rows became slower); all have --help."
)
def run(
    ops: Annotated[
        list[str] | None, Argument(help="Ops, moe_layer, or moe for all of both; none: every op.")
    ] = None,
    every: Annotated[bool, Option("--all", help="All ops.")] = False,
    dtype: options.Dtypes = "float32,bfloat16",
    device: options.Device = "cpu",
    sizes: Annotated[str, Option(help="Such as 4096x1024,16x768; default: headline ones.")] = "",
    all_sizes: Annotated[bool, Option("--all-sizes", help="Every size of the specs.")] = False,
    shape: Annotated[
        list[str] | None, Option(help="A size by dimensions: rows=4096,columns=1024; repeatable.")
    ] = None,
    variants: Annotated[
        str, Option(help="Comma-separated: compile, fusedops, fusedops:cpp... eager runs always.")
    ] = "",
    all_backends: Annotated[
        bool, Option("--all-backends", help="Also the reference, and the chosen backend by name.")
    ] = False,
    no_compile: Annotated[bool, Option("--no-compile", help="Leave torch.compile out.")] = False,
    quick: Annotated[bool, Option("--quick", help="Few samples, no torch.compile.")] = False,
    seconds: Annotated[float, options.seconds_per("size, direction and dtype")] = 1.5,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    json_file: options.JsonRecord = None,
    csv_file: options.CsvRows = None,
    svg_file: options.SvgFile = None,
    results: Annotated[
        Path | None,
        Option(help="Write FOLDER/<device>/<op>-<dtype>.csv, as bench/results has them."),
    ] = None,
) -> None:
    """Measure ops against eager torch, torch.compile and, in a checkout, other libraries.

    Forward, backward and both; time, rate, share of this machine's measured limit, host overhead,
    peak memory and error against float64. Variants are interleaved; results are medians without
    disturbed samples: bench/README.md has the protocol.
    """
    with output.checked(json_file, csv_file, svg_file, results=results):
        if every and ops:
            raise files.UserError("name ops or say --all, not both")
        conditions = options.conditions(dtype, device, seconds, threads, allocator, quick=quick)
        if shape and (not ops or sizes or all_sizes):
            raise files.UserError("--shape needs the names of ops, without --sizes or --all-sizes")
        specs = _specs(ops or [])
        plan = _cases(specs, sizes, all_sizes, quick, shape or [])
        from fusedops.bench.contenders import names
        from fusedops.bench.runner import BenchRun

        known = dict.fromkeys(name for spec in specs for name in names(spec))
        only = options.words(variants, known, "variants") if variants else []
        compiled = not (no_compile or quick or (only and "compile" not in only))
        measured = BenchRun(conditions, conditions.timing(), compiled=compiled)
        jobs = _jobs(measured, plan, json_file)
        complete = measured.run(jobs, only=only, all_backends=all_backends)
        outputs = json_file, csv_file, svg_file, results
        output.deliver_record(measured.record(), *outputs, name="{}-{}.csv", complete=complete)


@app.command()
def compare(
    before: Annotated[Path, Argument(help="The record to compare with.")],
    after: Annotated[Path, Argument(help="The record that is judged.")],
    fail_if_slower: Annotated[str, Option(help="Allowed slowdown of a row, such as 5%.")] = "5%",
    allow_different: Annotated[
        bool, Option("--allow-different", help="Compare even if machine, settings or dtype differ.")
    ] = False,
) -> None:
    """List the rows of fusedops that became slower beyond their spread; exit with 1 if any did."""
    from fusedops.bench.compare import compare as judge
    from fusedops.bench.compare import parse_share
    from fusedops.bench.results import load_json

    with output.checked():
        allowed = parse_share(fail_if_slower)
        verdict = judge(
            load_json(before), load_json(after), allowed=allowed, allow_different=allow_different
        )
    _show_verdict(verdict, allowed)
    raise typer.Exit(1 if verdict.slower else 0)


app.command(cls=models.Command)(models.models)
app.command()(memory.memory)
app.command()(memory.arena)
app.command()(communication.communication)
app.command()(small_models.device)
app.command()(small_models.scaling)
app.command()(small_models.generate)


def _specs(ops: list[str]) -> list[Spec]:
    """Return the specs of ops, of layers, and of all in a group, in the order of the names."""
    from fusedops._core import backends
    from fusedops.bench.layers import GROUPS, LAYERS, members
    from fusedops.specs import all_specs

    known = all_specs()
    for name in ops:
        if name in backends.op_names() and name not in known:
            raise files.UserError(f"op {name!r} has no spec: write fusedops/specs/{name}.py")
        options.check_known(name, (*known, *LAYERS, *GROUPS), "op")
    chosen = [member for name in ops for member in members(name, known)]
    return [{**known, **LAYERS}[name] for name in dict.fromkeys(chosen or known)]


def _cases(
    specs: list[Spec], sizes: str, all_sizes: bool, quick: bool, shapes: list[str]
) -> list[tuple[Spec, BenchCase]]:
    """Return what to measure, in order."""
    from fusedops.cli.bench.shape import case_of, example

    if shapes:
        return [(spec, case_of(spec, text)) for spec in specs for text in shapes]
    every = [(spec, case) for spec in specs for case in spec.bench_cases]
    if sizes:
        exact = [(spec, case) for spec, case in every if case.label == sizes]
        if exact:
            return exact
        known = dict.fromkeys(_size(case) for _, case in every)
        try:
            requested = options.words(sizes, known, "sizes")
        except files.UserError as error:
            own = ""
            if len(specs) == 1 and specs[0].bench_case:
                own = f"; a size of your own is --shape {example(specs[0])}"
            raise files.UserError(f"{error}{own}") from None
        return [(spec, case) for spec, case in every if _size(case) in requested]
    if all_sizes:
        return every
    plan = []
    for spec in specs:
        cases = [case for case in spec.bench_cases if case.headline] or spec.bench_cases[:1]
        plan += [(spec, case) for case in (cases[:1] if quick else cases)]
    return plan


def _size(case: BenchCase) -> str:
    """Return the size alone of a label such as ``4096x1024, dropout 0.1``."""
    return re.split(r"[ ,]", case.label)[0]


def _jobs(run: BenchRun, plan: list[tuple[Spec, BenchCase]], json_file: Path | None) -> list[Job]:
    """Return what measures each op, size and dtype.

    After each the file has all rows so far: a process that runs out of memory is not asked.
    """
    from fusedops.bench.cases import host_overhead, run_case
    from fusedops.bench.results import dtype_name, save_json

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


def _show_verdict(verdict: RecordComparison, allowed: float) -> None:
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
