"""One step: gradients of all microbatches, what the optimizer does with them, and validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedops.checkpoint import Restored
from fusedops.optim import global_norm
from fusedops.optim.norms import clip_coefficient
from fusedops.train import precision
from fusedops.train.data import IGNORED
from fusedops.train.schedule import learning_rate
from fusedops.train.setup import Run

# Each draws dropout from a seed of its own.
_SEEDS_OF_STEP = 1 << 16


@dataclass(frozen=True)
class Taken:
    """What became of a step.

    Attributes:
        loss: mean over all targets, without the routers' losses.
        grad_norm: before clipping.
        lr: the learning rate.
        action: ``"go"``, or why it was not taken: ``"overflow"``, ``"skip"``, ``"rollback"``.
        restored: what a rollback restored.
        stop: whether a rank was asked to stop.
    """

    loss: float
    grad_norm: float
    lr: float
    action: str
    restored: Restored | None
    stop: bool


def backward(run: Run) -> float:
    """Leave the gradient of the mean loss of a step in the parameters.

    Returns:
        The sum of this rank's losses over its targets.
    """
    config, device = run.config, run.ranks.device
    targets = config.batch * config.data.seq_len
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts, shares = run.layout.microbatches, run.layout.dp
    rows = run.train.microbatches(run.position, config.batch, parts, run.ranks.rank, shares)
    for number, batch in enumerate(rows):
        run.data.begin(last=number == parts - 1)
        torch.manual_seed(config.seed + run.step * _SEEDS_OF_STEP + number)
        tokens, labels = (each.to(device, non_blocking=True) for each in batch)
        with precision.computing(config.precision, device):
            loss = run.model(tokens, labels)
        # The routers' losses are means over tokens; weighed like them, microbatches add up.
        whole = loss.total + loss.auxiliary * labels.numel()
        (whole * (run.scale.value / targets)).backward()
        total += loss.total.detach()
    return total.item()


def update(run: Run, loss_of_rank: float, *, stop: bool) -> Taken:
    """Step the optimizer, unless the loss's scale or the guard forbids it.

    Args:
        run: with gradients.
        loss_of_rank: what ``backward`` returned.
        stop: whether this rank was asked to stop; all ranks hear of it here.
    """
    config, optimizer = run.config, run.optimizer
    total, stops = run.ranks.total(loss_of_rank, float(stop))
    loss = total / (config.batch * config.data.seq_len)
    gradients = [each.grad for each in run.model.parameters() if each.grad is not None]
    norm = global_norm(gradients) / run.scale.value
    lr = learning_rate(run.step, config.steps, config.optimizer.lr, config.schedule)
    scale = run.scale.value
    action, restored = "overflow", None
    if not run.scale.overflowed(norm.item()):
        verdict = run.guard.check(run.step, loss, norm)
        action, restored = verdict.action, verdict.restored
    if action == "go":
        clip = config.optimizer.clip
        coefficient = clip_coefficient(norm, clip) if clip else torch.ones_like(norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        # The step divides gradients by this as it reads them: clipping costs no pass.
        optimizer.grad_scale = scale / coefficient  # type: ignore[attr-defined]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Taken(loss, norm.item(), lr, action, restored, stops > 0)


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Return the mean loss over the first sequences of the validation set, if there is one.

    All ranks run as many forwards: the last ones are filled up with rows without targets.
    """
    if run.validation is None:
        return None
    config, device = run.config, run.ranks.device
    count = min(config.validation.sequences, run.validation.count)
    total = torch.zeros((), dtype=torch.float64, device=device)
    run.model.eval()
    size = config.batch // (run.layout.microbatches * run.layout.dp)
    for first in range(0, count, size * run.layout.dp):
        rows = torch.arange(size) + first + size * run.ranks.rank
        tokens, labels = run.validation.rows(rows)
        labels[rows >= count] = IGNORED
        with precision.computing(config.precision, device):
            total += run.model(tokens.to(device), labels.to(device)).total
    run.model.train()
    return run.ranks.total(total.item())[0] / (count * config.data.seq_len)
