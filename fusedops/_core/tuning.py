"""Tuning tables: the fastest backend, and its configuration, of each measured size class.

``fusedops bench tune`` writes such a table for one device architecture; ``backends.py`` asks the
ones in force. This module has the format, its checks and the merge of two tables; it measures
nothing and has no state. A lookup is one dictionary access by (op, dtype, size class); a size that
was not measured uses the default order of backends, and never causes a measurement or compilation.

In force are the table that fusedops ships for the architecture (``fusedops/tuning/<name>.json``)
and over it, entry by entry, the user's own (``FUSEDOPS_TUNING``). An invalid table is ignored
entirely, with one warning: damaged, of another schema, measured with another minor version of
torch (whose own kernels are half of each comparison), of another architecture, or with an op that
this fusedops does not have. docs/tuning.md has the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from fusedops._core import env
from fusedops._core.architecture import architecture

SCHEMA = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
SHIPPED = Path(__file__).resolve().parent.parent / "tuning"
_LARGEST_CLASS = 62  # an int64_t counts the elements

Key = tuple[str, torch.dtype, int]
Order = Mapping[str, tuple[str, ...]]


class TableError(ValueError):
    """A table that cannot be used; the message says why."""


@dataclass(frozen=True)
class Entry:
    """What won for one op, dtype and size class."""

    op: str  # name of the registered op: ``"layer_norm"`` or ``"layer_norm_backward"``
    dtype: str  # ``"float32"`` and so on, see ``key``
    size_class: int  # see ``key``
    backend: str  # the winner
    config: str | None
    median_us: Mapping[str, float]  # microseconds of all that were measured, by ``label``
    ratio: float  # time of the default choice divided by the winner's
    cases: tuple[str, ...] = ()  # the sizes that were measured

    @property
    def sort_key(self) -> tuple[str, str, int]:
        return (self.op, self.dtype, self.size_class)

    def why_not(self, backend: str, size: int) -> str:
        other = self.median_us.get(backend)
        if other is None:
            return "tuning table: it could not run this when the table was measured"
        here = size == self.size_class
        where = "at this size" if here else f"at 2^{self.size_class} elements, the nearest measured"
        mine = self.median_us[label(self.backend, self.config)]
        return f"tuning table: {self.backend} is faster {where} ({mine:.1f} / {other:.1f} us)"


@dataclass(frozen=True)
class TuningTable:
    """A whole table."""

    architecture: str  # of the device that it was measured on, ``"cpu-zen5"`` or ``"sm_90"``
    versions: Mapping[str, str]  # of torch, triton and fusedops
    entries: tuple[Entry, ...]  # one per op, dtype and size class
    # device, settings and date, for whoever reviews it; not interpreted
    measured: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None  # where it was read from

    @property
    def device_type(self) -> str:
        return "cuda" if self.architecture.startswith("sm_") else "cpu"


@dataclass(frozen=True)
class LoadedTable:
    """What is in force on a device."""

    # where something else than the first backend of the order is to run
    entries: Mapping[Key, Entry] = field(default_factory=dict)
    tables: tuple[TuningTable, ...] = ()  # where they come from; the later wins
    # tables that do not fit: the sentence that says why and what to do, and whether the user named
    # the table (then it is a warning)
    ignored: tuple[tuple[str, bool], ...] = ()


def size_class(elements: int) -> int:
    """Return k for 2^k <= ``elements`` < 2^(k+1); 0 for none.

    Example:
        >>> [size_class(n) for n in (0, 1, 2, 3, 4, 1023, 1024)]
        [0, 0, 1, 1, 2, 9, 10]
    """
    return max(int(elements), 1).bit_length() - 1


def key(op: str, args: Sequence[Any]) -> Key | None:
    """Return what a table calls this call of a registered op; ``None`` where it has no tensor.

    Dtype and size class are those of the first tensor argument that is no single number: the
    incoming gradient of a loss is one, and says nothing of the work. Tensors in lists do not count,
    here and in ``csrc/router.cpp``.

    Example:
        >>> key("gelu", (torch.ones(4, 8), "none"))
        ('gelu', torch.float32, 5)
    """
    first: torch.Tensor | None = None
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            continue
        elements = arg.numel()
        if elements != 1:
            return op, arg.dtype, size_class(elements)
        first = arg if first is None else first
    return None if first is None else (op, first.dtype, 0)


def label(backend: str, config: str | None) -> str:
    """Return how ``median_us`` names a backend and configuration: ``"triton"``, ``"triton:X"``."""
    return backend if config is None else f"{backend}:{config}"


def load(device: torch.device, ops: Collection[str], order: Order) -> LoadedTable:
    """Read the tables for a device, the shipped and the user's own.

    ``ops`` are the names of all registered ops, backward ops too; ``order`` has the backends of
    each device type, the default first.
    """
    asked = env.tuning()
    if asked == "off" or device.type not in order:
        return LoadedTable()
    tables: list[TuningTable] = []
    ignored: list[tuple[str, bool]] = []
    for path, own in _paths(device, asked):
        try:
            table = _read(path, ops, order)
            if _applies(table, device):
                tables.append(table)
        except TableError as error:
            cure = "make a new one with `fusedops bench tune`"
            cure += ", or unset FUSEDOPS_TUNING" if own else " and set FUSEDOPS_TUNING to it"
            ignored.append((f"tuning table {path} is ignored: {error}; {cure}", own))
    merged: dict[Key, Entry] = {}
    for table in tables:
        merged |= _by_key(table.entries)
    usual = (order[device.type][0], None)
    entries = {
        key: entry for key, entry in merged.items() if (entry.backend, entry.config) != usual
    }
    return LoadedTable(entries, tuple(tables), tuple(ignored))


def parse(data: Any, ops: Collection[str], order: Order) -> TuningTable:
    """Return the table that decoded JSON holds.

    Raises:
        TableError: it is damaged, of another schema, or names an op that is not in ``ops``.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise TableError("it is no tuning table")
    if data["schema"] != SCHEMA:
        raise TableError(f"it has schema {data['schema']!r}, this fusedops reads {SCHEMA}")
    name, versions, rows = (data.get(key) for key in ("architecture", "versions", "entries"))
    if not isinstance(name, str) or not name.startswith(("sm_", "cpu-")):
        raise TableError(f"its architecture is {name!r}")
    if not isinstance(versions, dict) or not isinstance(versions.get("torch"), str):
        raise TableError("it does not tell the version of torch")
    if not isinstance(rows, list):
        raise TableError("it has no list of entries")
    measured = data.get("measured", {})
    table = TuningTable(name, versions, (), measured if isinstance(measured, dict) else {})
    backends = order[table.device_type]
    entries = tuple(_entry(number, row, backends) for number, row in enumerate(rows, start=1))
    unknown = sorted({entry.op for entry in entries} - set(ops))
    if unknown:
        raise TableError(f"this fusedops has no op {', '.join(unknown)}")
    return replace(table, entries=entries)


def dump(table: TuningTable) -> str:
    """Return the text of a table's file: sorted, a line per entry, so that a diff can be read."""
    head = {
        "schema": SCHEMA,
        "architecture": table.architecture,
        "versions": dict(table.versions),
        "measured": dict(table.measured),
    }
    rows = [
        json.dumps(asdict(entry) | {"median_us": dict(entry.median_us)})
        for entry in sorted(table.entries, key=lambda entry: entry.sort_key)
    ]
    lines = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": ['
    return lines + ",".join(f"\n  {row}" for row in rows) + ("\n ]" if rows else "]") + "\n}\n"


def _paths(device: torch.device, asked: str | None) -> Iterable[tuple[Path, bool]]:
    """Yield the files to read, and whether the user named them; in a folder, by architecture."""
    for folder, own in ((str(SHIPPED), False), (asked, True)):
        if folder is None:
            continue
        path = Path(folder)
        if own and not path.is_dir():
            yield path, own
        elif path.is_dir() and (path / f"{architecture(device)}.json").exists():
            yield path / f"{architecture(device)}.json", own


def _read(path: Path, ops: Collection[str], order: Order) -> TuningTable:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"it cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise TableError(f"it is not valid JSON ({error})") from None
    return replace(parse(data, ops, order), path=path)


def _applies(table: TuningTable, device: torch.device) -> bool:
    """Return whether a table is for this type of device; raise if not for this one.

    A GPU's table is judged when a GPU is first used: asking for one at import would start CUDA.
    """
    if table.device_type != device.type:
        if table.device_type == "cuda" and torch.version.cuda is None:
            raise TableError(f"it is for {table.architecture}, and this torch has no CUDA")
        return False
    here = architecture(device)
    if table.architecture != here:
        raise TableError(f"it is for {table.architecture}, this is {here}")
    theirs, ours = _minor(table.versions["torch"]), _minor(torch.__version__)
    if theirs != ours:
        raise TableError(f"it was measured with torch {theirs}, this is {ours}")
    return True


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _entry(number: int, row: Any, backends: Collection[str]) -> Entry:
    def need(right: bool, what: str) -> None:
        if not right:
            raise TableError(f"entry {number} {what}")

    need(isinstance(row, dict), "is no object")
    op, dtype, size, backend, config, medians, ratio = (
        row.get(key)
        for key in ("op", "dtype", "size_class", "backend", "config", "median_us", "ratio")
    )
    need(isinstance(op, str), f"has op {op!r}")
    need(isinstance(dtype, str) and dtype in DTYPES, f"has dtype {dtype!r}")
    need(type(size) is int and 0 <= size <= _LARGEST_CLASS, f"has size_class {size!r}")
    need(isinstance(backend, str) and backend in backends, f"has backend {backend!r}")
    named = isinstance(config, str) and backend == "triton"
    need(config is None or named, f"has config {config!r} of {backend}")
    numbers = medians.values() if isinstance(medians, dict) else ()
    need(bool(numbers) and all(map(_is_time, numbers)), f"has median_us {medians!r}")
    need(label(backend, config) in medians, "has no median of its winner")
    need(_is_time(ratio), f"has ratio {ratio!r}")
    cases = row.get("cases", [])
    need(isinstance(cases, list), f"has cases {cases!r}")
    return Entry(op, dtype, size, backend, config, medians, ratio, tuple(cases))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _by_key(entries: Iterable[Entry]) -> dict[Key, Entry]:
    """Return the entries as a lookup wants them.

    Classes between two neighbouring measured ones that have the same winner get it too: sizes of a
    benchmark are seldom those of a user.
    """
    by_key: dict[Key, Entry] = {}
    ordered = sorted(entries, key=lambda entry: entry.sort_key)
    for (op, dtype), group in groupby(ordered, key=lambda entry: (entry.op, entry.dtype)):
        line = list(group)
        for low, high in pairwise(line):
            if (low.backend, low.config) == (high.backend, high.config):
                middle = (low.size_class + high.size_class) // 2
                for size in range(low.size_class + 1, high.size_class):
                    by_key[op, DTYPES[dtype], size] = low if size <= middle else high
        by_key |= {(op, DTYPES[dtype], entry.size_class): entry for entry in line}
    return by_key
