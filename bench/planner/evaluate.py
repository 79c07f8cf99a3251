"""Compare the planner's estimates with measured steps: a row of a CSV file is a training run.

    python bench/planner/evaluate.py steps.csv --out predictions.csv
    python bench/planner/evaluate.py steps.csv --device mine.toml   # of rows without gpu
    python bench/planner/evaluate.py steps.csv --half               # rows that fit.py did not fit

bench/planner/README.md has the columns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import evaluation
from evaluation import Evaluation, GroupRanking
from rich.console import Console

from fusedops.bench.tables import csv_text, load_rows
from fusedops.planner import load_device
from fusedops.terminal import files
from fusedops.terminal.console import show_table

# Groups of so many layouts and more are listed one by one.
_LISTED = 15


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the rows of a CSV file, print the errors, and write the predictions if asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="CSV file of measured steps")
    parser.add_argument("--device", default="", help="device of rows without gpu")
    parser.add_argument("--half", action="store_true", help="every second row, from the second on")
    parser.add_argument("--out", default="", help="CSV file of the rows with their predictions")
    options = parser.parse_args(arguments)
    try:
        if options.out:
            files.check_writable(options.out)
        rows = load_rows(options.file)[1 if options.half else 0 :: 2 if options.half else 1]
        usual = load_device(options.device) if options.device else None
    except files.UserError as error:
        parser.error(str(error))
    result = evaluation.evaluate(rows, usual)
    _show(result, Console())
    if options.out:
        pairs = zip(rows, result.predictions, strict=True)
        predicted = [{**row, **prediction.cells()} for row, prediction in pairs]
        text = csv_text(predicted, [*rows[0], *evaluation.PREDICTED])
        files.write_text(options.out, text)
        print(f"wrote {options.out}")


def _show(result: Evaluation, console: Console) -> None:
    missing = [prediction.why for prediction in result.predictions if prediction.step_s is None]
    sources = dict.fromkeys([*result.errors, *result.memory_errors])
    errors = [
        (source, *_cells(result.errors.get(source)), *_cells(result.memory_errors.get(source)))
        for source in sources
    ]
    if errors:
        columns = ("source", "steps", "error", "peaks", "error")
        show_table(console, columns, errors, title="Mean absolute errors")
    ranks = [
        (group.name, group.layouts, f"{group.tau:.2f}", f"{100 * group.slower:.1f} %")
        for group in result.groups
        if group.layouts >= _LISTED
    ]
    if ranks:
        columns = ("group", "layouts", "Kendall's tau", "first choice slower by")
        show_table(console, columns, ranks)
    if result.groups:
        console.print(_summary(result.groups))
    said = (
        ("ran are said to fit", result.fitting),
        ("ran out of memory are said not to fit", result.unfitting),
    )
    for text, (right, count) in said:
        if count:
            console.print(f"{right} of {count} layouts that {text}")
    if missing:
        reasons = ", ".join(f"{missing.count(why)} x {why}" for why in dict.fromkeys(missing))
        console.print(f"{len(missing)} rows without a prediction: {reasons}")


def _cells(error: tuple[float, int] | None) -> tuple[str, str]:
    """Return the cells of the number of rows and their error."""
    return (str(error[1]), f"{error[0]:.1f} %") if error else ("", "")


def _summary(groups: Sequence[GroupRanking]) -> str:
    tau = statistics.fmean(group.tau for group in groups)
    slower = max(group.slower for group in groups)
    return (
        f"{len(groups)} groups of the same model, devices and global batch: mean of Kendall's tau "
        f"{tau:.2f}, a first choice is at most {100 * slower:.1f} % slower than the best"
    )


if __name__ == "__main__":
    main()
