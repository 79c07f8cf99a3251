"""Dropout that stores no mask: a counter-based generator, the same bits wherever it runs.

Element ``i`` (row-major, int64) draws ``r_i``, word ``i % 4`` of Philox4x32-7 with

    key = (lo32(seed), hi32(seed))
    counter = (lo32(c), hi32(c), lo32(offset), hi32(offset)),  c = i // 4

and is kept if and only if ``r_i >= round(p * 2**32)``. Forward, backward and recomputation draw the
same numbers from the same ``(seed, offset)``; so do ``csrc/cpu/elementwise/dropout.h``, the CUDA
and the Triton kernels (``tl.philox(seed, *counter, ROUNDS)``). Here is the specification, in int64
torch operations.

A tensor that is a part of a larger one draws what the larger one would: its seed has more numbers
than two, which say where in that one its elements stand.

Rows (``(seed, offset, run, stride, unit, *at)``): runs of ``run`` elements are ``stride`` apart and
consist of pieces of ``unit`` elements, each of which begins at its number of ``at``:

    i // run * stride + at[i % run // unit] + i % unit

Scores, element ``(b, h, i, j)`` (``(seed, offset, base, batch_stride, head_stride)``, of whole rows
of ``keys`` elements; or with ``*rows, *columns`` behind, a number for each row and column):

    base + b * batch_stride + h * head_stride + i * keys + j
    base + b * batch_stride + h * head_stride + rows[i] + columns[j]

Packed sequences have the last form, with ``i`` and ``j`` tokens of all of them and no batch. GPUs
want rows to begin at multiples of their length, but in the last form.

Reference: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011. Seven
rounds are the fewest that pass all of BigCrush there; the ten that are usual are a margin, which
would cost every kernel with dropout, on every device, the time of three more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
ROUNDS = 7

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def new_seed(device: torch.device) -> torch.Tensor:
    """Draw ``(seed, offset)``, int64 ``[2]``, from torch's generator of the device.

    ``torch.manual_seed`` reproduces it, and so does a checkpoint that restores the generator.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def placed(seed: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Return a seed for a part of a larger tensor, or one for each of several seeds ``[calls, 2]``.

    ``numbers`` are as the top of this file has them.
    """
    # From memory that is not pinned, a copy of so few numbers is taken over at once: the host does
    # not wait for the device.
    place = torch.tensor(numbers, dtype=torch.int64).to(seed.device, non_blocking=True)
    return torch.cat((seed, place.expand(*seed.shape[:-1], -1)), -1)


def placed_scores(seed: torch.Tensor, heads: int, length: int) -> torch.Tensor:
    """Return a seed ``[5]`` for scores ``[B, H, S, S]``; one with a place (``[5]``) unchanged."""
    return seed if seed.numel() > 2 else placed(seed, (0, heads * length**2, length**2))


def at_tokens(
    seed: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, length: int
) -> torch.Tensor:
    """Return a seed for the scores between some tokens of a batch.

    Args:
        seed: ``[5]``, of the scores ``[B, H, S, S]`` of whole sequences.
        rows: tokens that ask, counted through the batch.
        columns: tokens that are asked, likewise.
        length: ``S``.
    """
    begins = rows // length * seed[3] + rows % length * length
    return torch.cat((seed, begins, columns % length))


def check_seed(op: str, seed: Any, device: torch.device, *, scores: Sequence[int] = ()) -> None:
    """Raise unless ``seed`` is one that dropout draws from.

    ``scores`` are the numbers that a place of scores may have; by default the place is one of rows.
    """
    checks.index_tensor(op, "seed", seed, dtypes=(torch.int64,))
    sizes = [2, *(2 + size for size in scores)] if scores else [2, 6]
    fits = seed.dim() == 1 and (seed.numel() in sizes or (not scores and seed.numel() > 6))
    if not fits:
        more = " or ".join(f"[{size}]" for size in sizes[1:])
        expected = f"of shape [2], or {more}{'' if scores else ' and more'} with a place"
        checks.fail(op, "seed", expected, list(seed.shape))
    if seed.device != device:
        checks.fail(op, "seed", f"on {device}, the device of the input", seed.device)


def threshold(p: float) -> int:
    """Return the number that a random word must reach: 0 keeps all elements, 2**32 none."""
    return round(p * 2**32)


def scale(p: float) -> float:
    """Return the factor of kept elements, ``1 / (1 - p)``; 1 where none is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


def philox4x32(
    counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS
) -> Words:
    """Return the four words of Philox4x32.

    Counter and key are int64 tensors of values below 2**32, broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(factor: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a 32 x 32 bit product, by 16-bit halves: int64 has a sign."""
    lower = factor * (value & 0xFFFF)
    upper = factor * (value >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


def words(count: int, seed: torch.Tensor) -> torch.Tensor:
    """Return the random words of elements 0 .. ``count - 1``, int64 values below 2**32."""
    if seed.numel() > 2:
        run, stride, unit = seed[2:5]
        element = torch.arange(count, dtype=torch.int64, device=seed.device)
        index = element // run * stride + seed[5:][element % run // unit] + element % unit
        return words_at(index, seed)
    counter = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    return _drawn(counter, seed).reshape(-1)[:count]


def words_at(index: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return the random words of the elements that have these indices in the larger tensor."""
    drawn = _drawn(index.flatten() // 4, seed)
    return drawn.gather(1, (index.flatten() % 4).unsqueeze(1)).view(index.shape)


def _drawn(counter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return the four words of each counter, ``[counters, 4]``."""
    key, offset = ((seed[i] & _LOW, (seed[i] >> 32) & _LOW) for i in (0, 1))
    drawn = philox4x32((counter & _LOW, (counter >> 32) & _LOW, *offset), key)
    return torch.stack(torch.broadcast_tensors(*drawn), dim=-1)


def keep_mask(shape: Sequence[int], seed: torch.Tensor, p: float) -> torch.Tensor:
    """Return the bool mask of the kept elements of a tensor of ``shape``."""
    return (words(math.prod(shape), seed) >= threshold(p)).reshape(shape)


def dropout(
    x: torch.Tensor, seed: torch.Tensor | None, p: float, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Drop elements of ``x``, which has the accumulation dtype; ``p`` 0 returns it unchanged.

    ``index`` has the elements' places, of the shape of ``x``; by default the seed has them.

    Raises:
        ValueError: there is no seed, and ``p`` is neither 0 nor 1.
        TypeError: ``x`` has a narrower dtype.
    """
    if x.dtype != dtypes.statistics_dtype(x.dtype):
        raise TypeError(f"dropout: x must have an accumulation dtype, got {x.dtype}")
    if threshold(p) == 0:
        return x
    if p == 1.0:
        keep = torch.zeros((), dtype=torch.bool, device=x.device)
    elif seed is None:
        raise ValueError(f"dropout: seed must be a tensor for p = {p}, got None")
    elif index is None:
        keep = keep_mask(x.shape, seed, p)
    else:
        keep = words_at(index, seed) >= threshold(p)
    return torch.where(keep, x * scale(p), 0.0)
