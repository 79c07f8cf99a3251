"""One step: gradients of all microbatches, what the optimizer does with them, and validation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from fusedops.checkpoint import Restored
from fusedops.models import Loss
from fusedops.models.parallelization import dropout_place
from fusedops.optim import global_norm
from fusedops.optim.norms import clip_coefficient
from fusedops.parallel.dropout import place_dropout
from fusedops.train import precision
from fusedops.train.data import IGNORED, Batch
from fusedops.train.schedule import learning_rate
from fusedops.train.setup import Run


@dataclass(frozen=True)
class Taken:
    """What became of a step.

    Attributes:
        loss: mean over all targets, without the routers' losses.
        router_loss: of all layers, mean over the tokens.
        grad_norm: before clipping.
        lr: the learning rate.
        action: ``"go"``, or why it was not taken: ``"overflow"``, ``"skip"``, ``"rollback"``.
        restored: what a rollback restored.
        stop: whether a rank was asked to stop.
    """

    loss: float
    router_loss: float
    grad_norm: float
    lr: float
    action: str
    restored: Restored | None
    stop: bool


def backward(run: Run) -> tuple[float, float]:
    """Leave the gradients of a step in the parameters.

    Returns:
        The sum of this rank's losses over its targets, and that of its routers' losses.
    """
    config, parallel, device = run.config, run.parallel, run.ranks.device
    parts = parallel.config.microbatches
    targets = torch.tensor(config.batch * config.data.seq_len, device=device)
    total, routers = torch.zeros(2, dtype=torch.float64, device=device)
    rows = run.train.microbatches(
        run.position, config.batch, parts, parallel.data_rank, parallel.data_ranks
    )
    for number, batch in enumerate(rows):
        parallel.begin(last=number == parts - 1)
        _seed_dropout(run, number)
        loss = _loss(run, batch)
        (parallel.loss(loss, targets) * run.scale.value).backward()
        total += loss.total.detach()
        routers += loss.auxiliary.detach()
    return total.item(), routers.item()


def update(run: Run, losses: tuple[float, float], *, stop: bool) -> Taken:
    """Step the optimizer, unless the loss's scale or the guard forbids it.

    Args:
        run: with gradients.
        losses: what ``backward`` returned.
        stop: whether this rank was asked to stop; all ranks hear of it here.
    """
    config, optimizer, layout = run.config, run.optimizer, run.parallel.config
    # The ranks of tp have the same losses, but for routers', each of which sees other tokens.
    total, routers, stops = run.ranks.total(losses[0] / layout.tp, losses[1], float(stop))
    loss = total / (config.batch * config.data.seq_len)
    model, scale = run.parallel.model, run.scale.value
    norm = global_norm([each.grad for each in model.parameters() if each.grad is not None]) / scale
    lr = learning_rate(run.step, config.steps, config.optimizer.lr, config.schedule)
    action, restored = "overflow", None
    if not run.scale.overflowed(norm.item()):
        verdict = run.guard.check(run.step, loss, norm)
        action, restored = verdict.action, verdict.restored
    if restored is None:
        clip = config.optimizer.clip
        coefficient = clip_coefficient(norm, clip) if clip else torch.ones_like(norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        # The step divides gradients by this as it reads them: clipping costs no pass. A step that
        # is forbidden is asked for, too: it may have begun in the backward.
        optimizer.grad_scale = scale / coefficient  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(float(action != "go"))  # type: ignore[attr-defined]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    routers /= run.ranks.size * layout.microbatches
    return Taken(loss, routers, norm.item(), lr, action, restored, stops > 0)


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Return the mean loss over the first sequences of the validation set, if there is one.

    All ranks run as many forwards: the last ones are filled up with rows without targets.
    """
    if run.validation is None:
        return None
    config, parallel, device = run.config, run.parallel, run.ranks.device
    count = min(config.validation.sequences, run.validation.count)
    size = config.batch // (parallel.config.microbatches * parallel.data_ranks)
    total = torch.zeros((), dtype=torch.float64, device=device)
    parallel.model.eval()
    for first in range(0, count, size * parallel.data_ranks):
        rows = torch.arange(size) + first + size * parallel.data_rank
        batch = run.validation.rows(rows)
        batch.labels[rows >= count] = IGNORED
        total += _loss(run, batch).total
    parallel.model.train()
    found = run.ranks.total(total.item() / parallel.config.tp)[0]
    return found / (count * config.data.seq_len)


def _loss(run: Run, batch: Batch) -> Loss:
    """Return what the model makes of this rank's part of sequences."""
    device = run.ranks.device
    given = [None if each is None else each.to(device, non_blocking=True) for each in batch]
    tokens, labels, documents = given
    assert tokens is not None
    shard = run.parallel.shard_batch(tokens, labels, document_ids=documents)
    places = {"positions": shard.positions, "document_ids": shard.document_ids}
    with precision.computing(run.config.precision, device):
        return run.parallel.model(*shard[:2], **places)


def _seed_dropout(run: Run, number: int) -> None:
    """Seed what dropout of a micro-batch draws from, by step.

    All ranks draw from one seed, each element by its place among all sequences of the step: the
    layout changes no number, nor does the cut into micro-batches. Where elements do not know their
    places (GPUs, context parallelism) seeds are alike on ranks that share the same tokens.
    """
    mesh, layout = run.parallel.mesh, run.parallel.config
    assert mesh is not None
    words: tuple[int, ...] = (run.config.seed, run.step)
    if layout.cp > 1 or run.ranks.device.type != "cpu":
        words += (number, mesh.rank("data"))
    elif layout.microbatches > 1:
        place = dropout_place(layout, mesh)
        part = number * layout.dp + place.batch_part
        place_dropout(run.parallel.model, replace(place, batch_part=part))
    seed = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(seed, "little"))
