"""Whether the processes of a job fit together, before they connect.

The processes exchange where they run through the store of the rendezvous. A backend would report
less: NCCL calls two processes with one GPU an internal error, and waits for a process without one.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.utils.store import synchronize

from fusedops._core import env
from fusedops.launch.config_table import InputError

_KEY = "fusedops/start"
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    host: str
    gpu: str  # its identifier; empty on the CPU
    local_ranks: int | None  # processes that the launcher has started on the host, if it says so
    problem: str  # why this process cannot take part; empty if it can


def own_place(device: torch.device, problem: str) -> Place:
    """Return where this process runs; with a problem, its device is not asked."""
    gpu = ""
    if device.type == "cuda" and not problem:
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Place(socket.gethostname(), gpu, env.local_ranks(), problem)


def exchange(place: Place, store: dist.Store, rank: int, size: int) -> list[Place]:
    """Return the places of all processes; rank 0, which has the store, returns as the last."""
    if size == 1:
        return [place]
    prefix = f"{_KEY}/{store.add(f'{_KEY}/turn of {rank}', 1)}/"
    text, seconds = json.dumps(asdict(place)), default_pg_timeout.total_seconds()
    texts = synchronize(store, text.encode(), rank, size, prefix, seconds)
    return [Place(**json.loads(text)) for text in texts]


def check(places: Sequence[Place]) -> None:
    """Raise an ``InputError`` unless these processes can train together.

    Args:
        places: of all processes, by rank. All of them get the same, so that all raise.
    """
    if problem := next((place.problem for place in places if place.problem), ""):
        raise InputError(problem)
    on_cpu = [rank for rank, place in enumerate(places) if not place.gpu]
    if 0 < len(on_cpu) < len(places):
        raise InputError(
            f"torch sees no GPU in {shown_ranks(on_cpu)} ({places[on_cpu[0]].host}), and the "
            "others have one: set device to cpu, or see fusedops doctor there"
        )
    if len({place.local_ranks for place in places}) > 1:
        counts = (f"{place.local_ranks} on {place.host}" for place in places)
        nodes = ", ".join(dict.fromkeys(counts))
        raise InputError(
            f"every node must have as many processes, got {nodes}: give torchrun the same "
            "--nproc-per-node on all of them"
        )
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault((place.host, place.gpu), []).append(rank)
    for (host, gpu), ranks in ranks_of.items():
        if gpu and len(ranks) > 1:
            raise InputError(
                f"each process needs a GPU of its own, and {shown_ranks(ranks)} have one GPU of "
                f"{host}: start fewer processes there, or set device to cpu"
            )


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, of many the first."""
    named = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    named += f" and {more} more" if more > 0 else ""
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
