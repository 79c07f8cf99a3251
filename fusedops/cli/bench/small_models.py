"""The command lines of ``fusedops bench device``, ``generate`` and ``scaling``: small models."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.progress import activity, sigterm_interrupts, steps

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.device import DeviceStep
    from fusedops.bench.generation import GenerationRow
    from fusedops.bench.scaling import ScalingRow, ScalingWork
    from fusedops.planner import Device


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
        from fusedops.bench.device import measure_device
        from fusedops.bench.device import sizes as cases
        from fusedops.planner.communication import CommunicationModel

        where, dtypes = conditions.device, conditions.set_up()
        curves = CommunicationModel.load(links) if links else None
        with steps(len(cases(quick=quick)) + 2) as progress, sigterm_interrupts():
            given = where, dtypes, seconds, progress.done
            measured = measure_device(*given, links=curves, quick=quick)
        own = measured.device
        source = f"fitted on {len(measured.steps)} steps of small models on this machine"
        files.write_text(out, device_toml(own, asdict(own.efficiency), source))
        figures = ("width", "layers", "tokens", "measured ms", "predicted ms", "error")
        cells = map(_device_cells, measured.steps, measured.errors)
        show_table(console(), ("processes", *number_columns(*figures)), cells, title=own.name)
        print(f"wrote {out}: fusedops plan time --device {out}")


def device_toml(device: Device, efficiency: dict[str, float], source: str) -> str:
    """Return the text of a device's file; ``source`` says where the efficiencies are from."""
    lines = [f"name = {_shown(device.name)}"]
    lines += [f"threads = {device.threads}"] if device.threads else []
    tables: dict[str, dict[str, Any]] = {
        "memory": asdict(device.memory),
        "peak": device.peak,
        "links": asdict(device.links),
        "efficiency": efficiency,
        "sources": {**device.sources, "efficiency": source},
    }
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_shown(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML quotes texts as JSON does
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _device_cells(step: DeviceStep, error: float) -> list[object]:
    shape = step.shape
    sizes = {name: getattr(shape, name) for name in ("dp", "zero", "tp", "cp", "pp")}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > (name != "zero")]
    shown += [name for name in ("sp", "overlap_microbatches") if getattr(shape, name)]
    tokens = f"{shape.micro_batch} x {shape.seq_len} x {shape.microbatches}"
    times = (f"{1e3 * step.seconds * factor:.1f}" for factor in (1, 1 + error))
    figures = (shape.hidden, shape.layers, tokens, *times, f"{100 * error:+.0f} %")
    return [", ".join(shown) or "1", *figures]


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

        names = options.words(presets, PRESETS, "preset")
        dtypes = options.words(dtype, options.DTYPES, "dtype")
        rows: list[GenerationRow] = []
        sizes = (hidden, layers, vocabulary)
        with activity("starting") as report:
            for preset, name in itertools.product(names, dtypes):
                work = GenerationWork(preset, *sizes, name, sequences, prompt, tokens)
                rows += measure(work, seconds, threads, report)
        record = rows_record(rows, threads=threads)
        output.deliver(record, json_file, partial(_show_generation, rows))


def _show_generation(rows: list[GenerationRow], out: Console) -> None:
    figures = number_columns("tokens/s", "ours to it", "same tokens")
    cells = []
    for row in rows:
        reached = f"{row.tokens_per_second:.0f}", row.shown_ratio, f"{row.same:.0%}"
        cells.append((row.work.preset, row.work.dtype, row.name, *reached))
    columns = ("architecture", *number_columns("dtype"), "by", *figures)
    show_table(out, columns, cells, title="generating")


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
        from fusedops.planner import load_device

        with files.user_errors(ValueError):
            models.preset(preset)
        own = [load_device(name) for name in options.split(device)]
        plain = {name.replace(" ", ""): name for name in SETTINGS}
        chosen = [plain[name] for name in _names(settings, plain)]
        work = ScalingWork(preset, hidden, layers, vocabulary, *sizes)
        with activity("starting") as report, files.user_errors(RuntimeError):
            rows = measure(work, chosen, seconds, report)
        record = rows_record(rows, work=asdict(work))
        output.deliver(record, json_file, partial(_show_scaling, rows, work, own))


def _names(text: str, known: dict[str, str]) -> list[str]:
    if not text:
        return list(known)
    # Names hold commas: "dp2,zero1" is one where there is one of that name.
    words, names = text.replace(" ", "").split(","), []
    while words:
        pair = ",".join(words[:2])
        name = pair if len(words) > 1 and pair in known else words[0]
        options.check_known(name, known, "setting")
        names.append(name)
        words = words[1 + name.count(",") :]
    return names


def _show_scaling(
    rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console
) -> None:
    figures = number_columns("processes x threads", "tokens/s", "of the first", "loss")
    cells = []
    for row in rows:
        size = f"{row.setting.processes} x {row.setting.threads}"
        reached = f"{row.tokens_per_second:.0f}", row.shown_ratio, f"{row.loss:.4f}"
        cells.append((row.setting.name, size, *reached))
    show_table(out, ("setting", *figures), cells, title="a training step")
    if devices:
        _show_predicted(rows, work, devices, out)


def _show_predicted(
    rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console
) -> None:
    """Print the planner's seconds of each setting, their errors, and whether the order is right."""
    from fusedops.bench.scaling import predicted
    from fusedops.bench.tables import kendall_tau

    cells, pairs = [], []
    for row in rows:
        seconds, measured = predicted(work, row.setting, devices), statistics.median(row.seconds)
        if seconds is not None:
            pairs.append((seconds, measured))
            times = f"{1e3 * measured:.1f}", f"{1e3 * seconds:.1f}"
            cells.append((row.setting.name, *times, f"{seconds / measured - 1:+.0%}"))
    columns = ("setting", *number_columns("measured ms", "predicted ms", "error"))
    names = " and ".join(device.name for device in devices)
    show_table(out, columns, cells, title=f"predicted steps, {names}")
    errors = [abs(seconds / measured - 1) for seconds, measured in pairs]
    out.print(
        f"mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}; Kendall's tau of "
        f"the order {kendall_tau(pairs):.2f}"
    )
