"""The command lines of ``fusedops bench``; what they measure and show is in the other files here.

Functions import what they use: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.cli.errors import start_processes
from fusedops.terminal import files
from fusedops.terminal.progress import activity, sigterm_interrupts, steps
from fusedops.terminal.sizes import parse_bytes

app = typer.Typer(
    cls=options.DefaultGroup,
    add_completion=False,
    help="Measure ops and whole models, compare two measurements.",
)
# Of our rows to the fastest other: what two runs on a quiet machine differ by is below 3 %.
RATIO = 0.97
_JUDGE = "--fail-if-slower"
SlowestRatio = Annotated[
    float | None,
    Option(
        _JUDGE,
        metavar="[RATIO]",
        min=0.0,
        help=f"Exit with 1 when ours is below this ratio of the fastest other; {RATIO} alone.",
    ),
]


class Command(typer.core.TyperCommand):
    """The command, whose ``--fail-if-slower`` may stand without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the number in where it is left out, and let click do the rest."""
        filled: list[str] = []
        for word, following in zip(args, [*args[1:], ""], strict=True):
            filled.append(word)
            if word == _JUDGE and (not following or following.startswith("-")):
                filled.append(str(RATIO))
        return super().parse_args(ctx, filled)


@app.command(
    cls=Command,
    epilog="Also `fusedops bench models` (whole models) and `fusedops bench compare BEFORE.json "
    "AFTER.json` (which rows became slower); all have --help.",
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
    fail_if_slower: SlowestRatio = None,
    json_file: options.JsonRecord = None,
    csv_file: options.CsvRows = None,
    svg_file: options.SvgFile = None,
    results: Annotated[
        Path | None, Option(help="Write FOLDER/<device>/<op>-<dtype>.csv, as bench/results.")
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
        from fusedops.bench.contenders import names
        from fusedops.bench.runner import BenchRun
        from fusedops.cli.bench import rows

        specs = rows.specs_of(ops or [])
        plan = rows.cases_of(specs, sizes, all_sizes, quick, shape or [])
        known = dict.fromkeys(name for spec in specs for name in names(spec))
        only = options.words(variants, known, "variants") if variants else []
        compiled = not (no_compile or quick or (only and "compile" not in only))
        measured = BenchRun(conditions, conditions.timing(), compiled=compiled)
        jobs = rows.op_jobs(measured, plan, json_file)
        complete = measured.run(jobs, only=only, all_backends=all_backends)
        outputs = json_file, csv_file, svg_file, results
        record = measured.record()
        output.deliver_record(record, *outputs, name="{}-{}.csv", complete=complete)
    if rows.judge(record, fail_if_slower):
        raise typer.Exit(1)


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
    from fusedops.bench import compare as judge
    from fusedops.bench.results import load_json
    from fusedops.cli.bench import rows

    with output.checked():
        allowed = judge.parse_share(fail_if_slower)
        records = load_json(before), load_json(after)
        verdict = judge.compare(*records, allowed=allowed, allow_different=allow_different)
    rows.show_verdict(verdict, allowed)
    raise typer.Exit(1 if verdict.slower else 0)


@app.command(cls=Command)
def models(
    family: Annotated[str, Option(help="Comma-separated: gpt2, t5...; all; default: seven.")] = "",
    mode: Annotated[str, Option(help="Comma-separated modes.")] = "training,forward,decoding",
    dtype: options.Dtypes = "float32,bfloat16,float16",
    device: options.Device = "cpu",
    hidden: options.SmallHidden = 512,
    layers: options.Layers = 4,
    tokens: Annotated[
        str, Option(help="Sequences x tokens (decoding: prompt); default 4x256, CPU float16 1x64.")
    ] = "",
    steps: Annotated[int, Option(min=1, help="Tokens that decoding generates.")] = 32,
    compiled: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="torch.compile too; default: not on a CPU."),
    ] = None,
    calibrate: Annotated[bool, Option("--calibrate", help="Patch with calibrate=True.")] = False,
    quick: Annotated[bool, Option("--quick", help="Few samples, no memory.")] = False,
    seconds: Annotated[float, options.seconds_per("model, mode and dtype")] = 8.0,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    fail_if_slower: SlowestRatio = None,
    json_file: options.JsonRecord = None,
    csv_file: options.CsvRows = None,
    svg_file: options.SvgFile = None,
    results: Annotated[
        Path | None, Option(help="Write FOLDER/<device>/models-<family>-<dtype>.json.")
    ] = None,
) -> None:
    """Measure whole models, interleaved in one process: stock, torch.compile of it, and patched.

    Values are compared first, with float64: a wrong row of ours is named without a time, and the
    command exits with 1. Weights are random, nothing is downloaded: docs/bench_models.md.
    """
    with output.checked(json_file, csv_file, svg_file, results=results):
        conditions = options.conditions(dtype, device, seconds, threads, allocator, quick=quick)
        size = options.model_size(hidden, layers, tokens, min(steps, 8) if quick else steps)
        if compiled is None:
            compiled = conditions.device.type != "cpu"
        from fusedops.cli.bench import rows

        plan = rows.plan_of(family, mode, size)
        patched = f"fusedops.patch(model{', calibrate=True, example=batch' * calibrate})"
        run = rows.BenchRun(conditions, conditions.timing(3, 7), compiled=compiled, patch=patched)
        jobs, wrong = rows.model_jobs(run, plan, fixed=bool(tokens))
        complete = run.run(jobs, memory=not quick, calibrate=calibrate)
        run.notes += [f"WRONG: {error}" for error in wrong]
        record = run.record()
        outputs = json_file, csv_file, svg_file, results
        output.deliver_record(record, *outputs, name="models-{}-{}.json", complete=complete)
    failed = rows.judge(record, fail_if_slower)
    if wrong or failed:
        raise typer.Exit(1)


@app.command()
def memory(
    family: Annotated[str, Option(help="Comma-separated: gpt2, llama, bert...")] = "gpt2",
    dtype: options.Dtypes = "float32",
    device: options.Device = "cpu",
    hidden: options.SmallHidden = 512,
    layers: Annotated[int, Option(min=2, help="Number of layers.")] = 4,
    tokens: options.Tokens = "4x256",
    seconds: Annotated[float, options.seconds_per("model and dtype")] = 20.0,
    threads: options.Threads = 0,
    allocator: options.Allocator = "tuned",
    json_file: options.JsonRows = None,
    svg_file: Annotated[Path | None, Option("--svg", help="Draw the first row's steps.")] = None,
) -> None:
    """Measure a step of training under memory policies: bytes, and time against the plain step.

    All variants are copies of one patched model, and are interleaved. A policy that changes a bit
    of the loss or of a gradient is named, and the command exits with 1: docs/memory.md.
    """
    with output.checked(json_file, svg_file):
        conditions = options.conditions(dtype, device, seconds, threads, allocator)
        size = options.model_size(hidden, layers, tokens)
        from fusedops.cli.bench import memory_rows

        rows = memory_rows.measure_policies(family, size, conditions, json_file, svg_file)
    if not all(row.same_bits for row in rows):
        raise typer.Exit(1)


@app.command()
def arena(
    sources: Annotated[
        list[Path] | None, Argument(metavar="FILES...", help="CSV files: id,lower,upper,size.")
    ] = None,
    capacity: Annotated[int | None, Option(min=0, help="Bytes that are few enough.")] = None,
    alignment: Annotated[int, Option(min=1, help="Alignment of offsets.")] = 1,
    seconds: Annotated[float, options.seconds_per("file, or process of --step", most=3600)] = 1.0,
    step: Annotated[bool, Option("--step", help="Time a step with and without an arena.")] = False,
    family: Annotated[str, Option(help="Model family of --step.")] = "gpt2",
    dtype: Annotated[str, Option(help="Dtype of the weights.")] = "bfloat16",
    hidden: options.Hidden = 512,
    layers: options.Layers = 4,
    tokens: options.Tokens = "4x256",
    threads: options.Threads = 0,
    processes: Annotated[int, Option(min=1, help="Fresh processes of --step.")] = 5,
    patched: Annotated[bool, Option("--patched", help="Fuse the model of --step.")] = False,
    json_file: Annotated[Path | None, Option("--json", help="Write rows and offsets.")] = None,
    svg_file: Annotated[Path | None, Option("--svg", help="Draw the first file's buffers.")] = None,
) -> None:
    """Place buffers of known lifetimes in one block, and compare its size with the lower bound.

    A file has a line for each buffer, which lives from lower up to, but not including, upper.
    With --step no file is read: a training step is timed with and without an arena, interleaved,
    with the system's allocator, in fresh processes. docs/arena.md.
    """
    with files.one_line_errors():
        output.check_outputs(json_file, svg_file)
        if step == bool(sources):
            raise files.UserError("fusedops bench arena needs either FILES or --step")
        from fusedops.cli.bench import memory_rows

        if step:
            size = options.model_size(hidden, layers, tokens)
            conditions = options.conditions(dtype, "cpu", seconds, threads, "system")
            result = memory_rows.steps_of(family, size, conditions, processes, patched=patched)
        else:
            result = memory_rows.placements(sources or [], capacity, alignment, seconds)
        drawn = output.text_file(svg_file, result.picture)
        output.deliver(result.record, json_file, result.show, drawn)
    if not result.same_bits:
        raise typer.Exit(1)


@app.command()
def communication(
    ranks: Annotated[int, Option(min=2, help="Processes on this machine.")] = 2,
    collectives: Annotated[str, Option(help="Comma-separated names; default: all.")] = "",
    backends: Annotated[str, Option(help="gloo, shared_memory, nccl; default: all.")] = "",
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    least: Annotated[str, Option(help="Smallest size.")] = "1KiB",
    most: Annotated[str, Option(help="Largest size.")] = "64MiB",
    seconds: Annotated[float, options.seconds_per("row", most=60)] = 0.25,
    links: Annotated[bool, Option("--links", help="Also measure pairs of ranks.")] = False,
    json_file: Annotated[
        Path | None, Option("--json", help="Write rows and curves, which the planner reads.")
    ] = None,
    svg_file: Annotated[Path | None, Option("--svg", help="Draw bus bandwidths.")] = None,
    fit: Annotated[Path | None, Option(help="Fit times of a CSV file instead.")] = None,
    predict: Annotated[Path | None, Option(help="With --fit: a CSV file of sizes.")] = None,
    out: Annotated[Path | None, Option(help="With --predict: the file to write.")] = None,
) -> None:
    """Measure every collective of the stack by size, and fit latency and bandwidth.

    Sizes and bandwidths follow the conventions of nccl-tests. On several machines, start it on each
    with torchrun. docs/communication.md.
    """
    with output.checked(json_file, svg_file, out):
        if fit is None and (predict is not None or out is not None):
            raise files.UserError("--predict and --out need --fit FILE.csv")
        from fusedops.bench import communication as bench
        from fusedops.cli.bench import communication_rows
        from fusedops.launch.processes import initialize_distributed

        if fit is not None:
            communication_rows.fit(fit, predict, out)
            return
        names = list(bench.COLLECTIVES)
        if collectives:
            names = options.words(collectives, bench.COLLECTIVES, "collectives")
        chosen = options.words(backends, bench.BACKENDS, "backends") if backends else []
        with files.user_errors(ValueError):
            bytes_of = bench.sizes(parse_bytes(least), parse_bytes(most))
        if not bytes_of:
            raise files.UserError(
                f"no power of two lies from --least {least} to --most {most}: make --most larger"
            )
        start_processes(ranks)
        with files.user_errors(RuntimeError), initialize_distributed(device) as here:
            first, chosen = here.rank == 0, chosen or bench.usual_backends(here)
            with steps(len(chosen) * len(names)) if first else nullcontext() as progress:
                report = progress.done if progress else lambda text: None
                rows = bench.measure(here, chosen, names, bytes_of, seconds, report)
            with activity("links of every pair of ranks", visible=first):
                pairs = bench.links(here, chosen[0], bytes_of[-1]) if links else []
            if first:
                communication_rows.deliver(rows, pairs, here, json_file, svg_file)


@app.command()
def device(
    out: Annotated[Path, Option(help="The TOML file, for fusedops plan time --device.")],
    device: options.Device = "cpu",
    threads: options.Threads = 1,
    dtype: options.Dtypes = "float32,bfloat16",
    links: Annotated[Path | None, Option(help="JSON of fusedops bench communication.")] = None,
    seconds: Annotated[float, options.seconds_per("step", most=60)] = 2.0,
    quick: Annotated[bool, Option("--quick", help="Smaller models: a first look.")] = False,
) -> None:
    """Measure this machine as a device of the planner, in one to two minutes.

    Peak rates and bandwidth are measured, and efficiencies are fitted on training steps of small
    models: docs/planning.md. A device of a CPU is one process with --threads threads. Use an idle
    machine.
    """
    with output.checked(out):
        conditions = options.conditions(dtype, device, seconds, threads, "tuned", quick=quick)
        from fusedops.bench import device as bench
        from fusedops.cli.bench import small_models
        from fusedops.planner import CommunicationModel

        where, dtypes = conditions.device, conditions.set_up()
        curves = CommunicationModel.load(links) if links else None
        with steps(len(bench.sizes(quick=quick)) + 2) as progress, sigterm_interrupts():
            given = where, dtypes, seconds, progress.done
            measured = bench.measure_device(*given, links=curves, quick=quick)
        small_models.write_device(measured, out)


@app.command()
def scaling(
    settings: Annotated[str, Option(help="Comma-separated names of rows; default: all.")] = "",
    preset: Annotated[str, Option(help="Preset with the architecture.")] = "gpt2",
    hidden: options.Hidden = 512,
    layers: options.Layers = 6,
    vocabulary: options.Vocabulary = 4096,
    tokens: options.Tokens = "8x256",
    seconds: Annotated[float, options.seconds_per("setting", most=3600)] = 30.0,
    json_file: options.JsonRows = None,
    device: Annotated[
        str, Option(help="Also predict: files of fusedops bench device, for one thread and two.")
    ] = "",
) -> None:
    """Train one model on one process of two threads and on two processes of one thread.

    Tokens per second, and as a fraction of the first row's, interleaved: docs/parallel.md. Use an
    idle machine.
    """
    with output.checked(json_file):
        sizes = options.sequences_and_tokens(tokens)
        from fusedops import models
        from fusedops.bench.scaling import SETTINGS, ScalingWork, measure
        from fusedops.bench.small_models import rows_record
        from fusedops.cli.bench import small_models
        from fusedops.planner import load_device

        with files.user_errors(ValueError):
            models.preset(preset)
        own = [load_device(name) for name in options.split(device)]
        plain = {name.replace(" ", ""): name for name in SETTINGS}
        chosen = [plain[name] for name in small_models.setting_names(settings, plain)]
        work = ScalingWork(preset, hidden, layers, vocabulary, *sizes)
        with activity("starting") as report, files.user_errors(RuntimeError):
            rows = measure(work, chosen, seconds, report)
        record = rows_record(rows, work=asdict(work))
        output.deliver(record, json_file, partial(small_models.show_scaling, rows, work, own))


@app.command()
def generate(
    presets: Annotated[str, Option(help="Comma-separated presets.")] = "gpt2,llama3-8b",
    dtype: options.Dtypes = "float32,bfloat16",
    hidden: options.Hidden = 512,
    layers: options.Layers = 4,
    vocabulary: options.Vocabulary = 4096,
    sequences: Annotated[int, Option(min=1, help="Sequences in a batch.")] = 1,
    prompt: Annotated[int, Option(min=1, help="Tokens of the prompt.")] = 16,
    tokens: Annotated[int, Option(min=1, help="New tokens per sequence.")] = 64,
    threads: Annotated[int, Option(min=1, help="Threads of torch.")] = 2,
    seconds: Annotated[float, options.seconds_per("row", most=3600)] = 10.0,
    json_file: options.JsonRows = None,
) -> None:
    """Generate with our model, with the patched and with the stock model of transformers.

    Tokens per second, prompt included, and ours as a multiple of theirs, interleaved:
    docs/generation.md. Use an idle machine.
    """
    with output.checked(json_file):
        from fusedops.bench.generation import PRESETS, GenerationWork, measure
        from fusedops.bench.small_models import rows_record
        from fusedops.cli.bench.small_models import show_generation

        names = options.words(presets, PRESETS, "preset")
        dtypes = options.words(dtype, options.DTYPES, "dtype")
        rows = []
        sizes = (hidden, layers, vocabulary)
        with activity("starting") as report:
            for preset, name in itertools.product(names, dtypes):
                work = GenerationWork(preset, *sizes, name, sequences, prompt, tokens)
                rows += measure(work, seconds, threads, report)
        record = rows_record(rows, threads=threads)
        output.deliver(record, json_file, partial(show_generation, rows))


# Options are the script's own, `--help` too.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def peers(context: typer.Context) -> None:
    """Compare with the other CPU libraries that are installed (`fusedops bench peers --help`).

    ONNX Runtime, OpenVINO, llama.cpp, torchao, bitsandbytes, zentorch: docs/peers.md.
    """
    script = output.source_script("bench/cpu_peers/measure.py", "fusedops bench peers")
    os.execv(sys.executable, [sys.executable, str(script), *context.args])
