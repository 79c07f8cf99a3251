"""The demo's figures: as a table, as JSON, and the verdict on the losses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from fusedops.terminal.console import number_columns, show_table

from .half_memory import Half
from .options import DTYPES
from .training import COMPARED, Comparison, Settings

# Relative difference of a step's loss in float32 over the first COMPARED steps.
LOSS_DIFFERENCE_MARK = 1e-4


@dataclass
class Results:
    """All that one run of the demo found.

    Attributes:
        corpus: description of the text.
        parameters: number of the model's parameters.
        settings: of the model and its training.
        tuned: comparisons with the tuned allocator, one per dtype.
        untuned: the same with the system's allocator settings; empty where not measured.
        allocator: of ``tuned``: ``"tuned"``, or what it is where nothing could be tuned.
        tuning: what ``fusedops.tune_host`` said.
        half: the fused model with its blocks recomputed, beside it; or None.
        sample: generated text, or None.
        sample_steps: training steps of the model that wrote it.
    """

    corpus: str
    parameters: int
    settings: Settings
    tuned: list[Comparison]
    untuned: list[Comparison]
    allocator: str
    tuning: str
    half: Half | None = None
    sample: str | None = None
    sample_steps: int = 0


def speed_up(comparison: Comparison) -> float:
    """Return the median over steps of stock's time by the fused model's."""
    return comparison.timing.ratio("stock", "fusedops").median


def largest_difference(comparison: Comparison, steps: int | None = None) -> float:
    """Return the largest relative loss difference to stock over the first ``steps`` steps."""
    return max(comparison.loss_differences("stock", "fusedops")[:steps])


def losses_agree(results: Results) -> bool:
    """Tell whether the float32 losses of the first steps are equal within rounding."""
    return all(
        largest_difference(each, COMPARED) <= LOSS_DIFFERENCE_MARK
        for each in results.tuned
        if each.dtype == "float32"
    )


def print_report(results: Results, console: Console) -> None:
    """Print the tables, the replaced modules and the sample."""
    settings = results.settings
    _show_speeds(results, console)
    console.print(
        f"GPT-2 with {settings.layers} layers, hidden {settings.hidden}, {settings.heads} heads, "
        f"{results.parameters / 1e6:.1f} M parameters; batches of {settings.batch_size} x "
        f"{settings.seq_len} tokens of {results.corpus}; dropout 0; same weights, same batches. "
        "Speed: median step of contenders that take turns. Memory: all tensors at the peak.",
        style="dim",
    )
    _show_losses(results, console)
    if results.half is not None:
        _show_memory(results.half, results.tuned[0].dtype, console)
    report = next((c.reports["fusedops"] for c in results.tuned if c.reports), None)
    if report is not None:
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    disturbed = [
        f"{each.dtype} {name} ({allocator} allocator)"
        for allocator, each in _by_allocator(results)
        for name in each.losses
        if not each.timing.trusted(name) or each.timing.spread(name).iqr_share > 0.1
    ]
    if disturbed:
        console.print(
            f"Other work on this machine disturbed the timing of: {', '.join(disturbed)}.",
            style="yellow",
        )
    if results.sample is not None:
        console.rule(f"written by the fused model after {results.sample_steps} steps")
        console.print(results.sample, markup=False)
        console.rule()


def _by_allocator(results: Results) -> list[tuple[str, Comparison]]:
    """Return all comparisons with their allocators, those of the system's first."""
    measured = [("system", comparison) for comparison in results.untuned]
    return measured + [(results.allocator, comparison) for comparison in results.tuned]


def _show_speeds(results: Results, console: Console) -> None:
    cells = []
    for allocator, comparison in sorted(
        _by_allocator(results), key=lambda pair: DTYPES.index(pair[1].dtype)
    ):
        for name in comparison.losses:
            spread = comparison.timing.spread(name)
            memory = comparison.peak_memory.get(name)
            cells.append(
                (
                    comparison.dtype,
                    name,
                    allocator,
                    f"{comparison.tokens_per_second(name):,.0f}",
                    f"{spread.median * 1e3:.0f} ({spread.q1 * 1e3:.0f}-{spread.q3 * 1e3:.0f})",
                    f"{speed_up(comparison):.2f}x" if name == "fusedops" else "1",
                    f"{memory / 2**20:.0f} MiB" if memory else "",
                )
            )
    figures = number_columns("tokens/s", "ms/step", "speed-up", "peak memory")
    title = "Training speed, stock and fusedops"
    show_table(console, ("dtype", "model", "allocator", *figures), cells, title=title)


def _show_losses(results: Results, console: Console) -> None:
    first = f"largest difference, steps 1-{COMPARED}"
    cells = (
        (
            comparison.dtype,
            len(comparison.losses["stock"]),
            *(f"{comparison.validation_losses[name]:.4f}" for name in ("stock", "fusedops")),
            f"{largest_difference(comparison, COMPARED):.1e}",
            f"{largest_difference(comparison):.1e}",
        )
        for comparison in results.tuned
    )
    figures = ("steps", "validation stock", "validation fusedops", first, "all steps")
    show_table(console, ("dtype", *number_columns(*figures)), cells, title="Losses")


def _show_memory(half: Half, dtype: str, console: Console) -> None:
    cells = (
        (
            dtype,
            name,
            f"{nbytes / 2**20:.1f} MiB",
            f"{half.tokens_per_second[name]:,.0f}",
            f"{half.losses[name]:.6f}",
            "equal to the bit" if half.same_losses else "DIFFERENT",
        )
        for name, nbytes in half.activations.items()
    )
    figures = number_columns("activations", "tokens/s", "loss of the last step", "losses")
    title = "The same model, its blocks computed again in the backward"
    show_table(console, ("dtype", "model", *figures), cells, title=title)


def as_json(results: Results) -> dict[str, Any]:
    """Return everything that was found, ready for ``json.dumps``."""
    return {
        "corpus": results.corpus,
        "parameters": results.parameters,
        "settings": asdict(results.settings),
        "tuning": results.tuning.splitlines(),
        "rows": [
            _row(comparison, name, allocator)
            for allocator, comparison in _by_allocator(results)
            for name in comparison.losses
        ],
        "comparisons": [
            {
                "dtype": each.dtype,
                "speed_up": speed_up(each),
                "largest_loss_difference_first_20": largest_difference(each, COMPARED),
                "largest_loss_difference": largest_difference(each),
                "losses": each.losses,
                "step_seconds": each.timing.rounds,
                "modules": [
                    asdict(module)
                    for module in (each.reports["fusedops"].modules if each.reports else ())
                ],
            }
            for each in results.tuned
        ],
        "memory": asdict(results.half) if results.half is not None else None,
        "sample": results.sample,
        "sample_steps": results.sample_steps,
    }


def _row(comparison: Comparison, name: str, allocator: str) -> dict[str, Any]:
    spread = comparison.timing.spread(name)
    return {
        "dtype": comparison.dtype,
        "model": name,
        "allocator": allocator,
        "tokens_per_second": comparison.tokens_per_second(name),
        "step_seconds": asdict(spread),
        "speed_up": speed_up(comparison) if name == "fusedops" else 1.0,
        "trusted": comparison.timing.trusted(name),
        "peak_memory_bytes": comparison.peak_memory.get(name),
        "validation_loss": comparison.validation_losses.get(name),
    }
