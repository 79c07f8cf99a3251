"""Where the time of each step went on each rank: what is recorded, and the file of a run.

A step of a rank is a row of float32 numbers, ``FIELDS``. Sections (``data`` to ``checkpoint``) are
the rank's own time: what it waited in collectives is not in them, but in ``blocked_*``. The first
rank writes the rows of all ranks into ``profile/`` of the run's folder:

    profile/header.json    ranks, sizes of the mesh, names of the fields
    profile/steps.f32      for each step its number, then the rows of all ranks: little-endian
    profile/memory-0.json  what rank 0 allocated in one step, if ``log.memory_step`` asks for it

The file is only appended to. A step that was repeated after a rollback is there twice, and its last
record counts; a record that a killed process left unfinished is ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedops.launch.config_table import InputError
from fusedops.parallel.sizes import Sizes

FOLDER, HEADER, STEPS = "profile", "header.json", "steps.f32"
VERSION = 2
# A rank's own seconds of a step, without what it waited for.
SECTIONS = ("data", "forward", "backward", "optimizer", "other", "validation", "checkpoint")
# Those of which every step has as much.
REGULAR = SECTIONS[:5]
# Process groups by the kind of parallelism; ``world`` is all ranks.
GROUPS = ("tp", "cp", "ep", "pp", "dp", "world")
FIELDS = (
    "step",  # seconds from its begin to its end
    *SECTIONS,
    "gc",  # seconds of Python's garbage collector, which are in the sections as well
    *(f"blocked_{name}" for name in GROUPS),  # seconds in which the rank waited in a collective
    *(f"bytes_{name}" for name in GROUPS),  # that the rank sent
    "tokens",  # of the rank's sequences
    "pairs",  # of tokens that attention compares, in a layer and head
    "expert_rows",  # that the rank's experts computed, in all layers
)
_INDEX = {name: number for number, name in enumerate(FIELDS)}


def column(name: str) -> int:
    """Return the index of a field."""
    return _INDEX[name]


def memory_file(folder: str | Path, rank: int) -> Path:
    """Return the file of what a rank allocates in a step; ``folder`` is that of the run."""
    return Path(folder) / FOLDER / f"memory-{rank}.json"


@dataclass(frozen=True)
class RunShape:
    """What a run's records are of.

    Attributes:
        sizes: of the mesh, by ``"pp"``, ``"dp"``, ``"cp"``, ``"tp"`` and ``"ep"``.
        device: ``"cpu"`` or ``"cuda"``.
    """

    sizes: dict[str, int]
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return Sizes(**self.sizes).ranks

    def stage_of(self, rank: int) -> int:
        """Return the pipeline rank of a rank: the slowest dimension of the mesh."""
        return rank // (self.ranks // self.sizes["pp"])

    def groups(self, name: str) -> list[list[int]]:
        """Return the process groups of a kind of parallelism, a name of ``GROUPS``."""
        from fusedops.parallel.mesh import rank_groups

        if name == "world":
            return [list(range(self.ranks))]
        # Gradients are reduced over dp x cp.
        return rank_groups(Sizes(**self.sizes))["data" if name == "dp" else name]


@dataclass
class Timings:
    """The recorded steps of a run.

    Attributes:
        shape: what they are of.
        steps: their numbers, ascending.
        values: float32 ``[steps, ranks, fields]``.
        notes: what could not be read.
    """

    shape: RunShape
    steps: list[int]
    values: torch.Tensor
    notes: list[str] = field(default_factory=list)

    def of(self, name: str) -> torch.Tensor:
        """Return a field of all steps and ranks, ``[steps, ranks]``."""
        return self.values[:, :, _INDEX[name]]

    @property
    def blocked(self) -> torch.Tensor:
        """Seconds in which a rank waited in collectives, ``[steps, ranks]``."""
        return sum((self.of(f"blocked_{name}") for name in GROUPS), torch.zeros(()))


class TimingsWriter:
    """Appends the rows of all ranks to the file of a run.

    Args:
        folder: of the run.
        shape: of the run. A file of another shape is moved aside: ``profile-1`` and so on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, shape: RunShape) -> None:
        path = folder / FOLDER
        header = json.dumps({"version": VERSION, "fields": FIELDS, **asdict(shape)}, indent=1)
        if (path / HEADER).exists() and (path / HEADER).read_text() != header:
            numbers = (number for number in range(1, 10_000))
            path.rename(next(p for n in numbers if not (p := folder / f"{FOLDER}-{n}").exists()))
        path.mkdir(parents=True, exist_ok=True)
        (path / HEADER).write_text(header)
        self._size = 4 * (1 + shape.ranks * len(FIELDS))
        self._file = (path / STEPS).open("ab")
        # A killed process may have left a part of a record.
        self._file.truncate(self._file.tell() // self._size * self._size)

    def write(self, step: int, values: torch.Tensor) -> None:
        """Append a step: float32 ``[ranks, fields]``."""
        record = torch.cat([torch.tensor([float(step)]), values.float().flatten()])
        self._file.write(record.numpy().astype("<f4").tobytes())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_timings(folder: str | Path) -> Timings:
    """Read the records of a run.

    Args:
        folder: of the run, or its folder ``profile``.

    Returns:
        All complete records, each step once; its notes name what was left out.

    Raises:
        InputError: there are no records, or they are of another version.
    """
    path = Path(folder)
    path = path if (path / HEADER).exists() else path / FOLDER
    try:
        header: dict[str, Any] = json.loads((path / HEADER).read_text())
        data = (path / STEPS).read_bytes()
    except OSError as error:
        raise InputError(
            f"{folder} has no records of steps ({error.strerror}: {error.filename}); "
            "fusedops train writes them with log.timings above 0"
        ) from None
    except ValueError as error:
        raise InputError(f"{path / HEADER} is damaged: {error}; profile another run") from None
    if header.pop("version", None) != VERSION or tuple(header.pop("fields", ())) != FIELDS:
        raise InputError(
            f"{path} was written by another version of fusedops: read it with that one"
        )
    shape = RunShape(**header)
    width = 1 + shape.ranks * len(FIELDS)
    complete, rest = divmod(len(data), 4 * width)
    notes = [f"the last record is incomplete: {rest} bytes were ignored"] if rest else []
    records = torch.frombuffer(
        bytearray(data[: 4 * width * complete] or bytes(4)), dtype=torch.float32
    )
    records = records[: width * complete].view(complete, width)
    last = {int(step): number for number, step in enumerate(records[:, 0].tolist())}
    steps = sorted(last)
    if len(steps) < complete:
        notes.append(f"{complete - len(steps)} steps were repeated: their last record counts")
    values = records[[last[step] for step in steps], 1:].view(len(steps), shape.ranks, len(FIELDS))
    return Timings(shape, steps, values, notes)
