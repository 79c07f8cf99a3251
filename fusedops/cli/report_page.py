"""One HTML file of a run: curves, the timeline of all ranks, memory, communication, findings.

The file opens without a network: the plotting library (plotly.js) is part of it.
"""

from __future__ import annotations

import base64
import html
import json
import math
from pathlib import Path
from typing import Any

import torch

from fusedops.cli.profile_tables import find_all, memory_records
from fusedops.launch.config_table import InputError
from fusedops.profiler.detection import listed
from fusedops.profiler.step_table import GroupTimes, group_times, rank_times, slowest
from fusedops.profiler.timings import (
    FOLDER,
    GROUPS,
    HEADER,
    REGULAR,
    SECTIONS,
    Timings,
    read_timings,
)

METRICS = "metrics.jsonl"
_CURVES = (
    *("loss", "validation_loss", "tokens_per_second", "mfu", "lr", "grad_norm", "memory_bytes"),
    "communication",
)
_MOST = 65535  # of 16 bits, in which the numbers of steps and ranks are packed
# Of what a step allocates, by ``fusedops.memory.StepMemory``.
MEMORY_KINDS = ("activation", "gradient", "cast", "temporary")
# Parts of the planner's estimate by the kind of process group.
_COMMUNICATION = {"tensor": "tp", "context": "cp", "experts": "ep", "pipeline": "pp", "data": "dp"}
_TEMPLATE = Path(__file__).with_name("report.html")


def page(run: str | Path, plan: dict[str, Any] | None = None) -> str:
    """Return the HTML of a run.

    Args:
        run: its folder.
        plan: of ``fusedops plan --json``, whose first layout is shown next to what was measured.

    Raises:
        InputError: plotly is not installed, or the folder has no line of ``metrics.jsonl``.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("fusedops report needs plotly: pip install plotly") from None
    folder = Path(run)
    # "</" would end the script.
    values = {
        "title": html.escape(f"Run {folder.resolve().name}"),
        "data": json.dumps(page_data(folder, plan), allow_nan=False).replace("</", "<\\/"),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def page_data(folder: Path, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the page of a run shows; arguments as of ``page``."""
    lines = _metrics(folder / METRICS)
    recorded = (folder / FOLDER / HEADER).exists()
    timings = read_timings(folder) if recorded else None
    if timings is not None and not timings.steps:
        timings = None
    groups = group_times(timings) if timings else []
    return {
        "overview": _overview(lines, timings),
        "metrics": _curves(lines),
        "plan": _plan(lines, plan, groups) if plan else None,
        "timings": _packed(timings) if timings else None,
        "memory": _step_memory(folder),
        "ranks": _ranks(timings) if timings else [],
        "groups": _groups(groups),
        "matrix": _matrix(groups, timings.shape.ranks) if timings else None,
        "findings": [finding.record() for finding in find_all(timings)] if timings else [],
    }


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics; half a line at the end is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        is_profile = (path.parent / "profile").is_dir()
        action = (
            f"for the times of another trainer: fusedops profile {path.parent}"
            if is_profile
            else "give the folder that `out` names"
        )
        raise InputError(f"no run of fusedops train: {path}: {error.strerror}; {action}") from None
    lines = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            lines.append(record)
    if not lines:
        raise InputError(f"{path} has no step yet: wait for the first one")
    return lines


def _curves(lines: list[dict[str, Any]]) -> dict[str, Any]:
    curves = {}
    for name in _CURVES:
        points = [(line["step"], line[name]) for line in lines if _is_number(line.get(name))]
        if points:
            steps, values = zip(*points, strict=True)
            curves[name] = {"steps": list(steps), "values": list(values)}
    return curves


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _overview(lines: list[dict[str, Any]], timings: Timings | None) -> list[list[str]]:
    last = lines[-1]
    rows = [["steps", str(last["step"])], ["loss", _number(last.get("loss"))]]
    for line in [line for line in lines if "validation_loss" in line][-1:]:
        rows.append(["validation loss", f"{_number(line['validation_loss'])} at {line['step']}"])
    rows.append(["tokens per second, median", _number(_median(lines, "tokens_per_second"))])
    rows.append(["MFU, median", f"{100 * (_median(lines, 'mfu') or 0.0):.2f} %"])
    rows.append(["seconds per step, median", _number(_median(lines, "seconds"))])
    if timings is not None:
        sizes = ", ".join(f"{name} {n}" for name, n in timings.shape.sizes.items() if n > 1)
        rows.append(["ranks", f"{timings.shape.ranks}" + (f" ({sizes})" if sizes else "")])
        rows += [["note", note] for note in timings.notes]
    return rows


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [float(line[name]) for line in lines if _is_number(line.get(name))]
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else None


def _number(value: Any) -> str:
    return f"{value:.6g}" if _is_number(value) else "-"


def _plan(
    lines: list[dict[str, Any]], plan: dict[str, Any], groups: list[GroupTimes]
) -> list[list[str]]:
    """Return the prediction of a plan's first layout with the medians of the run.

    Its communication is that which computing does not hide; measured is what the last rank to
    arrive at the collectives of a group waits, so that no slow rank is part of it.
    """
    row = (plan.get("layouts") or [{}])[0]
    measured = {
        "seconds": ("seconds per step", _median(lines, "seconds")),
        "tokens_per_second": ("tokens per second", _median(lines, "tokens_per_second")),
        "utilization": ("MFU", _median(lines, "mfu")),
        "peak": ("peak bytes of a rank", _median(lines, "memory_bytes")),
    }
    pairs = [(title, row.get(name), value) for name, (title, value) in measured.items()]
    if isinstance(row.get("parts"), dict):
        for part, kind in _COMMUNICATION.items():
            seconds = [group.seconds for group in groups if group.kind == kind]
            if seconds:
                title = f"seconds of communication per step: {kind}"
                pairs.append((title, row["parts"].get(part), sum(seconds) / len(seconds)))
    return [
        [title, _number(predicted), _number(value), f"{100 * (predicted / value - 1):+.1f} %"]
        for title, predicted, value in pairs
        if _is_number(predicted) and value
    ]


def _packed(timings: Timings) -> dict[str, Any]:
    """Return the times and bytes of all steps and ranks as shares of their maximum, in 16 bits."""
    fields = {}
    for name in (*SECTIONS, *(f"blocked_{group}" for group in GROUPS)):
        values = timings.of(name).double().clamp(min=0)
        most = float(values.max())
        shares = (values / most * _MOST).round() if most else values
        words = shares.to(torch.int32).numpy().astype("<u2").tobytes()
        fields[name] = {"most": most, "text": base64.b64encode(words).decode()}
    return {
        "steps": timings.steps,
        "ranks": timings.shape.ranks,
        "fields": fields,
        "own": list(REGULAR),
        "irregular": [name for name in SECTIONS if name not in REGULAR],
        "blocked": [f"blocked_{group}" for group in GROUPS],
    }


def _step_memory(folder: Path) -> dict[str, Any] | None:
    """Return what ranks allocated in the recorded step, by layer and kind, in MiB."""
    records = memory_records(folder)
    if not records:
        return None
    ranks = [
        {
            "rank": record["rank"],
            "step": record["step"],
            "layers": [name or "(outside)" for name in record["layers"]],
            "values": [
                [kinds.get(kind, 0) / 2**20 for kind in MEMORY_KINDS]
                for kinds in record["layers"].values()
            ],
            "timeline": [
                [nbytes / 2**20, layer or "(outside)", phase]
                for nbytes, layer, phase in record["timeline"]
            ],
            "static": {name: record[name] / 2**20 for name in ("weights", "gradients", "states")},
        }
        for record in records
    ]
    return {"kinds": list(MEMORY_KINDS), "ranks": ranks}


def _ranks(timings: Timings) -> list[list[str]]:
    rows = []
    for times, factor in slowest(timings.shape, rank_times(timings)):
        seconds = (times.step, times.own, times.not_overlapped)
        figures = [f"{1e3 * value:.2f}" for value in seconds]
        rows.append([str(times.rank), str(times.stage), *figures, f"{factor:.2f}x"])
    return rows


def _groups(groups: list[GroupTimes]) -> list[list[str]]:
    rows = []
    for group in groups:
        figures = f"{group.bytes / 1e6:.3f}", f"{1e3 * group.seconds:.3f}"
        rows.append([group.kind, listed(group.ranks), *figures, f"{group.bandwidth / 1e6:.1f}"])
    return rows


def _matrix(groups: list[GroupTimes], ranks: int) -> dict[str, Any]:
    """Return the bandwidths of each rank's groups, MB/s; ``None`` where it has no such group."""
    kinds = list(dict.fromkeys(group.kind for group in groups))
    values: list[list[float | None]] = [[None] * len(kinds) for _ in range(ranks)]
    for group in groups:
        for rank in group.ranks:
            values[rank][kinds.index(group.kind)] = group.bandwidth / 1e6
    return {"kinds": kinds, "ranks": list(range(ranks)), "values": values}
