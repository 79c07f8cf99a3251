"""Dropout that stores no mask: a counter-based generator, the same bits wherever it runs.

Element ``i`` (row-major, int64) draws ``r_i``, word ``i % 4`` of Philox4x32-7 with

    key = (lo32(seed), hi32(seed))
    counter = (lo32(c), hi32(c), lo32(offset), hi32(offset)),  c = i // 4

and is kept if and only if ``r_i >= round(p * 2**32)``. Forward, backward and recomputation draw the
same numbers from the same ``(seed, offset)``; so do ``csrc/cpu/dropout.h``, the CUDA and the Triton
kernels (``tl.philox(seed, *counter, ROUNDS)``). Here is the specification, in int64 torch
operations.

A tensor that is a part of a larger one draws what the larger one would: its seed then has three
numbers more, ``(seed, offset, base, run, stride)``, and element ``i`` draws as element

    base + i // run * stride + i % run

of the larger one. Rows (of a norm, of scores) lie within runs. So far on the CPU and here.

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


def placed(seed: torch.Tensor, base: int, run: int, stride: int) -> torch.Tensor:
    """Return a seed for a part of a larger tensor; see the top of this file.

    Args:
        seed: ``(seed, offset)`` of the larger one.
        base: index there of the part's first element.
        run: how many of its elements are neighbours there.
        stride: from the first element of a run to that of the next, there.
    """
    return torch.cat((seed, torch.tensor((base, run, stride), device=seed.device)))


def check_seed(op: str, seed: Any, device: torch.device) -> None:
    """Raise unless ``seed`` is one that dropout draws from."""
    checks.index_tensor(op, "seed", seed, dtypes=(torch.int64,))
    if tuple(seed.shape) not in ((2,), (5,)):
        checks.fail(op, "seed", "of shape [2], or [5] with a place", list(seed.shape))
    if seed.device != device:
        checks.fail(op, "seed", f"on {device}, the device of the input", seed.device)


def threshold(p: float) -> int:
    """Return the number that a random word must reach for its element to be kept.

    0 keeps every element, 2**32 keeps none.
    """
    return round(p * 2**32)


def scale(p: float) -> float:
    """Return the factor of kept elements, ``1 / (1 - p)``; 1 where none is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


def philox4x32(
    counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS
) -> Words:
    """Return the four words of Philox4x32.

    Args:
        counter: four int64 tensors of values below 2**32, broadcast against each other.
        key: two more.
        rounds: how many.
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
    if seed.numel() == 5:
        base, run, stride = seed[2:]
        element = torch.arange(count, dtype=torch.int64, device=seed.device)
        index = base + element // run * stride + element % run
        return _drawn(index // 4, seed).gather(1, (index % 4).unsqueeze(1)).squeeze(1)
    counter = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    return _drawn(counter, seed).reshape(-1)[:count]


def _drawn(counter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return the four words of each counter, ``[counters, 4]``."""
    key, offset = ((seed[i] & _LOW, (seed[i] >> 32) & _LOW) for i in (0, 1))
    drawn = philox4x32((counter & _LOW, counter >> 32, *offset), key)
    return torch.stack(torch.broadcast_tensors(*drawn), dim=-1)


def keep_mask(shape: Sequence[int], seed: torch.Tensor, p: float) -> torch.Tensor:
    """Return the bool mask of the kept elements of a tensor of ``shape``."""
    return (words(math.prod(shape), seed) >= threshold(p)).reshape(shape)


def dropout(x: torch.Tensor, seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """Drop elements of ``x``, which has the accumulation dtype; ``p`` 0 returns it as it is.

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
    else:
        if seed is None:
            raise ValueError(f"dropout: seed must be a tensor for p = {p}, got None")
        keep = keep_mask(x.shape, seed, p)
    return torch.where(keep, x * scale(p), 0.0)
