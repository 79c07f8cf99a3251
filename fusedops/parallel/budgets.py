"""What each mode of parallelism communicates, as formulae: at most so many calls and bytes.

A budget is that of one rank, for a forward and a backward, and counts as ``communication`` does:
bytes that the rank sends to others. ``Budget.exceeded`` holds a recorded log to it. All sizes are
bytes of whole tensors, before they are divided over ``ranks``.

| one layer | calls | bytes sent |
|---|---|---|
| ``tensor_layer`` | 4 all-reduces of the activation | ``8 A (n - 1) / n`` |
| ``sequence_layer`` | 4 all-gathers and 4 reduce-scatters | ``8 A (n - 1) / n`` |
| ``ring_layer`` | ``3 (n - 1)`` keys and values, or their gradients | ``3 K (n - 1) / n`` |
| ``all_to_all_layer`` | 4 all-to-alls | ``2 (2 Q + K) (n - 1) / n^2`` |
| ``expert_layer`` | 6 all-to-alls | ``(leaving + arriving) (row + result) + 216 (n - 1)`` |

| one step | calls | bytes sent |
|---|---|---|
| ``pipeline`` | ``2 m b`` sends and receives | ``m b A``: ``b`` boundaries, ``m`` micro-batches |
| ``replicas`` | an all-reduce for each bucket | ``2 P (n - 1) / n`` |
| ``divided`` | an all-gather and a reduce-scatter for each block | ``2 P (n - 1) / n`` |

Micro-batch overlap makes the calls of activations twice, each of half the bytes (of even
batches), and all others once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusedops.parallel.collective_errors import VOTE_BYTES
from fusedops.parallel.comm.collectives import Log
from fusedops.parallel.expert.metadata import METADATA_BYTES


@dataclass(frozen=True)
class Budget:
    """How much a rank may communicate.

    Attributes:
        calls: by kind, as ``communication.KINDS``.
        bytes: that it sends to others.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0

    def __add__(self, other: Budget) -> Budget:
        return Budget(dict(Counter(self.calls) + Counter(other.calls)), self.bytes + other.bytes)

    def __mul__(self, times: int) -> Budget:
        return Budget({kind: times * n for kind, n in self.calls.items()}, times * self.bytes)

    def exceeded(self, log: Log) -> list[str]:
        """Return a sentence for each kind, and for the bytes, of which a log has more."""
        told = [
            f"{made} calls of {kind}, of which there may be {self.calls.get(kind, 0)}"
            for kind, made in log.counts().items()
            if made > self.calls.get(kind, 0)
        ]
        if log.bytes() > self.bytes:
            told.append(f"{log.bytes()} bytes sent, of which there may be {self.bytes}")
        return told


def all_reduces(ranks: int, sizes: Sequence[int]) -> Budget:
    """Return the budget of an all-reduce of each of these sizes, such as gradients of norms."""
    return Budget(
        {"all_reduce": len(sizes)}, sum(2 * size * (ranks - 1) // ranks for size in sizes)
    )


def tensor_layer(ranks: int, activation: int, *, halves: int = 1) -> Budget:
    """Return the budget of a layer of attention and feed-forward part, divided by features.

    Each of the two parts enters by nothing and leaves by an all-reduce, and backwards the other way
    round.

    Args:
        ranks: of ``tp``.
        activation: bytes of ``[B, S, H]``.
        halves: 2 with micro-batch overlap.
    """
    return all_reduces(ranks, [activation // halves] * (4 * halves))


def sequence_layer(
    ranks: int, activation: int, *, overlap: bool = False, halves: int = 1
) -> Budget:
    """Return the budget of such a layer with sequence parallelism.

    Two all-gathers and two reduce-scatters forwards, two of each backwards.

    Args:
        ranks: of ``tp``.
        activation: bytes of the whole ``[B, S, H]``.
        overlap: three of each kind are rings, whose steps run beside products; and the input of
            the feed-forward part is gathered once more for the gradient of its weight, instead of
            being kept.
        halves: 2 with micro-batch overlap, which has no rings.
    """
    part = activation * (ranks - 1) // ranks
    if not overlap or halves > 1:
        calls = 4 * halves
        return Budget({"all_gather": calls, "reduce_scatter": calls}, 8 * part)
    rings = {"send_receive": 6 * (ranks - 1)}
    return Budget({"all_gather": 2, "reduce_scatter": 1, **rings}, 9 * part)


def vocabulary_ends(ranks: int, activation: int, statistics: int, *, sequence: bool) -> Budget:
    """Return the budget of an embedding and a loss over a divided vocabulary.

    Args:
        ranks: of ``tp``.
        activation: bytes of the whole ``[B, S, H]``.
        statistics: bytes of what a rank says of its words: two numbers per token.
        sequence: whether activations are divided along the sequence.
    """
    said = Budget({"all_gather": 1}, statistics * (ranks - 1))
    if not sequence:
        return said + all_reduces(ranks, [activation] * 2)
    part = activation * (ranks - 1) // ranks
    return said + Budget({"all_gather": 2, "reduce_scatter": 2}, 4 * part)


def ring_layer(ranks: int, keys_and_values: int) -> Budget:
    """Return the budget of attention over a ring; what is masked for all is not sent.

    Args:
        ranks: of ``cp``.
        keys_and_values: bytes of the keys and values of whole sequences.
    """
    steps = 3 * (ranks - 1)
    return Budget({"send_receive": steps}, steps * (keys_and_values // ranks))


def all_to_all_layer(ranks: int, queries: int, keys_and_values: int) -> Budget:
    """Return the budget of attention by heads: to heads and back, forwards and backwards.

    Args:
        ranks: of ``cp``.
        queries: bytes of the queries of whole sequences, which are those of the output.
        keys_and_values: bytes of keys and values of whole sequences.
    """
    here = (2 * queries + keys_and_values) // ranks
    return Budget({"all_to_all": 4}, 2 * here * (ranks - 1) // ranks)


def expert_layer(
    ranks: int,
    leaving: int,
    arriving: int,
    *,
    row: int,
    result: int,
    chunks: int = 1,
    halves: int = 1,
) -> Budget:
    """Return the budget of experts that ranks share: tokens to them and results back, both ways.

    The ranks tell each other how many rows come, and for each chunk whether all could send.

    Args:
        ranks: of ``ep``.
        leaving: rows of this rank for experts of others, of which a token has at most ``top_k``.
        arriving: rows of other ranks for the experts here.
        row: bytes of a packed row: activation, probability, id; ``DispatchHandle.row_bytes``.
        result: bytes of an expert's result for a row.
        chunks: of the tokens.
        halves: 2 with micro-batch overlap, each with such chunks.
    """
    words = halves * (METADATA_BYTES + chunks * VOTE_BYTES) * (ranks - 1)
    calls = {"all_to_all": halves * (1 + 5 * chunks)}
    return Budget(calls, (leaving + arriving) * (row + result) + words)


def pipeline(boundaries: int, microbatches: int, activation: int, *, words: int = 0) -> Budget:
    """Return the budget of a rank of a pipeline, but for its first step.

    At each boundary one of two stages sends hidden states, and the other their gradients; both
    receive. In the first step each sends a header of 64 bytes before the first hidden states of a
    shape.

    Args:
        boundaries: between a stage of this rank and one of another, ``Table.boundaries``.
        microbatches: of a step.
        activation: bytes of the hidden states of a micro-batch, on one rank of ``tp`` and ``cp``.
        words: bytes of a table of words that the first and the last rank share, on these: its
            gradients are exchanged.
    """
    sends = microbatches * boundaries
    exchanges = 1 if words else 0
    return Budget({"send_receive": 2 * sends + exchanges}, sends * activation + words)


def replicas(ranks: int, parameters: int, marks: int, *, buckets: int) -> Budget:
    """Return the budget of gradients that are summed over replicas.

    Args:
        ranks: that see other tokens.
        parameters: bytes of the gradients.
        marks: bytes that say which parameters have one: a number each.
        buckets: how many travel one by one.
    """
    sent = 2 * (parameters + marks) * (ranks - 1) // ranks
    return Budget({"all_reduce": buckets}, sent)


def divided(ranks: int, blocks: Sequence[int], *, again: Sequence[int] = ()) -> Budget:
    """Return the budget of parameters that are divided over ranks (``zero`` 1 to 3).

    Args:
        ranks: that share them.
        blocks: bytes of the parameters that travel together, of each block; with a row more where
            the ranks do not divide the rows of one.
        again: of those blocks that are gathered again in the backward.
    """
    parts = [-(-size // ranks) * (ranks - 1) for size in blocks]
    more = [-(-size // ranks) * (ranks - 1) for size in again]
    calls = {"all_gather": len(parts) + len(more), "reduce_scatter": len(parts)}
    return Budget(calls, 2 * sum(parts) + sum(more))
