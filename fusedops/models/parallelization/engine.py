"""What a training loop asks of a model that is spread over processes.

The same questions have answers for a model on one process, so that a loop is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fusedops._core import checks, philox
from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization import balancing
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.transformer import Loss
from fusedops.optim import AdamW, OffloadedAdamW, global_norm
from fusedops.optim.norms import clip_coefficient, scale_gradients

if TYPE_CHECKING:
    from fusedops.models.parallelization.pipeline import Pipeline
    from fusedops.parallel.data.grad_sync import GradientSync
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
        domains: ``[B, S / cp]``, or ``None``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    domains: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Parallelized:
    """A model and the processes that share its training.

    Attributes:
        model: the model.
        config: how it is spread.
        mesh: of the processes; ``None``: there is one.
        data: what sums gradients, and when; ``None`` on one process and with a pipeline.
        pipeline: the stages of this process and what runs them; ``None`` where it has all layers.
    """

    model: nn.Module
    config: ParallelConfig = field(default_factory=ParallelConfig)
    mesh: Mesh | None = None
    data: GradientSync | None = None
    pipeline: Pipeline | None = None

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
        domains: torch.Tensor | None = None,
    ) -> Shard:
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
        config = self.config
        per_rank = config.tp if config.sp or _routes(self.model) else 1
        unit = per_rank * config.cp
        if length % unit:
            shared = f"a multiple of {unit}, for the ranks of cp {config.cp} and tp {config.tp}"
            checks.fail("shard_batch", "tokens of a sequence", shared, length)
        if self.mesh is None or config.cp == 1:
            return Shard(tokens, labels, positions, document_ids, domains)
        from fusedops.parallel.context import shard_sequence

        group = self.mesh.group("cp")

        def part(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else shard_sequence(tensor, group, tensor.dim() - 1)

        return Shard(*map(part, (tokens, labels, positions, document_ids, domains)))

    def step(
        self,
        shards: Sequence[Shard],
        num_tokens: torch.Tensor,
        *,
        scale: float = 1.0,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seed: torch.Tensor | None = None,
    ) -> list[Loss]:
        """Leave the gradients of a step in the parameters: all its forwards and backwards.

        The way to train that every layout has; a pipeline orders the micro-batches by its schedule.

        Args:
            shards: the micro-batches of this process, of ``shard_batch``.
            num_tokens: targets of the whole step on all processes (``count``).
            scale: factor of the loss.
            computing: what forwards run in, such as ``lambda: torch.autocast("cpu")``.
            seed: what dropout of the step draws from, int64 ``[2]``, the same on all processes; by
                default two numbers of torch's generator. Each element draws by its place among all
                sequences of the step: neither layout nor cut into micro-batches changes a number.

        Returns:
            For each micro-batch the loss's parts of this process, without a graph; where layers are
            divided the total is 0 but on the last stage. ``mean_loss`` puts them together.

        Raises:
            ValueError: these are not as many micro-batches as the configuration says.
        """
        self._check_parts(shards)
        draws = self._draws(shards, seed)
        if self.pipeline is not None:
            given = self, shards, num_tokens, scale, computing, draws
            return self.pipeline.step(*given)
        outputs = []
        for number, shard in enumerate(shards):
            self.begin(last=number == len(shards) - 1)
            with computing():
                output = self._run(shard, **draws[number])
            (self.loss(output, num_tokens) * scale).backward()
            outputs.append(Loss(*(each.detach() for each in output)))
        return outputs

    @torch.no_grad()
    def forward(
        self,
        shards: Sequence[Shard],
        *,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Loss]:
        """Return the losses' parts of this process, as ``step``, without gradients.

        Args:
            shards: with labels; for a pipeline as many as a step has.
            computing: as of ``step``.
        """
        with balancing.uncounted(self.model):
            if self.pipeline is not None:
                self._check_parts(shards)
                return self.pipeline.forward(shards, computing)
            with computing():
                return [self._run(each) for each in shards]

    def _run(self, shard: Shard, **draws: Any) -> Loss:
        tokens, labels, *others = shard
        given = dict(zip(shard._fields[2:], others, strict=True))
        return self.model(tokens, labels, **given, **draws)

    def _draws(self, shards: Sequence[Shard], seed: torch.Tensor | None) -> list[dict[str, Any]]:
        """Return what each micro-batch of a step tells the model for its dropout."""
        config = getattr(self.model, "config", None)
        if not isinstance(config, TransformerConfig) or not self.model.training:
            return [{} for _ in shards]
        if not (config.dropout or config.attention_dropout):
            return [{} for _ in shards]
        if seed is None:
            seed = philox.new_seed(shards[0].tokens.device)
        sizes = [len(each.tokens) for each in shards]
        before = [self.data_ranks * each for each in accumulate(sizes, initial=0)]
        return [
            {"seed": seed, "first_sequence": first + self.data_rank * size}
            for first, size in zip(before, sizes, strict=False)
        ]

    def _check_parts(self, shards: Sequence[Shard]) -> None:
        if len(shards) != self.config.microbatches:
            wanted = f"microbatches = {self.config.microbatches} of them, the configuration's"
            checks.fail("Parallelized", "shards", wanted, len(shards))

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
        if self.config.pp > 1:
            found = self._sum(found, "pp")
        extra = found[1] / self.config.sizes.data
        if self.mesh is not None and self.config.tp > 1 and _routes(self.model):
            extra = self._sum(extra.clone(), "tp") / self.config.tp
        return found[0] / num_tokens.clamp_min(1) + extra

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm.

        Every process must call this; each gets the same norm, that of one process.
        """
        norm = self.norm()
        grads = [each.grad for each in self.model.parameters() if each.grad is not None]
        scale_gradients(grads, clip_coefficient(norm, max_norm))
        return norm

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients, the same on every process, which must all call this."""
        if self.pipeline is not None:
            return self.pipeline.norm()
        return global_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def balance(self, *, taken: bool = True) -> None:
        """Move the biases of routers that balance without a loss; beside the optimizer's step.

        By the choices of all processes since the last call, which every process must make. Models
        without ``balance_rate`` are left alone.

        Args:
            taken: whether the optimizer's step was taken; else the choices are forgotten.
        """
        balancing.balance(self.model, self.group("stage"), taken=taken)

    def optimizer(self, **options: Any) -> AdamW:
        """Return an AdamW of the model's parameters, its states where the configuration says.

        Args:
            **options: of ``fusedops.optim.AdamW``.

        Raises:
            UnsupportedError: with a pipeline, something that the optimizer decides by the norm of
                the gradients that it has.
        """
        if self.pipeline is not None:
            for name in ("max_norm", "skip_non_finite"):
                if options.get(name):
                    raise checks.UnsupportedError(
                        f"optimizer: {name} must not be given with pp = {self.config.pp}: a "
                        "process has a part of the gradients; use parallelized(model).clip before "
                        "the step"
                    )
        kind = OffloadedAdamW if "optimizer" in self.config.offload else AdamW
        return kind(self.model.named_parameters(), **options)

    def _sum(self, values: torch.Tensor, name: str = "data") -> torch.Tensor:
        if self.mesh is None:
            return values
        from fusedops.parallel.comm import collectives

        return collectives.all_reduce(values, self.mesh.group(name), label="loss").wait()


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
