"""``PatchReport``: the replaced modules with op and backend, and the reasons of the others."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleReport:
    """What happened to one module.

    Attributes:
        name: qualified name in the model, ``""`` for the model itself.
        cls: name of its class.
        replaced: whether a fused op does its work, either its own op or that of its parent.
        op: the op or ops, comma separated; ``""`` if none.
        backend: the backend that would run on the current device of the parameters; ``""`` if not
            replaced.
        reason: why it was not replaced, or a note about the replacement.
        failed: whether a rule exists for its class but this instance does not allow it.
        gradients: after an example step in training, its own parameters that require a gradient;
            those that received none as ``"not NAME"``.
    """

    name: str
    cls: str
    replaced: bool
    op: str = ""
    backend: str = ""
    reason: str = ""
    failed: bool = False
    gradients: str = ""


@dataclass(frozen=True)
class StockTime:
    """Time that a class of modules spends in operators that are not fused."""

    cls: str  # its name, or that no module called them
    ms: float  # milliseconds in a step
    # Why its modules were not replaced; ``None``: they were, and this is the rest, or they only
    # call others
    reason: str | None

    @property
    def advice(self) -> str:
        """What would change it."""
        if self.reason is not None and self.reason.startswith("from level "):
            return f'patch(model, level="{self.reason.split()[2]}") fuses it'
        if self.reason is None:
            return "its own code; torch.compile with fusedops.compile_passes() may fuse parts of it"
        return self.reason


@dataclass(frozen=True)
class StepTime:
    """Where the time of a measured step goes."""

    ms: float  # milliseconds in operators, forward and backward; Python's time is not counted
    fused_ms: float  # those in fused ops
    stock: tuple[StockTime, ...]  # the others by class of module, the longest first
    # Names of the parameters that receive a gradient in the step of the stock model, and none in
    # that of this model: an adapter that would not be trained
    without_gradient: tuple[str, ...] = ()

    @property
    def fused_share(self) -> float:
        """The part of the time that is spent in fused ops, from 0 to 1."""
        return self.fused_ms / self.ms if self.ms else 0.0

    def __str__(self) -> str:
        lines = [f"measured step: {self.ms:.1f} ms in operators, {self.fused_share:.0%} fused"]
        for entry in self.stock[:3]:
            if entry.ms >= 0.01 * self.ms:
                lines.append(f"  stock {entry.ms / self.ms:.0%}: {entry.cls}: {entry.advice}")
        if self.without_gradient:
            names = ", ".join(self.without_gradient)
            lines.append(f"  WARNING: no gradient since the model is patched: {names}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PatchReport:
    """The result of ``fusedops.patch``; ``print`` shows it as a table.

    Attributes:
        model: name of the model's class.
        level: the requested level.
        modules: one entry per module that computes something, in the model's order.
        step: the time of a step, where an ``example`` was given.

    Example:
        >>> import torch, fusedops
        >>> report = fusedops.patch(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Tanh()))
        >>> report.num_replaced, [entry.name for entry in report.kept]
        (1, ['1'])
    """

    model: str
    level: str
    modules: tuple[ModuleReport, ...]
    step: StepTime | None = None

    @property
    def replaced(self) -> tuple[ModuleReport, ...]:
        """The modules whose work a fused op does."""
        return tuple(entry for entry in self.modules if entry.replaced)

    @property
    def kept(self) -> tuple[ModuleReport, ...]:
        """The modules that were not replaced, each with its reason."""
        return tuple(entry for entry in self.modules if not entry.replaced)

    @property
    def failed(self) -> tuple[ModuleReport, ...]:
        """The modules of ``kept`` that have a rule: ``strict=True`` raises for them."""
        return tuple(entry for entry in self.modules if entry.failed)

    @property
    def num_replaced(self) -> int:
        """The number of modules whose work a fused op does."""
        return len(self.replaced)

    @property
    def counts(self) -> dict[str, int]:
        """The number of modules per op or combination of ops."""
        return dict(Counter(entry.op for entry in self.replaced))

    @staticmethod
    def watched(module: object) -> tuple[str, ...]:
        """Return the functions, methods and values whose change lets a module run as in stock.

        Args:
            module: of the patched model; one that is not patched watches nothing.
        """
        rule = getattr(type(module), "fused_rule", None)
        names: tuple[str, ...] = () if rule is None else rule.watched.names()
        return names

    def __getitem__(self, name: str) -> ModuleReport:
        """Return the entry of the module with this qualified name."""
        for entry in self.modules:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __repr__(self) -> str:
        return (
            f"PatchReport({self.model}, level={self.level!r}, "
            f"{self.num_replaced} of {len(self.modules)} modules replaced)"
        )

    def __str__(self) -> str:
        header = ("module", "class", "op", "backend", "gradients", "note")
        rows: list[tuple[str, ...]] = [header, *_rows(self.modules)]
        if not any(entry.gradients for entry in self.modules):
            rows = [(*row[:4], row[5]) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        counts = ", ".join(f"{op}: {count}" for op, count in sorted(self.counts.items()))
        summary = f"{self.model}: {self.num_replaced} of {len(self.modules)} modules replaced"
        last = [counts] if counts else []
        if self.step is not None:
            last.append(str(self.step))
        if self.level != "-":  # ``describe`` does not know it
            summary += f" at level {self.level}"
        return "\n".join([summary, *lines, *last])


def _rows(modules: tuple[ModuleReport, ...]) -> list[tuple[str, ...]]:
    """Return one row per kind of module: equal entries of numbered layers share one."""
    groups: dict[tuple[str, ...], list[ModuleReport]] = {}
    for entry in modules:
        general = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        # The numbers of layers, not those of a measurement (0.81x, 1.5 ms).
        reason = re.sub(r"(?<![^. ])\d+(?![^.])(?!\.\d+(x| ms))", "*", entry.reason)
        backend = entry.backend if entry.replaced else "-"
        key = (general, entry.cls, entry.op or "-", backend, entry.gradients, reason)
        groups.setdefault(key, []).append(entry)
    rows = []
    for (general, *columns, reason), entries in groups.items():
        name = f"{general} (x{len(entries)})"
        if len(entries) == 1:
            name, reason = entries[0].name or "(the model)", entries[0].reason
        rows.append((name, *columns, reason))
    return rows
