"""The same patched model in less than half of the activation memory: bytes, speed, losses.

Both train on the same batches in turns, as the contenders of the main comparison do; here the
losses must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

import fusedops
from fusedops import memory
from fusedops.integrations import PatchReport

from .corpus import Corpus
from .training import FUSED, UNTIMED, Contender, Settings, compare

STEPS = UNTIMED + 9


@dataclass(frozen=True)
class Half:
    """What both did.

    Attributes:
        activations: bytes that a forward leaves for its backward, per contender.
        tokens_per_second: of the median step, per contender.
        losses: of the last step, per contender.
        same_losses: whether the losses of all steps are equal to the bit.
    """

    activations: dict[str, int]
    tokens_per_second: dict[str, float]
    losses: dict[str, float]
    same_losses: bool


def _recomputed(model: nn.Module) -> PatchReport:
    report = fusedops.patch(model)
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))
    return report


RECOMPUTED = Contender("recomputed", _recomputed)


def measure(
    corpus: Corpus,
    settings: Settings,
    dtype: str,
    *,
    on_step: Callable[[str, float], None] = lambda name, loss: None,
) -> Half:
    """Train the fused model for some steps, as it is and with its blocks recomputed."""
    found, trainers = compare((FUSED, RECOMPUTED), corpus, settings, dtype, on_step=on_step)
    shape = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
    batch = corpus.batch(0, seed=settings.seed, **shape).to(settings.device)
    activations = {}
    for name, trainer in trainers.items():
        with trainer.autocast():
            report = memory.report(trainer.model, {"input_ids": batch, "labels": batch})
        activations[name] = report.activations
    first, second = found.losses.values()
    return Half(
        activations,
        {name: found.tokens_per_second(name) for name in trainers},
        {name: losses[-1] for name, losses in found.losses.items()},
        first == second,
    )
