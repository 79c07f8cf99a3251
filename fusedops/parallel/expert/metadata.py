"""What the ranks of a group must agree on before rows are exchanged, and how they find out.

Each rank sends each other a note of fixed size: how many rows it will send, what it believes the
shapes to be, and whether something is wrong with its arguments. The size depends on nothing, so
even ranks that disagree about everything can read each other's notes, and then all raise: a rank
that raised on its own would leave the others waiting for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedops.parallel.comm.collectives import Pending, all_to_all

MAX_CHUNKS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPARED = (
    "num_experts",
    "hidden size",
    "dtype",
    "bytes per row",
    "requires_grad",
    "chunks",
    "reduce",
    "max_rows",
)
REDUCTIONS = ("home", "node")
_FIRST_ROWS = 2 + len(_COMPARED)
_LENGTH = _FIRST_ROWS + 2 * MAX_CHUNKS
# What an ``Agreement`` and a ``Verdict`` send to each rank: int64.
NOTE_BYTES, WORD_BYTES = 8 * _LENGTH, 8

# What a note says of its sender's arguments. 0: nothing is wrong.
BAD_TYPE, BAD_VALUE, BAD_PLAN, TOO_MANY, BETWEEN_NODES = 1, 2, 3, 4, 5
_COMPLAINTS = {
    BAD_TYPE: "got an argument of a wrong type",
    BAD_VALUE: "got arguments that do not fit each other or the group",
    BAD_PLAN: "got a plan whose expert ids or offsets are out of range",
    TOO_MANY: "would receive more than max_rows rows",
    BETWEEN_NODES: "heard of an error, or made one, in the exchange between nodes",
}


@dataclass(frozen=True)
class Beliefs:
    """What must be the same on all ranks."""

    num_experts: int
    hidden_size: int
    dtype: torch.dtype
    row_bytes: int
    requires_grad: bool
    chunks: int
    reduce: str
    max_rows: int  # -1: as many as arrive

    def numbers(self) -> list[int]:
        """Return them as integers, in the order of ``_COMPARED``."""
        return [
            self.num_experts,
            self.hidden_size,
            _DTYPES.index(self.dtype),
            self.row_bytes,
            int(self.requires_grad),
            self.chunks,
            REDUCTIONS.index(self.reduce),
            self.max_rows,
        ]


@dataclass(frozen=True)
class Rows:
    """How many rows go where, per rank of the group."""

    send: list[int]
    receive: list[int]


class Agreement:
    """Notes on their way.

    Args:
        op: the function's name, for messages.
        group: the process group.
        device: of the notes: one that the group's backend can send.
        problem: what is wrong with this rank's arguments, or ``None``.
        complaint: what the others hear of it; as the type of ``problem`` says by default.
        beliefs: ``None`` beside a problem.
        rows: per chunk, int32 ``[ranks]``: rows for each rank.
        slots: per chunk, the same in another unit, or empty.
        dropped: int32, choices that nobody computes.
        faults: int32, 0 where ids and offsets are in range.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        problem: Exception | None = None,
        complaint: int | None = None,
        beliefs: Beliefs | None = None,
        rows: Sequence[torch.Tensor] = (),
        slots: Sequence[torch.Tensor] = (),
        dropped: torch.Tensor | None = None,
        faults: torch.Tensor | None = None,
    ) -> None:
        self._op, self._problem = op, problem
        self._chunks = len(rows)
        size = group.size()
        notes = torch.zeros((size, _LENGTH), dtype=torch.int64, device=device)
        if problem is not None:
            notes[:, 0] = complaint or _complaint(problem)
        else:
            assert beliefs is not None and dropped is not None and faults is not None
            notes[:, 0] = BAD_PLAN * faults
            notes[:, 1] = dropped
            # From pinned memory: a copy from other memory waits for all that the stream has to do.
            pinned = device.type == "cuda"
            numbers = torch.tensor(beliefs.numbers(), dtype=torch.int64, pin_memory=pinned)
            notes[:, 2:_FIRST_ROWS] = numbers.to(device, non_blocking=True)
            for i, count in enumerate(rows):
                notes[:, _FIRST_ROWS + i] = count
            for i, count in enumerate(slots):
                notes[:, _FIRST_ROWS + MAX_CHUNKS + i] = count
        self._sent, self._received = notes, torch.empty_like(notes)
        self._arriving: Pending | None = all_to_all(
            notes, group, out=self._received, label="expert counts"
        )
        self._result: tuple[list[Rows], list[Rows]] | None = None
        self.dropped: list[int] = []

    def wait(self) -> tuple[list[Rows], list[Rows]]:
        """Return ``(rows, slots)`` per chunk; raises on every rank when one has a problem."""
        if self._result is None:
            arriving, self._arriving = self._arriving, None
            if arriving is not None:
                arriving.wait()
            # The only wait for the device: the backends need the numbers on the host.
            sent, received = torch.stack((self._sent, self._received)).tolist()
            self._raise(sent, received)
            self.dropped = [note[1] for note in received]
            units = []
            for first in (_FIRST_ROWS, _FIRST_ROWS + MAX_CHUNKS):
                columns = range(first, first + self._chunks)
                units.append(
                    [Rows([n[c] for n in sent], [n[c] for n in received]) for c in columns]
                )
            self._result = (units[0], units[1])
        return self._result

    def _raise(self, sent: list[list[int]], received: list[list[int]]) -> None:
        if self._problem is not None:
            raise self._problem
        if sent[0][0] != 0:
            raise bad_plan(self._op)
        for rank, note in enumerate(received):
            if note[0] != 0:
                complaint = _COMPLAINTS[note[0]]
                raise ValueError(f"{self._op}: rank {rank} of the group {complaint}")
        for i, name in enumerate(_COMPARED):
            values = [note[2 + i] for note in received]
            if len(set(values)) > 1:
                words: dict[str, Sequence[Any]] = {"dtype": _DTYPES, "reduce": REDUCTIONS}
                shown = [words[name][value] for value in values] if name in words else values
                raise ValueError(f"{self._op}: the ranks must agree on {name}, got {shown}")


def bad_plan(op: str) -> ValueError:
    """Return the error of a plan whose numbers are out of range."""
    return ValueError(
        f"{op}: plan must have expert_ids in [0, num_experts], offsets that do not decrease,"
        " permutation and positions in [0, tokens * top_k), got others"
    )


def _complaint(problem: Exception | None) -> int:
    if problem is None:
        return 0
    return BAD_TYPE if isinstance(problem, TypeError) else BAD_VALUE


class Verdict:
    """Whether all ranks can do what the others wait for: one number each, on its way.

    Args:
        op: the function's name, for messages.
        groups: one; or those within and across nodes: what was heard in the first is told in the
            second, so that every rank of the mesh hears of every other.
        problem: what is wrong on this rank, or ``None``.
        complaint: what the others hear of it; as the type of ``problem`` says by default.
        device: one that the groups' backend can send from.
    """

    def __init__(
        self,
        op: str,
        groups: Sequence[dist.ProcessGroup],
        problem: Exception | None,
        *,
        complaint: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._op, self._problem, self._device = op, problem, device
        self._word = (complaint or _complaint(problem)) if problem is not None else 0
        senders = ["rank {} of the group"]
        if len(groups) > 1:
            senders = ["rank {} of this node", "a rank of node {}"]
        self._rest = list(zip(groups, senders, strict=True))
        self._ask()

    def relay(self) -> None:
        """Wait for the first group, and begin to tell the second, if there is one."""
        if self._rest:
            self._hear()
            self._ask()

    def wait(self) -> None:
        """Raise on every rank when one has a problem."""
        self.relay()
        self._hear()
        if self._problem is not None:
            raise self._problem

    def _ask(self) -> None:
        group, self._sender = self._rest.pop(0)
        self._sent = torch.full((group.size(),), self._word, dtype=torch.int64, device=self._device)
        self._arriving = all_to_all(self._sent, group, label="expert word")

    def _hear(self) -> None:
        for rank, code in enumerate(self._arriving.wait().tolist()):
            if code != 0 and self._problem is None:
                sender, self._word = self._sender.format(rank), code
                self._problem = ValueError(f"{self._op}: {sender} {_COMPLAINTS[code]}")
