"""One step: gradients of all microbatches, what the optimizer does with them, and validation."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from fusedops._core.device_tensors import device_tensor, to_device
from fusedops._core.generators import seed_generators
from fusedops._core.labels import IGNORE_INDEX
from fusedops.checkpoint import Restored
from fusedops.models.inputs import MicroBatch
from fusedops.optim.norms import clip_coefficient
from fusedops.train.builder import Run
from fusedops.train.data import TokenBatch
from fusedops.train.observe import token_pairs
from fusedops.train.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """What a step computed, and whether the optimizer took it."""

    loss: float  # mean over all targets, without the routers' losses
    router_loss: float  # of all layers, mean over the tokens
    grad_norm: float  # before clipping
    lr: float  # the learning rate
    action: str  # ``"go"``, or why it was not taken: ``"overflow"``, ``"skip"``, ``"rollback"``
    restored: Restored | None  # what a rollback restored
    stop: bool  # whether a rank was asked to stop

    @property
    def finite(self) -> bool:
        """Whether loss and gradients were finite; else the optimizer did not take the step."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def backward(run: Run) -> torch.Tensor:
    """Leave the gradients of a step in the parameters.

    Returns:
        float64 ``[2]``: the sum of this rank's losses over its targets, and of its routers' losses.
    """
    config, parallel, device = run.config, run.parallel, run.ranks.device
    parts = parallel.config.microbatches
    targets = device_tensor(config.batch * config.data.seq_len, torch.int64, device)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    rows = run.train.microbatches(
        run.position, config.batch, parts, parallel.data_rank, parallel.data_ranks
    )
    seed_generators(_dropout_seed(config.seed, run.step))
    with run.section("data"):
        shards = [_shard(run, batch) for batch in rows]
    with run.section("backward"):  # without the forwards, which are sections of their own
        losses = parallel.step(shards, targets, scale=run.scale.value, computing=run.computing)
        for loss in losses:
            sums[0] += loss.total
            sums[1] += loss.auxiliary
    return sums


def update(run: Run, losses: torch.Tensor, *, stop: bool) -> StepResult:
    """Step the optimizer, unless the loss's scale or the guard forbids it.

    All ranks stop where one of them was asked to ``stop``. The host waits for a GPU once.
    """
    config, optimizer, layout = run.config, run.optimizer, run.parallel.config
    scale = run.scale.value
    norm = run.parallel.norm() / scale
    # The ranks of tp have the same losses, but for routers', each of which sees other tokens.
    stops = device_tensor([float(stop)], torch.float64, losses.device)
    bad = (~norm.isfinite()).to(losses).reshape(1)
    sums = run.ranks.summed(torch.cat([losses[:1] / layout.tp, losses[1:], stops, bad]))
    # A replicated gradient of one rank alone may not be finite; all decide alike.
    norm = torch.where((sums[3] > 0) & norm.isfinite(), torch.nan, norm)
    total, routers, stopped, grad_norm = torch.cat([sums[:3], norm.to(sums).reshape(1)]).tolist()
    loss = total / (config.batch * config.data.seq_len)
    lr = learning_rate(run.step, config.steps, config.optimizer.lr, config.schedule)
    action, restored = "overflow", None
    if not run.scale.overflowed(grad_norm):
        decision = run.guard.check(run.step + 1, loss, grad_norm, agreed=True)
        action, restored = decision.action, decision.restored
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
    run.parallel.balance(stepped=action == "go")
    optimizer.zero_grad(set_to_none=True)
    routers /= run.ranks.size // layout.pp * layout.microbatches
    return StepResult(loss, routers, grad_norm, lr, action, restored, stopped > 0)


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Return the mean loss over the first sequences of the validation set, if there is one.

    All ranks run as many forwards: the last ones are filled up with rows without targets.
    """
    if run.validation is None:
        return None
    config, parallel, device = run.config, run.parallel, run.ranks.device
    count, rank = min(config.validation.sequences, run.validation.count), parallel.data_rank
    parts = parallel.config.microbatches
    size = config.batch // (parts * parallel.data_ranks)
    total = torch.zeros((), dtype=torch.float64, device=device)
    parallel.model.eval()
    for first in range(0, count, parts * size * parallel.data_ranks):
        shards = []
        for part in range(parts):
            rows = torch.arange(size) + first + size * (part * parallel.data_ranks + rank)
            batch = run.validation.rows(rows)
            # Not in place: of a single row, tokens and labels are views of the same memory.
            labels = batch.labels.masked_fill((rows >= count)[:, None], IGNORE_INDEX)
            shards.append(_shard(run, batch._replace(labels=labels)))
        for loss in parallel.forward(shards, computing=run.computing):
            total += loss.total
    parallel.model.train()
    summed = run.ranks.total(total.item() / parallel.config.tp)[0]
    return summed / (count * config.data.seq_len)


def _dropout_seed(seed: int, step: int) -> int:
    """Return the seed of a step's dropout: the same on all ranks, and after a restart."""
    words = repr((seed, step)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _shard(run: Run, batch: TokenBatch) -> MicroBatch:
    """Return this rank's part of sequences, on its device."""
    if run.recorder is not None:
        run.recorder.count(tokens=batch.tokens.numel(), pairs=token_pairs(batch))
    given = [None if tensor is None else to_device(tensor, run.ranks.device) for tensor in batch]
    tokens, labels, documents, domains = given
    assert tokens is not None
    return run.parallel.shard_batch(tokens, labels, document_ids=documents, domains=domains)
