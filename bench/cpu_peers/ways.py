"""What a comparison consists of: pieces of work, and the ways of doing each that take turns.

The files of this folder that end in ``_work.py`` each have ``contests()``, which is cheap and
imports no peer: a peer is imported in its own process, when its way is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("loss", "layers", "encoders", "decoders", "lora")
# Torch's own ways share a process with ours. All others have one each: their threads and what they
# change of torch when they are imported concern nobody else.
OWN_PROCESS = "torch"


@dataclass
class Running:
    """A way that is ready to run."""

    run: Callable[[Any], Any]  # what is timed; it receives what ``prepare`` returned
    outputs: Sequence[torch.Tensor]  # what it computed, to compare with the reference
    prepare: Callable[[], Any] = lambda: None  # is called before each ``run``, and not timed


@dataclass(frozen=True)
class Way:
    """One way to do a piece of work."""

    make: Callable[[], Running]
    package: str = "torch"  # which package does it: its version is recorded
    dtype: str = ""  # where it is not that of the contest
    against: str = ""  # which way of ours it is compared with, where it is not the contest's
    process: str = OWN_PROCESS  # which process it runs in


@dataclass(frozen=True)
class Contest:
    """A piece of work and the ways that are timed by turns."""

    work: str  # what is done
    dtype: str  # of the weights
    reference: Callable[[], Sequence[torch.Tensor]]  # the outputs in float64, or float32
    ways: dict[str, Way]
    ours: str  # which way the others are compared with
    tokens: int = 0  # how many a run generates


def contests(kind: str) -> list[Contest]:
    """Return the contests of a kind of work, one of ``KINDS``."""
    module = importlib.import_module(f"{kind}_work")
    found: list[Contest] = module.contests()
    return found


def difference(outputs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the largest ``|output - reference| / |reference|`` (2-norms) of the tensors."""
    pairs = zip(outputs, reference, strict=True)
    return max(
        ((output.double() - wanted.double()).norm() / wanted.double().norm()).item()
        for output, wanted in pairs
    )
