"""The command line of ``fusedops bench generate``."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.bench.generation import GenerationRow


def generate(
    presets: Annotated[str, typer.Option(help="Comma-separated presets.")] = "gpt2,llama3-8b",
    dtype: options.Dtypes = "float32,bfloat16",
    hidden: options.Hidden = 512,
    layers: options.Layers = 4,
    vocabulary: options.Vocabulary = 4096,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per sequence.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    seconds: Annotated[float, options.seconds_per("row", most=3600)] = 10.0,
    json_file: options.JsonRows = None,
) -> None:
    """Generate with our model, with the patched and with the stock model of transformers.

    Tokens per second, prompt included, and ours as a multiple of theirs, interleaved:
    docs/generation.md. Use an idle machine.
    """
    with files.one_line_errors():
        files.check_environment()
        output.check_outputs(json_file)
        from fusedops.bench.generation import PRESETS, GenerationWork, measure
        from fusedops.bench.small_models import rows_record

        names = options.words(presets, PRESETS, "preset")
        dtypes = options.words(dtype, options.DTYPES, "dtype")
        rows: list[GenerationRow] = []
        with activity("starting") as report:
            for preset, name in itertools.product(names, dtypes):
                sizes = (hidden, layers, vocabulary)
                work = GenerationWork(preset, *sizes, name, sequences, prompt, tokens)
                rows += measure(work, seconds, threads, report)
        output.deliver(rows_record(rows, threads=threads), json_file, partial(_show, rows))


def _show(rows: list[GenerationRow], out: Console) -> None:
    figures = number_columns("tokens/s", "ours to it", "same tokens")
    cells = (
        (
            row.work.preset,
            row.work.dtype,
            row.name,
            f"{row.tokens_per_second:.0f}",
            row.shown_ratio,
            f"{row.same:.0%}",
        )
        for row in rows
    )
    columns = ("architecture", *number_columns("dtype"), "by", *figures)
    show_table(out, columns, cells, title="generating")
