"""Train a small GPT-2 on Python source, stock and with fusedops, and compare them.

    python bench/models/train_gpt2.py            # what `make demo` runs; about two minutes

The model is built by transformers from a configuration, the text is the source of the installed
sympy package, and the vocabulary is trained here: nothing is downloaded. It writes demo.json,
demo.png and demo_sample.txt into the output directory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gpt2_demo import chart, half_memory, report, training, untuned
from gpt2_demo.corpus import Corpus, Source, load_corpus
from gpt2_demo.options import DTYPES, HEAD_DIM, parse_options
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from transformers.utils import logging as transformers_logging

import fusedops
from fusedops.bench import machine
from fusedops.terminal import console as terminal
from fusedops.terminal import files

UNTUNED_STEPS = training.UNTIMED + 7
PROMPT = "class Polygon(Basic):\n    def"
SAMPLE_TOKENS = 220


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _task(progress: Progress, what: str, total: int) -> Callable[[str, float], None]:
    """Return what a training loop calls after each step."""
    task = progress.add_task(what, total=total, note="")

    def advance(name: str, loss: float) -> None:
        progress.update(task, advance=1, note=f"{name} {loss:.3f}")

    return advance


def _steps_that_fit(wanted: int, seconds_per_step: float, seconds: float) -> int:
    return max(0, min(wanted, math.floor(seconds / seconds_per_step)))


def run(options: argparse.Namespace, console: Console) -> report.Results:
    """Do everything but write files.

    Raises:
        UserError: no corpus.
    """
    start = time.monotonic()
    dtypes = DTYPES if options.dtype == "both" else (options.dtype,)
    settings = training.Settings(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.hidden // HEAD_DIM,
        vocab_size=options.vocab,
        seq_len=options.seq_len,
        batch_size=options.batch,
        steps=options.steps,
        seed=options.seed,
        device=options.device,
    )
    tokens = (options.steps + options.more_steps) * settings.tokens_per_step
    source = Source(
        options.corpus,
        options.out / "cache",
        vocab_size=options.vocab,
        train_bytes=max(8_000_000, 8 * tokens),
        min_tokens=options.seq_len,
        seed=options.seed,
    )
    contenders = (training.STOCK, training.FUSED)
    on_cpu = options.device == "cpu"
    with _progress(console) as progress:
        reading = progress.add_task("read and tokenize the corpus", total=1, note="")
        corpus = load_corpus(source)
        progress.update(reading, advance=1, note=corpus.description)
        slow: list[training.Comparison] = []
        if on_cpu and not options.no_untuned:
            few = replace(settings, steps=min(UNTUNED_STEPS, settings.steps))
            task = progress.add_task("short run, system allocator", total=len(dtypes), note="")
            slow = untuned.measure_untuned(source, few, dtypes)
            progress.update(task, advance=len(dtypes))
        allocator, tuning = _tune() if on_cpu else ("torch CUDA", "")
        fast = []
        for position, dtype in enumerate(dtypes):
            left = options.time_limit - (time.monotonic() - start)
            step = _task(progress, f"train in {dtype}", len(contenders) * settings.steps)
            comparison, trainers = training.compare(
                contenders,
                corpus,
                settings,
                dtype,
                seconds=left / (len(dtypes) - position + 0.5),
                on_step=step,
            )
            trained = sum(map(len, comparison.losses.values()))
            progress.update(progress.task_ids[-1], total=trained)  # the time limit may have cut it
            training.inspect(comparison, trainers, corpus)
            fast.append(comparison)
        writer = trainers["fusedops"]
        few = replace(settings, steps=min(half_memory.STEPS, settings.steps))
        step = _task(progress, "less memory", 2 * few.steps)
        half = half_memory.measure(corpus, few, dtypes[0], on_step=step)
        results = report.Results(
            corpus=corpus.description,
            parameters=sum(p.numel() for p in writer.model.parameters()),
            settings=settings,
            tuned=fast,
            untuned=slow,
            allocator=allocator,
            tuning=tuning,
            half=half,
        )
        del trainers
        if not options.no_generate:
            results.sample = _write_code(options, progress, writer, corpus, fast[-1], start)
            results.sample_steps = len(writer.losses)
    return results


def _tune() -> tuple[str, str]:
    """Tune this process; return what its allocator is now, and what was done."""
    tuning = fusedops.tune_host()
    return "tuned" if tuning.allocator_tuned else "system", str(tuning)


def _write_code(
    options: argparse.Namespace,
    progress: Progress,
    writer: training.Trainer,
    corpus: Corpus,
    comparison: training.Comparison,
    start: float,
) -> str:
    """Train the fused model on for as long as the time limit allows, and let it write."""
    left = options.time_limit - (time.monotonic() - start)
    median = comparison.timing.spread("fusedops").median
    steps = _steps_that_fit(options.more_steps, median, left)
    if steps:
        step = _task(progress, f"train fusedops on in {comparison.dtype}", steps)
        training.train_on(writer, corpus, steps, on_step=step)
    task = progress.add_task("generate code", total=1, note="")
    sample = training.generate(writer, corpus, PROMPT, SAMPLE_TOKENS)
    progress.update(task, advance=1)
    return sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0; or 1 where training failed or the losses are not equal.

    Raises:
        SystemExit: with code 2 and one sentence, for what the user can put right.
    """
    with files.one_line_errors():
        options = parse_options(arguments)
        try:
            return _demo(options)
        except FloatingPointError as error:
            print(f"training failed: {error}", file=sys.stderr)
            return 1


def _demo(options: argparse.Namespace) -> int:
    transformers_logging.set_verbosity_error()
    device = torch.device(options.device)
    files.make_folder(options.out / "cache")
    targets = {name: options.out / f"demo{name}" for name in (".json", ".png", "_sample.txt")}
    if options.record:
        folder = Path(__file__).resolve().parents[1] / "results" / machine.machine(device).slug
        targets["record"] = files.make_folder(folder) / "demo.json"
    for target in targets.values():
        files.check_writable(target)

    results = run(options, Console(stderr=True))
    record = {
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "source": machine.git_commit(),
        **report.as_json(results),
    }
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        report.print_report(results, terminal.console())
    files.write_json(targets[".json"], record)
    if options.record:
        files.write_json(targets["record"], record)
    with files.replacing(targets[".png"]) as file:
        file.write(chart.draw(results))
    if results.sample is not None:
        files.write_text(targets["_sample.txt"], results.sample + "\n")
    print(f"wrote {targets['.png']} and {targets['.json']}", file=sys.stderr)
    if results.half is not None and not results.half.same_losses:
        print("the losses of the recomputed model are other ones", file=sys.stderr)
        return 1
    if not report.losses_agree(results):
        print(
            f"the float32 losses differ by more than {report.LOSS_DIFFERENCE_MARK} of stock's "
            f"within the first {training.COMPARED} steps",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
