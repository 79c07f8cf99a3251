"""The command line of ``fusedops bench generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.bench.generation import GenerationRow


def generate(
    presets: Annotated[
        str, typer.Option(help="Comma-separated presets with the architectures.")
    ] = "gpt2,llama3-8b",
    dtype: Annotated[str, typer.Option(help="Comma-separated dtypes.")] = "float32,bfloat16",
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
        options.check_outputs((json_file,), None)
        from fusedops.bench.generation import PRESETS, GenerationWork, measure
        from fusedops.bench.small_models import save_rows

        names = options.words(presets, PRESETS, "preset")
        dtypes = options.words(dtype, options.DTYPES, "dtype")
        work = [
            GenerationWork(preset, hidden, layers, vocabulary, name, sequences, prompt, tokens)
            for preset in names
            for name in dtypes
        ]
        from fusedops.terminal.console import console
        from fusedops.terminal.progress import activity

        out = console()
        rows: list[GenerationRow] = []
        with activity("starting") as report:
            for batch in work:
                rows += measure(batch, seconds, threads, report)
        _show(rows, out)
        if json_file is not None:
            save_rows(json_file, rows, threads=threads)


def _show(rows: list[GenerationRow], out: Any) -> None:
    from rich.table import Table

    from fusedops.terminal.console import number_columns, print_table

    figures = number_columns("tokens/s", "ours to it", "same tokens")
    table = Table("architecture", *number_columns("dtype"), "by", *figures, title="generating")
    for row in rows:
        table.add_row(
            row.work.preset,
            row.work.dtype,
            row.name,
            f"{row.tokens_per_second:.0f}",
            row.shown_ratio,
            f"{row.same:.0%}",
        )
    print_table(out, table)
