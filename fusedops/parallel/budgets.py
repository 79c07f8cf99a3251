"""What each mode of parallelism communicates, as formulae: at most so many calls and bytes.

A budget is that of one rank, for a forward and a backward, and counts as ``comm.collectives`` does:
bytes that the rank sends to others. ``Budget.exceeded`` compares a recorded log with it. Sizes are
bytes of complete tensors, before they are sharded over the ``ranks`` of the mode; ``activation``
is ``[B, S, H]``. ``halves`` is 2 with micro-batch overlap, which makes the calls of activations
twice, each of half the bytes (of even batches), and all others once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusedops.parallel.comm.collectives import Log


@dataclass(frozen=True)
class Budget:
    """How much a rank may communicate."""

    calls: Mapping[str, int] = field(default_factory=dict)  # by kind, as ``collectives.KINDS``
    bytes: int = 0  # that it sends to others

    def __add__(self, other: Budget) -> Budget:
        return Budget(dict(Counter(self.calls) + Counter(other.calls)), self.bytes + other.bytes)

    def __mul__(self, times: int) -> Budget:
        return Budget({kind: times * n for kind, n in self.calls.items()}, times * self.bytes)

    def exceeded(self, log: Log) -> list[str]:
        """Return a sentence for each kind, and for the bytes, of which a log has more."""
        excess = [
            f"{made} calls of {kind}, of which there may be {self.calls.get(kind, 0)}"
            for kind, made in log.counts().items()
            if made > self.calls.get(kind, 0)
        ]
        if log.bytes() > self.bytes:
            excess.append(f"{log.bytes()} bytes sent, of which there may be {self.bytes}")
        return excess


def all_reduces(ranks: int, sizes: Sequence[int]) -> Budget:
    """Return the budget of an all-reduce of each of these sizes, such as gradients of norms."""
    sent = sum(2 * size * (ranks - 1) // ranks for size in sizes)
    return Budget({"all_reduce": len(sizes)}, sent)


def tensor_layer(ranks: int, activation: int, *, halves: int = 1, again: bool = False) -> Budget:
    """Return the budget of attention and feed-forward, their features sharded.

    Each of the two has an all-reduce at its end, and in the backward one at its start. ``again`` is
    that of a second forward, for the backward; the last all-reduce (with two halves of the second
    one) is left out: nothing in the layer needs its result.
    """
    calls = 2 * halves - 1 if again else 4 * halves
    return all_reduces(ranks, [activation // halves] * calls)


def sequence_layer(
    ranks: int,
    activation: int,
    *,
    overlap: bool = False,
    overlap_mlp: bool = True,
    halves: int = 1,
    again: bool = False,
) -> Budget:
    """Return the budget of such a layer with sequence parallelism.

    Two all-gathers and two reduce-scatters in the forward, two of each in the backward. With
    ``overlap`` three of each kind are rings, whose steps overlap products, and the input of the
    feed-forward part is gathered once more for the gradient of its weight, instead of being saved.
    Without ``overlap_mlp`` the feed-forward part has no rings. Micro-batch overlap has none at all.
    ``again`` is as of ``tensor_layer``.
    """
    part = activation * (ranks - 1) // ranks
    if not overlap or halves > 1:
        gathers, scatters = (2 * halves, 2 * halves - 1) if again else (4 * halves, 4 * halves)
        calls = {"all_gather": gathers, "reduce_scatter": scatters}
        return Budget(calls, (gathers + scatters) * part // halves)
    if again:
        return Budget({"all_gather": 1, "send_receive": 3 * (ranks - 1)}, 4 * part)
    if not overlap_mlp:
        rings = {"send_receive": 2 * (ranks - 1)}
        return Budget({"all_gather": 3, "reduce_scatter": 3, **rings}, 8 * part)
    rings = {"send_receive": 6 * (ranks - 1)}
    return Budget({"all_gather": 2, "reduce_scatter": 1, **rings}, 9 * part)


def sparse_layer(
    ranks: int,
    activation: int,
    *,
    sequence: bool,
    overlap: bool = False,
    halves: int = 1,
    again: bool = False,
) -> Budget:
    """Return the budget of attention, its features sharded, and of experts of a shard of tokens.

    Without sequence parallelism the experts' results are gathered, and in the backward the
    gradients of their inputs. ``again`` is that of a second forward, for the backward; a last
    gathering is left out.
    """
    part = activation * (ranks - 1) // ranks
    if not sequence:
        sums = all_reduces(ranks, [activation // halves] * (halves if again else 2 * halves))
        gathers = halves - 1 if again else 2 * halves
        return sums + Budget({"all_gather": gathers}, gathers * part // halves)
    passes = 1 if again else 2
    if overlap and halves == 1:
        rings = passes * (ranks - 1)
        calls = {"all_gather": 1, "reduce_scatter": passes - 1, "send_receive": rings}
        return Budget(calls, 2 * passes * part)
    calls = {"all_gather": passes * halves, "reduce_scatter": passes * halves}
    return Budget(calls, 2 * passes * part)


def ring_layer(ranks: int, keys_and_values: int) -> Budget:
    """Return the budget of ring attention; keys that are masked for all are not sent."""
    steps = 3 * (ranks - 1)
    return Budget({"send_receive": steps}, steps * (keys_and_values // ranks))


def all_to_all_layer(ranks: int, queries: int, keys_and_values: int) -> Budget:
    """Return the budget of attention by heads: to heads and back, in forward and backward."""
    local_bytes = (2 * queries + keys_and_values) // ranks
    return Budget({"all_to_all": 4}, 2 * local_bytes * (ranks - 1) // ranks)


def pipeline(boundaries: int, microbatches: int, activation: int, *, words: int = 0) -> Budget:
    """Return the budget of a rank of a pipeline, after the first step, which sends headers too.

    Args:
        boundaries: between a stage of this rank and one of another, ``ScheduleTable.boundaries``.
        microbatches: of a step.
        activation: bytes of the hidden states of a micro-batch, on one rank of ``tp`` and ``cp``.
        words: bytes of an embedding whose gradients the first and the last rank exchange, on these.
    """
    sends = microbatches * boundaries
    return Budget({"send_receive": 2 * sends + bool(words)}, sends * activation + words)


def replicas(ranks: int, parameters: int, marks: int, *, buckets: int) -> Budget:
    """Return the budget of gradients that are summed over replicas.

    ``marks`` is the bytes that tell which parameters have a gradient: a number each.
    """
    sent = 2 * (parameters + marks) * (ranks - 1) // ranks
    return Budget({"all_reduce": buckets}, sent)
