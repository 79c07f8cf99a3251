"""Errors that all ranks of a group raise together.

A rank that raised alone would leave the others waiting in their next collective. Ranks therefore
exchange whether something is wrong before they communicate, and then all of them raise.

``raise_on_all`` exchanges messages as Python objects: for set-up code, where the host may wait.
``vote`` exchanges one number per rank, for code that may be part of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from fusedops.parallel.comm.collectives import all_to_all
from fusedops.parallel.comm.host_groups import host_group


@contextmanager
def raise_on_all(
    kinds: type[Exception] | tuple[type[Exception], ...],
    make: Callable[[dict[int, str]], Exception],
    group: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Raise on every rank of a group if the block raises one of ``kinds`` on one of them.

    All ranks must enter it, and the block must not communicate. ``make`` makes the exception that
    all ranks raise, from the messages by rank. Without a group: this process alone.
    """
    message = None
    try:
        yield
    except kinds as error:
        message = str(error)
    if messages := gather_errors(message, group):
        raise make(messages)


def gather_errors(message: str | None, group: dist.ProcessGroup | None) -> dict[int, str]:
    """Return the error messages of the ranks that have one, by rank; the same on every rank."""
    messages = gather_objects(message, group)
    return {rank: text for rank, text in enumerate(messages) if text is not None}


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, in their order; without a group this process's alone."""
    if group is None or group.size() == 1:
        return [value]
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=host_group(group, accelerator) or group)
    return values


class ErrorCode(IntEnum):
    """What a rank reports of its error to the others."""

    NONE = 0
    TYPE = 1
    VALUE = 2
    PLAN = 3
    OTHER_GROUP = 4


_REPORTS = {
    ErrorCode.TYPE: "got an argument of a wrong type",
    ErrorCode.VALUE: "got arguments that do not fit each other or the group",
    ErrorCode.PLAN: "got a plan whose expert ids or offsets are out of range",
    ErrorCode.OTHER_GROUP: "received or raised an error in the exchange between nodes",
}


def code_of(error: Exception | None) -> ErrorCode:
    """Return the code of an exception by its type."""
    if error is None:
        return ErrorCode.NONE
    return ErrorCode.TYPE if isinstance(error, TypeError) else ErrorCode.VALUE


def error_of(
    op: str, codes: Sequence[int], sender: str = "rank {} of the group"
) -> ValueError | None:
    """Return the error of the first rank that reports one, which ``sender`` names, or ``None``."""
    for rank, code in enumerate(codes):
        if code != ErrorCode.NONE:
            return ValueError(f"{op}: {sender.format(rank)} {_REPORTS[ErrorCode(code)]}")
    return None


def vote(
    op: str,
    groups: Sequence[dist.ProcessGroup],
    error: Exception | None,
    device: torch.device | None = None,
) -> None:
    """Raise on every rank if one has an error; the host waits for a number of each rank.

    ``groups`` is one group; or those within and across nodes: the result of the first is sent in
    the second. ``device`` is one from which the backend of the groups can send.
    """
    number = int(code_of(error))
    senders = ["rank {} of this node", "a rank of node {}"]
    if len(groups) == 1:
        senders = ["rank {} of the group"]
    for group, sender in zip(groups, senders, strict=True):
        sent = torch.full((group.size(),), number, dtype=torch.int64, device=device)
        codes = all_to_all(sent, group, label="error vote").wait().tolist()
        if error is None:
            error = error_of(op, codes, sender)
            number = next((code for code in codes if code), 0)
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback refers to this frame: a cycle would keep the tensors
