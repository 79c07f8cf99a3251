"""The states of the random generators that code around a training step draws from.

They are torch's of the CPU and of the current GPU, Python's, and NumPy's where somebody has
imported it. The fused ops have none of their own: the seed of each dropout is drawn from torch's.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return all states, as tensors, numbers and strings."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, list(words), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy

        state: Any = numpy.random.get_state()
        kind, keys, *rest = state
        states["numpy"] = (kind, torch.tensor(keys.astype("int64")), *rest)
    return states


def restore(states: dict[str, Any]) -> None:
    """Set all generators that have a state."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def seed(number: int) -> None:
    """Seed all generators, for a rank that the checkpoint has no states of."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(number % 2**32)
