"""What a training loop asks of a model that is spread over processes.

The same questions have answers for a model on one process, so that a loop is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fusedops._core import checks
from fusedops.models.parallel_config import ParallelConfig
from fusedops.models.transformer import Loss
from fusedops.optim import AdamW, OffloadedAdamW, clip_grad_norm_

if TYPE_CHECKING:
    from fusedops.parallel.data import DataParallel
    from fusedops.parallel.mesh import Mesh

_NAME = "_parallelized"
# Labels of tokens that have no target.
_IGNORED = -100


class Shard(NamedTuple):
    """A process's part of a micro-batch, as ``Transformer`` takes it.

    Attributes:
        tokens: ``[B, S / cp]``.
        labels: ``[B, S / cp]``, or ``None``.
        positions: ``[S / cp]`` or ``[B, S / cp]``: where these tokens stand in their sequence.
        document_ids: ``[B, S / cp]``, or ``None``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor
    document_ids: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Parallelized:
    """A model and the processes that share its training.

    Attributes:
        model: the model.
        config: how it is spread.
        mesh: of the processes; ``None``: there is one.
        data: what sums gradients, and when; ``None`` on one process.
    """

    model: nn.Module
    config: ParallelConfig = field(default_factory=ParallelConfig)
    mesh: Mesh | None = None
    data: DataParallel | None = None

    @property
    def data_rank(self) -> int:
        """Which sequences this process gets: its place of ``data_ranks``."""
        return 0 if self.mesh is None else self.mesh.rank("dp")

    @property
    def data_ranks(self) -> int:
        """How many processes get different sequences."""
        return self.config.dp

    def group(self, name: str) -> Any:
        """Return a process group by a name of ``rank_groups``, or ``None`` on one process."""
        return None if self.mesh is None else self.mesh.group(name)

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the sequences of this process out of those of all ``[B, ...]``.

        Raises:
            ValueError: ``dp`` does not divide them.
        """
        ranks = self.data_ranks
        if batch.shape[0] % ranks:
            wanted = f"a multiple of dp = {ranks} sequences"
            checks.fail("rows", "batch", wanted, batch.shape[0])
        return batch.chunk(ranks)[self.data_rank] if ranks > 1 else batch

    def shard_batch(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> Shard:
        """Return what this process computes of sequences that it shares with the others of ``cp``.

        Args:
            tokens: ``[B, S]``, the sequences of this ``data_rank``.
            labels: ``[B, S]``: the target of each token; -100 has none.
            positions: ``[S]`` or ``[B, S]``; from 0 on by default.
            document_ids: ``[B, S]``, as ``Transformer`` takes them.

        Returns:
            ``model(*shard[:2], positions=shard.positions, document_ids=shard.document_ids)``.

        Raises:
            ValueError: ``cp`` and ``tp`` cannot share the sequence.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        config = self.config
        per_rank = config.tp if config.sp or _routes(self.model) else 1
        unit = per_rank * config.cp
        if length % unit:
            shared = f"a multiple of {unit}, for the ranks of cp {config.cp} and tp {config.tp}"
            checks.fail("shard_batch", "tokens of a sequence", shared, length)
        if self.mesh is None or config.cp == 1:
            return Shard(tokens, labels, positions, document_ids)
        from fusedops.parallel.context import shard_sequence

        group = self.mesh.group("cp")

        def part(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else shard_sequence(tensor, group, tensor.dim() - 1)

        return Shard(part(tokens), part(labels), part(positions), part(document_ids))

    def begin(self, *, last: bool) -> None:
        """Say, before its forward, whether a micro-batch is the last one of a step."""
        if self.data is not None:
            self.data.begin(last=last)

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many targets all processes have together; int64.

        Args:
            labels: of this process, ``[..., S]``: of one micro-batch or of all of a step.
        """
        return self._sum((labels != _IGNORED).sum())

    def loss(self, output: Loss, num_tokens: torch.Tensor) -> torch.Tensor:
        """Return this process's share of the mean loss: call ``backward`` on it.

        Args:
            output: of the model, for a micro-batch.
            num_tokens: targets of the whole step on all processes (``count``).

        Returns:
            A float32 scalar. The shares of all micro-batches and processes add up to the mean over
            all targets and the routers' losses: so do gradients.
        """
        parts = self.config.sizes.data * (self.config.tp if _routes(self.model) else 1)
        total = output.total / num_tokens.clamp_min(1)
        return total + output.auxiliary / (parts * self.config.microbatches)

    def mean_loss(self, outputs: list[Loss], num_tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a step, the same on all processes; for logs.

        Args:
            outputs: of the model, for each micro-batch.
            num_tokens: as in ``loss``.
        """
        total = torch.stack([each.total.detach() for each in outputs]).sum()
        extra = torch.stack([each.auxiliary.detach() for each in outputs]).mean()
        found = self._sum(torch.stack([total, extra.to(total.dtype)]))
        extra = found[1] / self.config.sizes.data
        if self.mesh is not None and self.config.tp > 1 and _routes(self.model):
            extra = self._sum(extra.clone(), "tp") / self.config.tp
        return found[0] / num_tokens.clamp_min(1) + extra

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm.

        Every process must call this; each gets the same norm, that of one process.
        """
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def optimizer(self, **options: Any) -> AdamW:
        """Return an AdamW of the model's parameters, its states where the configuration says.

        Args:
            **options: of ``fusedops.optim.AdamW``.
        """
        kind = OffloadedAdamW if "optimizer" in self.config.offload else AdamW
        return kind(self.model.named_parameters(), **options)

    def _sum(self, values: torch.Tensor, name: str = "data") -> torch.Tensor:
        if self.mesh is None:
            return values
        from fusedops.parallel import communication

        return communication.all_reduce(values, self.mesh.group(name), label="loss").wait()


def parallelized(model: nn.Module) -> Parallelized:
    """Return what a training loop asks of a model.

    Args:
        model: what ``parallelize`` returned, or any model that one process trains alone.

    Example:
        >>> import torch
        >>> from fusedops.models import Transformer, parallelized, preset
        >>> run = parallelized(Transformer(preset("tiny-llama")))
        >>> tokens = torch.arange(9)[None]
        >>> shard = run.shard_batch(tokens[:, :-1], tokens[:, 1:])
        >>> loss = run.loss(run.model(*shard[:2]), run.count(shard.labels))
        >>> loss.backward()
    """
    found = model.__dict__.get(_NAME)
    return Parallelized(model) if found is None else found


def attach(model: nn.Module, found: Parallelized) -> nn.Module:
    """Let ``parallelized`` find what belongs to a model."""
    model.__dict__[_NAME] = found
    return model


def _routes(model: nn.Module) -> bool:
    """Whether tokens are routed to experts, each by one of the ranks of ``tp``."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "sparse_layers", 0))
