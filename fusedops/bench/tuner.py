"""Measures which backend wins, op by op and size by size: ``fusedops bench tune``.

A contender is measured as it would run with the table in force: the tuner puts an entry for it in
force around each sample, so that what the choice itself costs (on the CPU the way through Python
instead of the compiled router) is in its time. Timer, inputs and sizes are those of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fusedops._core import backends, tuning
from fusedops._core.architecture import architecture
from fusedops._core.timer import Clock, TimingPlan, Variant, clock_for, measure
from fusedops.bench import machine
from fusedops.bench.cases import tiny_sample
from fusedops.bench.conditions import Conditions
from fusedops.bench.contenders import ContenderCall, OperatorCalls, backends_since, first_line
from fusedops.bench.results import dtype_name, now
from fusedops.specs import BenchCase, Sample, Spec
from fusedops.terminal import files
from fusedops.terminal.progress import steps

# By how much another backend has to win: below it the next run could tell the contrary, and rows
# of different sizes should not change their rounding for nothing.
MARGIN = 0.05
TINY = "tiny"
_VERSIONS = ("torch", "triton", "fusedops", "cuda", "driver")


@dataclass(frozen=True)
class MeasuredCall:
    """All contenders on one call of a registered op."""

    key: tuning.Key  # what a table calls it
    default: str  # what runs without a table
    median_us: Mapping[str, float]  # per contender
    # time of the default divided by the contender's, median of the rounds
    ratio: Mapping[str, float]
    sure: Mapping[str, bool]  # whether that contender won in three rounds of four, undisturbed
    case: str = ""  # the size, as the spec labels it


def measure_table(
    plan: Sequence[tuple[Spec, BenchCase]], conditions: Conditions
) -> tuple[tuning.TuningTable, list[str]]:
    """Measure ops at the sizes of ``plan``, and on a call so small that it is all overhead.

    Args:
        plan: ops and sizes, in order.
        conditions: of all of them.

    Returns:
        The table, and notes on what is not in it.

    Raises:
        UserError: when nothing has a choice here.
    """
    dtypes, timing = conditions.set_up(), conditions.timing()
    # A GPU's index is there, as tensors have it.
    device = torch.empty(0, device=conditions.device).device
    measured, notes = _measure_all(plan, dtypes, device, timing)
    entries = []
    for key in dict.fromkeys(call.key for call in measured):
        entry = choose([call for call in measured if call.key == key])
        if entry is not None:
            entries.append(entry)
        else:
            notes.append(f"{key[0]}: sizes of class {key[2]} differ in their default: left out")
    if not entries:
        raise files.UserError(
            "there is nothing to tune: no op asked for has a second backend that runs these dtypes "
            "here (fusedops doctor tells why)"
        )
    here, versions = machine.machine(device), machine.versions()
    settings = {
        "device": here.name,
        "threads": here.threads,
        "allocator": conditions.allocator,
        "seconds": timing.seconds,
        "created": now(),
    }
    known = {name: versions[name] for name in _VERSIONS if name in versions}
    return tuning.TuningTable(architecture(device), known, tuple(entries), settings), notes


def _measure_all(
    plan: Sequence[tuple[Spec, BenchCase]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    timing: TimingPlan,
) -> tuple[list[MeasuredCall], list[str]]:
    clock = clock_for(device)
    measured: list[MeasuredCall] = []
    notes: list[str] = []
    work: list[tuple[Spec, str, torch.dtype, Callable[[], Sample | None]]] = []
    for name in dict.fromkeys(spec.name for spec, _ in plan):
        cases = [(spec, case) for spec, case in plan if spec.name == name]
        for dtype in dtypes:
            first = cases[0][0]
            work.append((first, TINY, dtype, partial(tiny_sample, first, device, dtype)))
            work += [(case, c.label, dtype, partial(c.make, device, dtype)) for case, c in cases]
    with steps(len(work)) as progress:
        for spec, label, dtype, make in work:
            title = f"{spec.name} {label} {dtype_name(dtype)}"
            progress.describe(title)
            try:
                sample = make()
                if sample is not None:  # None: no call of this op is tiny
                    calls, reasons = measure_case(spec, sample, device, clock, timing)
                    measured += [replace(call, case=label) for call in calls]
                    notes += [f"{title}: {reason}" for reason in reasons]
            except RuntimeError as error:
                # Too large for this machine, or a dtype that eager does not have on this device.
                notes.append(f"{title}: {first_line(error)}")
            progress.advance()
    return measured, notes


def deliver(table: tuning.TuningTable, notes: Sequence[str], path: Path) -> None:
    """Write a table; show its entries first: a full disk must not cost them."""
    from rich.table import Table
    from rich.text import Text

    from fusedops.terminal.console import console, print_table

    out = console()
    shown = Table(title=f"{table.architecture}: {table.measured['device']}", title_justify="left")
    for column in ("op", "dtype", "elements", "winner", "x default", "us"):
        shown.add_column(column, justify="right" if column == "x default" else "left")
    for entry in sorted(table.entries, key=lambda row: row.sort_key):
        times = ", ".join(f"{name} {us:.1f}" for name, us in entry.median_us.items())
        winner = tuning.label(entry.backend, entry.config)
        size = f"2^{entry.size_class}"
        shown.add_row(entry.op, entry.dtype, size, winner, f"{entry.ratio:.2f}", times)
    print_table(out, shown)
    for note in notes:
        out.print(Text(f"note: {note}", style="yellow"))
    files.write_text(path, tuning.dump(table))
    out.print(f"wrote {path}; put it in force with FUSEDOPS_TUNING={path}", soft_wrap=True)


def measure_case(
    spec: Spec, sample: Sample, device: torch.device, clock: Clock, plan: TimingPlan
) -> tuple[list[MeasuredCall], list[str]]:
    """Time the backends of an op's forward and backward against each other on one call.

    Returns:
        Forward and backward, where there is a choice; and notes on what could not be measured.
    """
    call = ContenderCall.of(spec, sample)
    calls: list[MeasuredCall] = []
    notes: list[str] = []
    parts = [Variant("forward", lambda _: call.forward(spec.op))]
    if call.leaves:
        parts.append(Variant("backward", call.backward, lambda: call.forward(spec.op)))
    for part in parts:
        with backends.use_tuning(device, {}):
            value = part.prepare()
            with OperatorCalls() as recorded:
                part.run(value)
        keys = [tuning.key(*call) for call in recorded.calls]
        if len(keys) != 1 or keys[0] is None:
            ops = ", ".join(op for op, _ in recorded.calls) or "none"
            notes.append(f"not one op is called but {ops}: left out")
            continue
        measured = _compare(spec.name, keys[0], part, device, clock, plan)
        if measured is not None:
            calls.append(measured)
    return calls, notes


def choose(measured: Sequence[MeasuredCall]) -> tuning.Entry | None:
    """Return the entry of one key: another backend only where it wins every time.

    Of sizes that share a class the one with the least gain stands in the table.
    """
    key, default = measured[0].key, measured[0].default
    if any(call.default != default for call in measured):
        return None
    winner = default
    least = 1 + MARGIN
    for label in measured[0].ratio:
        gain = min(call.ratio[label] if call.sure.get(label) else 0.0 for call in measured)
        if gain > least:
            winner, least = label, gain
    shown = min(measured, key=lambda call: call.ratio[winner])
    backend, _, config = winner.partition(":")
    return tuning.Entry(
        op=key[0],
        dtype=dtype_name(key[1]),
        size_class=key[2],
        backend=backend,
        config=config or None,
        median_us={name: float(f"{us:.4g}") for name, us in shown.median_us.items()},
        ratio=round(shown.ratio[winner], 3),
        cases=tuple(call.case for call in measured),
    )


def _compare(
    name: str, key: tuning.Key, part: Variant, device: torch.device, clock: Clock, plan: TimingPlan
) -> MeasuredCall | None:
    """Time all that can run ``part``, forward or backward; ``None`` when there is no choice."""

    def force(backend: str, config: str | None) -> AbstractContextManager[None]:
        entry = tuning.Entry(key[0], dtype_name(key[1]), key[2], backend, config, {}, 1.0)
        return backends.use_tuning(device, {key: entry})

    untuned = replace(part, context=partial(backends.use_tuning, device, {}))
    default = _ran(key[0], untuned)
    if default is None:
        return None
    variants = [replace(untuned, name=default)]
    offered: list[tuple[str, str | None]] = [(known, None) for known in backends.order(device)]
    offered += [("triton", configuration) for configuration in backends.configurations(name)]
    for backend, config in offered:
        label = tuning.label(backend, config)
        forced = replace(part, name=label, context=partial(force, backend, config))
        if label != default and _ran(key[0], forced) == backend:
            variants.append(forced)
    if len(variants) == 1:
        return None
    timing = measure(variants, clock, plan)
    ratios = {variant.name: timing.ratio(default, variant.name) for variant in variants}
    return MeasuredCall(
        key=key,
        default=default,
        median_us={variant.name: timing.spread(variant.name).median * 1e6 for variant in variants},
        ratio={label: ratio.median for label, ratio in ratios.items()},
        sure={
            label: ratio.q1 > 1 and timing.trusted(label) and timing.trusted(default)
            for label, ratio in ratios.items()
        },
    )


def _ran(op: str, variant: Variant) -> str | None:
    """Return the backend that ``op`` runs on in a variant, ``None`` when it cannot."""
    with variant.context():
        value = variant.prepare()
        before = backends.counters()
        try:
            variant.run(value)
        except Exception:
            # Whatever a kernel or its compiler raises: it is no choice, then.
            return None
        return backends_since(before, op) or None
