"""What a training step does on a cluster, without one: ``cluster_step``.

The ranks are threads (``threads``), each with a GPU that is not there (``stand_in_device``). The
step runs with real values, so that the report has what it really does: where hosts wait, which
communication each rank takes part in, which copies and streams there are. It measures no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops._core import checks
from fusedops.testing import threads
from fusedops.testing.stand_in_cuda import stand_in_cuda
from fusedops.testing.stand_in_device import DeviceEvent, StandIn, caller, device_of, rank_device
from fusedops.testing.thread_collectives import ThreadCall

_OP = "cluster_step"
_TRANSFERS = ("send", "recv")


@dataclass(frozen=True)
class Communication:
    """One rank's part of a communication.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``,
            ``"broadcast"``, ``"send"``, ``"recv"`` and other names of ``torch.distributed``.
        ranks: of the group.
        nbytes: what the rank gives; for ``"recv"`` what it gets.
        dtype: of the tensors.
        device: ``"cuda"``, or ``"cpu"`` for a message between hosts.
        where: ``file:line`` of the caller outside of torch.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    dtype: str
    device: str
    where: str


@dataclass
class RankStep:
    """What one rank did in a step.

    Attributes:
        rank: its number.
        events: what it did with its device, and where its host waited.
        communications: those that it took part in.
    """

    rank: int
    events: list[DeviceEvent] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)


@dataclass(frozen=True)
class ClusterStep:
    """The report of ``cluster_step``; ``print`` shows it.

    Attributes:
        ranks: the recorded step, by rank.
        gpus_per_node: as the argument.
        unconnected: groups in which a transfer from one rank to another was the first
            communication: NCCL needs all ranks of a group in its first one, else it may hang.
    """

    ranks: tuple[RankStep, ...]
    gpus_per_node: int
    unconnected: tuple[tuple[int, ...], ...]

    def waits(self, allowed: Collection[str] = ()) -> dict[tuple[str, str], int]:
        """Return how often a host waits in the step: by reason and caller, of the rank with most.

        Args:
            allowed: callers that are left out, as ``file`` or ``file:line``.
        """
        counts = self._events("wait")
        return {
            (what, where): count
            for (what, where), count in counts.items()
            if where not in allowed and where.rpartition(":")[0] not in allowed
        }

    @property
    def misplaced(self) -> dict[tuple[str, str], int]:
        """Operators that got tensors of the host and of the device, by operator and caller."""
        return self._events("misplaced")

    @property
    def copies(self) -> dict[tuple[str, str], int]:
        """Bytes of asynchronous copies between host and device, of the rank with most."""
        return self._events("copy", lambda event: event.nbytes)

    def bytes_across_nodes(self) -> int:
        """Return the bytes that the rank with most gives to groups that span nodes."""
        return max(
            sum(
                communication.nbytes
                for communication in step.communications
                if self._spans_nodes(communication.ranks) and communication.kind != "recv"
            )
            for step in self.ranks
        )

    def _spans_nodes(self, ranks: tuple[int, ...]) -> bool:
        return len({rank // self.gpus_per_node for rank in ranks}) > 1

    def _events(
        self, kind: str, amount: Callable[[DeviceEvent], int] = lambda event: 1
    ) -> dict[tuple[str, str], int]:
        most: Counter[tuple[str, str]] = Counter()
        for step in self.ranks:
            counts: Counter[tuple[str, str]] = Counter()
            for event in step.events:
                if event.kind == kind:
                    counts[event.what, event.where] += amount(event)
            most |= counts  # the larger of each
        return dict(most)

    def __str__(self) -> str:
        nodes = -(-len(self.ranks) // self.gpus_per_node)
        lines = [
            f"A step; ranks: {len(self.ranks)}, nodes: {nodes}, GPUs of a node: "
            f"{self.gpus_per_node}. Numbers are per rank, of the rank with most."
        ]
        lines += _table("Host waits", [(f"{n}", *key) for key, n in self.waits().items()])
        lines += _table("Misplaced tensors", [(f"{n}", *key) for key, n in self.misplaced.items()])
        lines += _table("Communication", self._communication_rows())
        lines += _table("Asynchronous copies", [(_mb(n), *key) for key, n in self.copies.items()])
        streams = sum(self._events("stream").values())
        lines += ["", f"Orders between streams: {streams}"]
        if self.unconnected:
            groups = ", ".join(map(str, self.unconnected))
            lines += ["", f"Groups whose first communication is a transfer: {groups}"]
        return "\n".join(lines)

    def _communication_rows(self) -> list[tuple[str, ...]]:
        totals: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(dict)
        for step in self.ranks:
            for made in step.communications:
                size = len(made.ranks)
                across = "across nodes" if self._spans_nodes(made.ranks) else "in a node"
                hosts = " of hosts" if made.device == "cpu" else ""
                key = (made.kind + hosts, f"{size} ranks {across}", made.dtype, made.where)
                entry = totals[key].setdefault(step.rank, [0, 0])
                entry[0] += 1
                entry[1] += made.nbytes
        rows: list[tuple[str, ...]] = []
        for (kind, group, dtype, where), by_rank in totals.items():
            count, nbytes = map(max, zip(*by_rank.values(), strict=True))
            rows.append((f"{count}", kind, _mb(nbytes), dtype, group, where))
        return rows


def _table(title: str, rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["", f"{title}: none"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["", title, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB"


def cluster_step(
    make: Callable[[], Callable[[], Any]],
    ranks: int,
    *,
    gpus_per_node: int = 8,
    warm_up: int = 1,
) -> ClusterStep:
    """Run a training step on ranks with GPUs that are not there, and report what it does.

    Every rank calls ``make()``, then what it returns: ``warm_up`` times, and once while it is
    recorded. Inside, ``torch.distributed`` is initialised and ``torch.cuda`` answers for a GPU per
    rank; tensors on ``cuda`` are in host memory. Operators run with real values on the CPU: use few
    layers of small sizes, which changes no line of the report but its bytes.

    Args:
        make: builds model, optimizer and batch on a rank and returns the step, a function without
            arguments.
        ranks: number of GPUs, one rank each.
        gpus_per_node: how many of them a node has; ranks of a node have adjacent numbers.
        warm_up: steps before the one that is recorded; the first step of many programs prepares.

    Returns:
        The report.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is below its minimum.
        RankError: a rank raised, ranks called different communications, or all wait for each other
            because some skipped one; it tells which.

    Note:
        Functions of ``torch.cuda`` are replaced for the whole process while it runs. Not seen: what
        happens inside of kernels, and how long anything takes.

    Example:
        >>> import torch
        >>> from fusedops.models import ParallelConfig, Transformer, parallelize, preset
        >>> from fusedops.testing import cluster_step
        >>> def make():
        ...     model = Transformer(preset("tiny-llama"), device="meta")
        ...     engine = parallelize(model, ParallelConfig(tp=2), device="cuda")
        ...     batch = torch.zeros(2, 9, dtype=torch.int64, device="cuda")
        ...     shard = engine.shard_batch(batch[:, :-1], batch[:, 1:])
        ...     return lambda: engine.step([shard], engine.count(shard.labels))
        >>> report = cluster_step(make, ranks=2)
        >>> report.waits()
        {}
    """
    if not callable(make):
        checks.fail_type(_OP, "make", "a function", make)
    checks.integer(_OP, "ranks", ranks, least=1)
    checks.integer(_OP, "gpus_per_node", gpus_per_node, least=1)
    checks.integer(_OP, "warm_up", warm_up, least=0)
    steps = {rank: RankStep(rank) for rank in range(ranks)}
    seen: dict[int, set[str]] = {rank: set() for rank in range(ranks)}  # names of groups
    unconnected: set[tuple[int, ...]] = set()
    is_recording: set[int] = set()

    def observe(rank: int, group: str, members: tuple[int, ...], call: ThreadCall) -> None:
        if group not in seen[rank] and call.kind in _TRANSFERS:
            unconnected.add(members)
        seen[rank].add(group)
        if rank not in is_recording:
            return
        tensors = (call.outputs if call.kind == "recv" else call.inputs) or call.outputs
        # Inputs that are outputs as well have been copied, and an operator of torch copies both.
        buffers = [*call.outputs, *call.inputs]
        on_device = (
            not buffers
            or any(device_of(buffer) is not None for buffer in buffers)
            or rank_device().operator_device is not None
        )
        where = caller()
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        place = "cuda" if on_device else "cpu"
        made = Communication(call.kind, members, nbytes, dtype, place, where)
        steps[rank].communications.append(made)
        if not on_device:
            steps[rank].events.append(DeviceEvent("wait", f"{call.kind} of hosts", where))

    def body(rank: int) -> None:
        def record(event: DeviceEvent) -> None:
            if rank in is_recording:
                steps[rank].events.append(event)

        with StandIn(torch.device("cuda", rank % gpus_per_node), record).active():
            step = make()
            if not callable(step):
                checks.fail_type(_OP, "what make returns", "a function", step)
            for _ in range(warm_up):
                step()
            is_recording.add(rank)
            try:
                step()
            finally:
                is_recording.discard(rank)

    with stand_in_cuda(gpus_per_node):
        threads.run(body, ranks, observe=observe)
    return ClusterStep(tuple(steps.values()), gpus_per_node, tuple(sorted(unconnected)))
