"""Wrong calls of the public functions: anything in place of any argument.

A function may take it; if it does not, it raises ``TypeError``, ``ValueError`` or
``UnsupportedError`` and names itself. It never ends the process.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from fusedops.specs import Sample, Spec

from . import mutate
from .engine import WrongResultError
from .functions import DTYPES, REFUSALS, picked


def _objects() -> list[Any]:
    """Return things that are no argument of most functions."""
    return [
        *(None, "", "x", b"x", True, False, object(), len, dict, ...),
        *(0, 1, -1, 7, 2**31, 2**63, 2**70, -(2**63)),
        *(0.0, -1.0, 1.5, 1e300, float("nan"), float("inf"), 1j),
        *([], [1], [None], (), (1,), (-1,), (2**40,), {}, {"a": 1}, {1}, range(3)),
        *(numpy.float32(0.5), numpy.int64(3), numpy.zeros(3), torch.float32, torch.Size([3])),
        *(torch.device("cpu"), torch.strided, torch.tensor(3), torch.tensor(0.5)),
        *(torch.zeros(0), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, 0, 3)),
        *(torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta")),
        *(torch.zeros(4, dtype=torch.float8_e4m3fn), torch.nn.Parameter(torch.ones(3))),
        torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ]


class Arguments:
    """Wrong calls of public functions."""

    name = "arguments"
    batch = 2000

    def __init__(self, only: str | None = None) -> None:
        self.specs = picked(only)
        self.objects = _objects()

    def _make(self, rng: random.Random) -> tuple[Spec, Sample]:
        spec, by_dtype = rng.choice(self.specs)
        sample = rng.choice(by_dtype[rng.choice(DTYPES)])
        args, kwargs = list(sample.args), dict(sample.kwargs)
        for _ in range(rng.choice((1, 1, 1, 2))):
            place = rng.randrange(len(args) + len(kwargs))
            holder: Any = args if place < len(args) else kwargs
            key = place if place < len(args) else sorted(kwargs)[place - len(args)]
            if isinstance(holder[key], torch.Tensor) and rng.random() < 0.5:
                holder[key] = mutate.tensor(rng, holder[key].detach())
            elif isinstance(holder[key], (bool, int, float, str)) and rng.random() < 0.3:
                holder[key] = mutate.other(rng, holder[key])
            else:
                holder[key] = rng.choice(self.objects)
        return spec, Sample(sample.name, tuple(args), kwargs, sample.random)

    def run(self, rng: random.Random) -> str:
        """Make a call and run it.

        Raises:
            WrongResultError: it refuses in other words than it may.
        """
        spec, sample = self._make(rng)
        try:
            spec.op(*sample.args, **sample.kwargs)
        except Exception as error:
            if not isinstance(error, REFUSALS) or spec.name not in str(error):
                raise WrongResultError(f"{type(error).__name__}: {error}") from error
            return type(error).__name__
        return "returned"

    def describe(self, rng: random.Random) -> str:
        """Return the op and its arguments."""
        spec, sample = self._make(rng)
        return mutate.described(spec.name, sample.args, dict(sample.kwargs))
