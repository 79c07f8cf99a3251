"""``TrainEngine``: a training step of a model in any layout, on one process or on many.

One training loop serves every layout: the engine shards batches, runs forwards and backwards, and
reduces losses and norms over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops._core import checks
from fusedops._core.labels import IGNORE_INDEX
from fusedops.models.config import TransformerConfig
from fusedops.models.inputs import MicroBatch
from fusedops.models.parallelization import balancing
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.transformer import Loss
from fusedops.optim import AdamW, OffloadedAdamW, global_norm
from fusedops.optim.norms import clip_coefficient, scale_gradients
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.seeds import agreed_seed

if TYPE_CHECKING:
    from fusedops.models.parallelization.pipeline import PipelineEngine
    from fusedops.parallel.data.grad_sync import GradientSync
    from fusedops.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class TrainEngine:
    """A model with the processes that train it together; ``parallelize`` makes it.

    Args:
        model: the ``Transformer``, or with ``mode="manual"`` any module.
        config: the layout of the training.
        mesh: process groups; ``None``: one process trains the model.
        data: reduces gradients over data parallel ranks; ``None`` on one process and with a
            pipeline, which does it itself.
        pipeline: the stages of this process and their schedule; ``None`` if it has all layers.

    Attributes:
        model: as the argument; so are the other attributes.

    Example:
        >>> import torch
        >>> from fusedops.models import ParallelConfig, Transformer, parallelize, preset
        >>> engine = parallelize(Transformer(preset("tiny-llama")), ParallelConfig())
        >>> batch = torch.arange(9)[None]
        >>> microbatch = engine.shard_batch(batch[:, :-1], batch[:, 1:])
        >>> losses = engine.step([microbatch], engine.count(microbatch.labels))
        >>> losses[0].num_tokens
        tensor(8)
    """

    model: Any
    config: ParallelConfig = field(default_factory=ParallelConfig)
    mesh: Mesh | None = None
    data: GradientSync | None = None
    pipeline: PipelineEngine | None = None

    @property
    def data_rank(self) -> int:
        """Which sequences this process gets: its index among ``data_ranks``."""
        return 0 if self.mesh is None else self.mesh.rank("dp")

    @property
    def data_ranks(self) -> int:
        """The number of processes that get different sequences."""
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
            expected = f"a multiple of dp = {ranks} sequences"
            checks.fail("rows", "batch", expected, batch.shape[0])
        return batch.chunk(ranks)[self.data_rank] if ranks > 1 else batch

    def shard_batch(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
    ) -> MicroBatch:
        """Return what this process computes of sequences that it shares with the others of ``cp``.

        Args:
            tokens: ``[B, S]``, the sequences of this ``data_rank``.
            labels: ``[B, S]``: the target of each token; -100 has none.
            positions: ``[S]`` or ``[B, S]``; from 0 on by default.
            document_ids: ``[B, S]``, as ``Transformer`` takes them.
            domains: ``[B, S]``, as ``Transformer`` takes them.

        Returns:
            What ``Transformer`` is called with: tokens and labels, then the others by their names.

        Raises:
            ValueError: ``cp`` and ``tp`` cannot share the sequence.
        """
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        config, mesh = self.config, self.mesh
        per_rank = config.tp if config.sp or _routes(self.model) else 1
        unit = per_rank * config.cp
        if length % unit:
            shared = f"a multiple of {unit}, for the ranks of cp {config.cp} and tp {config.tp}"
            checks.fail("shard_batch", "tokens of a sequence", shared, length)
        batch: tuple[Any, ...] = tokens, labels, positions, document_ids, domains
        if mesh is not None and config.cp > 1:
            from fusedops.parallel.context import shard_sequence

            group = mesh.group("cp")
            batch = tuple(x if x is None else shard_sequence(x, group, x.dim() - 1) for x in batch)
        return MicroBatch(*batch)

    def step(
        self,
        shards: Sequence[MicroBatch],
        num_tokens: torch.Tensor,
        *,
        scale: float = 1.0,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seed: torch.Tensor | None = None,
    ) -> list[Loss]:
        """Run all forwards and backwards of a step; parameters have its gradients afterwards.

        It works for every layout; a pipeline orders the micro-batches by its schedule.

        Args:
            shards: the micro-batches of this process, of ``shard_batch``.
            num_tokens: targets of the whole step on all processes (``count``).
            scale: factor of the loss.
            computing: what forwards run in, such as ``lambda: torch.autocast("cpu")``.
            seed: of the dropout of the step, int64 ``[2]``, the same on all processes; by default
                two numbers of the generator of process 0. The number of an element follows from its
                index among all sequences of the step: neither layout nor micro-batches change it.

        Returns:
            For each micro-batch the loss's parts of this process, without a graph; where layers are
            divided the total is 0 but on the last stage. ``mean_loss`` puts them together.

        Raises:
            ValueError: these are not as many micro-batches as the configuration says.
        """
        self._check_microbatches(shards)
        dropout = self._dropout_inputs(shards, seed)
        if self.pipeline is not None:
            return self.pipeline.step(
                shards, lambda output: self.loss(output, num_tokens) * scale, computing, dropout
            )
        outputs = []
        for number, shard in enumerate(shards):
            self.begin(last=number == len(shards) - 1)
            with computing():
                output = self._run(shard, **dropout[number])
            (self.loss(output, num_tokens) * scale).backward()
            outputs.append(Loss(*(part.detach() for part in output)))
        return outputs

    @torch.no_grad()
    def forward(
        self,
        shards: Sequence[MicroBatch],
        *,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Loss]:
        """Return the losses' parts of this process, as ``step``, without gradients.

        Args:
            shards: with labels; for a pipeline as many as a step has.
            computing: as of ``step``.
        """
        for sync in self._syncs():
            sync.recover()
        with balancing.uncounted(self.model):
            if self.pipeline is not None:
                self._check_microbatches(shards)
                return self.pipeline.forward(shards, computing)
            with computing():
                return [self._run(shard) for shard in shards]

    def _run(self, shard: MicroBatch, **dropout: Any) -> Loss:
        return self.model(shard.tokens, shard.labels, **shard.inputs(), **dropout)

    def _dropout_inputs(
        self, shards: Sequence[MicroBatch], seed: torch.Tensor | None
    ) -> list[dict[str, Any]]:
        """Return the model's arguments ``seed`` and ``first_sequence`` of each micro-batch."""
        config = getattr(self.model, "config", None)
        drops = isinstance(config, TransformerConfig) and (
            config.dropout or config.attention_dropout
        )
        if not drops or not self.model.training:
            return [{} for _ in shards]
        if seed is None:
            group = None if self.mesh is None else dist.group.WORLD
            seed = agreed_seed(shards[0].tokens.device, group)
        sizes = [len(shard.tokens) for shard in shards]
        return [
            {"seed": seed, "first_sequence": self.data_ranks * before + self.data_rank * size}
            for before, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        ]

    def _check_microbatches(self, shards: Sequence[MicroBatch]) -> None:
        if len(shards) != self.config.microbatches:
            expected = f"microbatches = {self.config.microbatches} of them, the configuration's"
            checks.fail("TrainEngine", "shards", expected, len(shards))

    def begin(self, *, last: bool) -> None:
        """Prepare for a forward: gradients are reduced after the ``last`` micro-batch of a step."""
        if self.data is not None:
            self.data.begin(last=last)

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of targets on all processes, int64.

        Args:
            labels: of this process, ``[..., S]``: of one micro-batch or of all of a step.
        """
        return self._sum((labels != IGNORE_INDEX).sum())

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
        total = torch.stack([output.total.detach() for output in outputs]).sum()
        extra = torch.stack([output.auxiliary.detach() for output in outputs]).mean()
        sums = self._sum(torch.stack([total, extra.to(total.dtype)]))
        if self.config.pp > 1:
            sums = self._sum(sums, "pp")
        extra = sums[1] / self.config.sizes.data
        if self.mesh is not None and self.config.tp > 1 and _routes(self.model):
            extra = self._sum(extra.clone(), "tp") / self.config.tp
        return sums[0] / num_tokens.clamp_min(1) + extra

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm.

        Every process must call this; each gets the same norm, that of one process.
        """
        norm = self.norm()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        scale_gradients(grads, clip_coefficient(norm, max_norm))
        return norm

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients, the same on every process, which must all call this."""
        self._release_weights()
        if self.pipeline is not None:
            return self.pipeline.norm()
        parameters = list(self.model.parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return global_norm(grads).to(parameters[0].device)

    def balance(self, *, stepped: bool = True) -> None:
        """Update the biases of routers that balance without a loss; with the optimizer's step.

        Uses the choices of all processes since the last call; every process must call this. Models
        without ``balance_rate`` are unchanged.

        Args:
            stepped: whether the optimizer made its step; else the choices are discarded.
        """
        balancing.balance(self.model, self.group("stage"), stepped=stepped)

    def optimizer(self, **options: Any) -> AdamW:
        """Return an AdamW of the model's parameters, its states where the configuration says.

        Args:
            **options: of ``fusedops.optim.AdamW``. With a ``param_dtype``, ``master_weights`` is
                True by default.

        Raises:
            UnsupportedError: with a pipeline, something that the optimizer decides by the norm of
                the gradients that it has.
        """
        if self.pipeline is not None:
            for name in ("max_norm", "skip_non_finite"):
                if options.get(name):
                    raise checks.UnsupportedError(
                        f"optimizer: {name} must not be given with pp = {self.config.pp}: a "
                        "process has a part of the gradients; call clip of the engine before the "
                        "step"
                    )
        options.setdefault("master_weights", self.config.param_dtype is not None)
        kind = OffloadedAdamW if "optimizer" in self.config.offload else AdamW
        optimizer = kind(self.model.named_parameters(), **options)
        optimizer.register_step_pre_hook(lambda *_: self._release_weights())
        return optimizer

    def _release_weights(self) -> None:
        """Make the sharded parameters the model's again, after a forward without a backward."""
        for sync in self._syncs():
            sync.release_weights()

    def _syncs(self) -> list[Any]:
        """Return what reduces the gradients of this process: one for each stage of a pipeline."""
        if self.pipeline is not None:
            return list(self.pipeline.driver.data.values())
        return [] if self.data is None else [self.data]

    def _sum(self, values: torch.Tensor, name: str = "data") -> torch.Tensor:
        if self.mesh is None:
            return values
        return collectives.all_reduce(values, self.mesh.group(name), label="loss").wait()


def _routes(model: nn.Module) -> bool:
    """Whether tokens are routed to experts, each by one of the ranks of ``tp``."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "sparse_layers", 0))
