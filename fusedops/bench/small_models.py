"""Small models with presets' architectures, and ways of running one that are compared by turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusedops.bench import machine
from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.models.parallelization.stage_costs import layer_runs
from fusedops.parallel.pipeline.schedules import table
from fusedops.planner import Layout, StepShape, TrainingShape, step_shape

_SEED = 0


@dataclass(frozen=True)
class SmallModel:
    """A preset's model of another size, without dropout."""

    preset: str  # its other choices and the ratio of its feed-forward layer stay
    hidden_size: int  # width; heads have 64, and four share a key head where the preset's share one
    num_layers: int  # layers
    vocab_size: int  # words

    def config(self, seq_len: int) -> TransformerConfig:
        """Return the model for sequences of ``seq_len`` tokens."""
        config = preset(self.preset)
        ratio = config.intermediate_size / config.hidden_size
        heads = self.hidden_size // 64
        return replace(
            config,
            hidden_size=self.hidden_size,
            intermediate_size=round(ratio * self.hidden_size / 16) * 16,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=None if config.num_kv_heads is None else max(1, heads // 4),
            head_dim=None,
            vocab_size=self.vocab_size,
            seq_len=seq_len,
            dropout=0.0,
            attention_dropout=0.0,
        )


def text_of(config: TransformerConfig, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens ``[sequences, seq_len]`` and the labels of each."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = sequences, config.seq_len + 1
    text = torch.randint(config.vocab_size, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def training_step(
    config: TransformerConfig,
    parallel: ParallelConfig,
    sequences: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], float]:
    """Return a function that makes a training step (with clipping and AdamW); it returns the loss.

    ``parallel`` spreads the model over the processes of this job, which take the ``sequences``
    of a step together; this one is on ``device``, the CPU by default, with weights in ``dtype``.
    """
    model = Transformer(config, device="meta", dtype=dtype)
    run = parallelize(model, parallel, device=device, seed=_SEED)
    optimizer = run.optimizer(lr=1e-4, max_norm=None if run.pipeline else 1.0)
    text = [run.rows(tensor).to(device or "cpu") for tensor in text_of(config, sequences)]
    parts = [tensor.chunk(run.config.microbatches) for tensor in text]
    shards = [run.shard_batch(*part) for part in zip(*parts, strict=True)]
    count = run.count(torch.stack([shard.labels for shard in shards if shard.labels is not None]))

    def step() -> float:
        outputs = run.step(shards, count)
        if run.pipeline is not None:
            run.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(run.mean_loss(outputs, count))

    return step


def shape_of_step(
    config: TransformerConfig, parallel: ParallelConfig, sequences: int, precision: str = "float32"
) -> StepShape:
    """Return what the planner knows of a step of ``training_step``.

    Pipelines are cut as ``parallelize`` cuts them; the planner's own search balances stages alone.
    """
    if parallel.pp > 1:
        schedule = parallel.pipeline_schedule
        order = table(schedule, parallel.pp, parallel.microbatches, parallel.virtual)
        runs = layer_runs(config, parallel, order)
        parallel = replace(parallel, pipeline_cuts=tuple(run.start for run in runs[1:]))
    rows = sequences // (parallel.dp * parallel.microbatches)
    training = TrainingShape(micro_batch=rows, precision=precision)
    return step_shape(config, Layout(parallel, training))


@dataclass(kw_only=True)
class InterleavedRow:
    """What one of several ways reached that are measured alternately."""

    tokens: int  # of a turn, of all sequences together
    seconds: list[float] = field(default_factory=list)  # of each turn
    # against the way that is compared with, turn by turn: of generation its seconds by ours, of
    # scaling the first setting's by its
    ratios: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def shown_ratio(self) -> str:
        """The median, the least and the largest."""
        return f"{self.ratio:.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"


def rows_record(rows: Iterable[Any], **head: Any) -> dict[str, Any]:
    """Return this machine, ``head`` and rows of generation, or of scaling, as JSON has them."""
    records = [
        asdict(row) | {"tokens_per_second": row.tokens_per_second, "ratio": row.ratio}
        for row in rows
    ]
    return machine.describe(torch.device("cpu")) | head | {"rows": records}
