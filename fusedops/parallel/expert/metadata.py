"""Metadata exchange: what ranks must know and agree on before they exchange rows.

Each rank sends every other one message of fixed size: how many rows it will send, the signature of
its call (shapes, dtype, options), and an error code. The size depends on nothing, so ranks that
disagree about everything else can still read each other's messages, and then all of them raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.async_exchange import RowCounts
from fusedops.parallel.collective_errors import ErrorCode, code_of, error_of
from fusedops.parallel.comm.collectives import Pending, all_to_all, note

MAX_CHUNKS = 8
REDUCTIONS = ("source", "node")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CallSignature(NamedTuple):
    """What must be the same on all ranks."""

    num_experts: int
    hidden_size: int
    dtype: torch.dtype
    row_bytes: int
    requires_grad: bool
    chunks: int
    reduce: str
    validate: bool


# The fields that are sent as the index of their value.
_VALUES: dict[str, Sequence[Any]] = {"dtype": _DTYPES, "reduce": REDUCTIONS}
# Columns of a message: error code, dropped slots, signature, rows and slots of each chunk.
_SIGNATURE = 2
_ROWS = _SIGNATURE + len(CallSignature._fields)
_SLOTS = _ROWS + MAX_CHUNKS
_COLUMNS = _SLOTS + MAX_CHUNKS
# What a ``MetadataExchange`` sends to each rank: int64.
METADATA_BYTES = 8 * _COLUMNS


class ExchangeCounts(NamedTuple):
    """What is exchanged of one chunk."""

    rows: RowCounts
    slots: RowCounts  # that the rows carry, where a row carries several
    dropped: list[int]  # per rank, the slots of all chunks that no expert computes


class MetadataExchange:
    """An exchange of metadata, started by the constructor.

    Args:
        op: the name of the public function, for messages.
        group: the process group.
        sent: ``[ranks, columns]``, the message for each rank, on a device from which the backend of
            the group can send.
        chunks: of which it has counts.
        error: that ``sent`` reports.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        sent: torch.Tensor,
        chunks: int = 0,
        error: Exception | None = None,
    ) -> None:
        self._op, self._chunks, self._error = op, chunks, error
        self._sent, self._received = sent, torch.empty_like(sent)
        self._pending: Pending | None = all_to_all(
            sent, group, out=self._received, label="expert metadata"
        )
        self._counts: list[ExchangeCounts] = []

    def of_chunk(self, chunk: int) -> ExchangeCounts:
        """Wait, and return the counts of one chunk."""
        if self._pending is not None:
            self.wait()
        return self._counts[chunk]

    def wait(self) -> None:
        """Wait for the metadata; raises on every rank if one must."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.wait()
        # The only wait for the device: the backends need the numbers on the host.
        sent, received = torch.stack((self._sent, self._received)).mT.tolist()
        self._raise(sent[0][0], received)
        columns = [RowCounts(*column) for column in zip(sent, received, strict=True)]
        rows, slots = (columns[first : first + self._chunks] for first in (_ROWS, _SLOTS))
        self._counts = [
            ExchangeCounts(*pair, received[1]) for pair in zip(rows, slots, strict=True)
        ]
        note("expert_rows", sum(sum(counts.receive) for counts in rows))

    def _raise(self, own_code: int, received: list[list[int]]) -> None:
        """Raise if a rank must; ``received`` has the numbers of all ranks, column by column."""
        error, self._error = self._error, None
        if error is None and own_code != ErrorCode.NONE:
            error = ValueError(
                f"{self._op}: plan must have expert_ids in [0, num_experts], offsets that do not"
                " decrease, permutation and positions in [0, tokens * top_k), got others"
            )
        error = error or error_of(self._op, received[0])
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the tensors
        for name, values in zip(CallSignature._fields, received[_SIGNATURE:_ROWS], strict=True):
            if len(set(values)) > 1:
                shown = [_VALUES[name][value] if name in _VALUES else value for value in values]
                raise ValueError(f"{self._op}: the ranks must agree on {name}, got {shown}")


def message(
    ranks: int,
    signature: CallSignature,
    rows: Sequence[torch.Tensor],
    slots: Sequence[torch.Tensor],
    dropped: torch.Tensor,
    faults: torch.Tensor,
) -> torch.Tensor:
    """Return what is sent to each rank of a group.

    Args:
        ranks: of the group.
        signature: of the call.
        rows: per chunk, int32 ``[ranks]``: rows for each rank.
        slots: per chunk, int32 ``[ranks]``: slots that these rows carry; empty where a row carries
            one slot.
        dropped: int32 scalar: slots that no expert computes.
        faults: int32 scalar: 0 where ids and offsets of the plan are in range, else 1.
    """
    sent = torch.zeros((ranks, _COLUMNS), dtype=torch.int64, device=dropped.device)
    sent[:, 0] = ErrorCode.PLAN * faults
    sent[:, 1] = dropped
    numbers = [
        _VALUES[name].index(value) if name in _VALUES else int(value)
        for name, value in signature._asdict().items()
    ]
    sent[:, _SIGNATURE:_ROWS] = device_tensor(numbers, torch.int64, dropped.device)
    for first, counts in ((_ROWS, rows), (_SLOTS, slots)):
        for i, count in enumerate(counts, first):
            sent[:, i] = count
    return sent


def send_error(
    op: str,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    error: Exception,
    code: ErrorCode | None = None,
) -> None:
    """Send an error where the other ranks of the groups expect metadata: all of them raise.

    ``code`` is what is reported of it, by default the code of its type.
    """
    for group in groups:
        sent = torch.zeros((group.size(), _COLUMNS), dtype=torch.int64, device=device)
        sent[:, 0] = int(code or code_of(error))
        with contextlib.suppress(TypeError, ValueError):
            MetadataExchange(op, group, sent, error=error).wait()
