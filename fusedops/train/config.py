"""Configuration of a training run: one dataclass per table of the configuration file.

``docs/training.md`` explains the keys, and ``example.toml`` has a comment for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.checkpoint.guard import ACTIONS
from fusedops.launch import config_table
from fusedops.launch.config_table import InputError
from fusedops.models import ParallelConfig

SCHEDULES = ("constant", "linear", "cosine", "stable-decay")
DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"
# A factor that is no power of two would change the bits of all gradients.
LEAST_LOSS_SCALE, _MOST_LOSS_SCALE = 2.0**-14, 2.0**32


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus: text, or one file of tokens; where it comes from, and how it is cut."""

    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    validation_share: float = 0.05
    seq_len: int = 256
    tokenizer: str = "bytes"
    end_of_text: str = "<|endoftext|>"
    token_dtype: str = "uint16"
    cache: str = ""
    shuffle: bool = True
    errors: str = "strict"
    documents: bool = False
    domains: bool = False

    def __post_init__(self) -> None:
        if not self.train:
            checks.fail("data", "train", "at least one file, folder or pattern", "none")
        if self.domains and self.validation and len(self.validation) != len(self.train):
            expected = f"as many as train, {len(self.train)}, with domains"
            checks.fail("data", "validation", expected, len(self.validation))
        checks.integer("data", "seq_len", self.seq_len, least=1)
        checks.choice("data", "token_dtype", self.token_dtype, ("uint16", "int32", "int64"))
        checks.choice("data", "errors", self.errors, ("strict", "skip", "replace"))
        if not 0 <= self.validation_share < 1:
            checks.fail("data", "validation_share", "in [0, 1)", self.validation_share)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Of ``fusedops.optim.AdamW``, and ``clip``: the largest norm of all gradients; 0: any.

    ``no_decay`` has name patterns, or is ``"vectors"``: biases and the weights of norms.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] | str = "vectors"
    clip: float = 1.0
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        checks.positive("optimizer", "lr", self.lr)
        if not all(0 <= beta < 1 for beta in self.betas):
            checks.fail("optimizer", "betas", "two numbers in [0, 1)", self.betas)
        for name in ("eps", "weight_decay", "clip"):
            checks.finite("optimizer", name, getattr(self, name), least=0)
        if isinstance(self.no_decay, str):
            checks.choice("optimizer", "no_decay", self.no_decay, ("vectors",))
        checks.choice("optimizer", "state_dtype", self.state_dtype, DTYPES[:2])


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate goes (``schedule.learning_rate``)."""

    kind: str = "cosine"
    warmup: int = 0
    final: float = 0.1
    decay: int = 0

    def __post_init__(self) -> None:
        checks.choice("schedule", "kind", self.kind, SCHEDULES)
        checks.integer("schedule", "warmup", self.warmup, least=0)
        checks.integer("schedule", "decay", self.decay, least=0)
        checks.probability("schedule", "final", self.final)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of weights and of sums of gradients, or autocast; float16's loss scale."""

    param: str = AUTO
    reduce: str = "float32"
    compute: str = AUTO
    loss_scale: float = 65536.0
    growth: int = 2000

    def __post_init__(self) -> None:
        checks.choice("precision", "param", self.param, (AUTO, *DTYPES))
        checks.choice("precision", "reduce", self.reduce, DTYPES)
        checks.choice("precision", "compute", self.compute, (AUTO, *DTYPES))
        if self.param not in (AUTO, "float32") and self.compute not in (AUTO, self.param):
            expected = f"auto, or the dtype of param, {self.param}: autocast needs float32 weights"
            checks.fail("precision", "compute", expected, self.compute)
        is_power = math.frexp(self.loss_scale)[0] == 0.5
        if not (is_power and LEAST_LOSS_SCALE <= self.loss_scale <= _MOST_LOSS_SCALE):
            expected = "a power of two from 2**-14 to 2**32, such as 1024 or 65536"
            checks.fail("precision", "loss_scale", expected, self.loss_scale)
        checks.integer("precision", "growth", self.growth, least=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """``every`` so many steps (0: at the end only), of which the last ``keep`` stay."""

    every: int = 500
    keep: int = 3

    def __post_init__(self) -> None:
        checks.integer("checkpoint", "every", self.every, least=0)
        checks.integer("checkpoint", "keep", self.keep, least=1)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """``every`` so many steps (0: at the end only), over so many ``sequences``."""

    every: int = 250
    sequences: int = 64

    def __post_init__(self) -> None:
        checks.integer("validation", "every", self.every, least=0)
        checks.integer("validation", "sequences", self.sequences, least=0)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Of ``fusedops.checkpoint.Guard``."""

    on_nonfinite: str = "skip"
    on_spike: str = "go"
    spike: float = 8.0
    window: int = 64
    patience: int = 8
    max_rollbacks: int = 2

    def __post_init__(self) -> None:
        checks.choice("guard", "on_nonfinite", self.on_nonfinite, ACTIONS[:3])
        checks.choice("guard", "on_spike", self.on_spike, ACTIONS)
        checks.positive("guard", "spike", self.spike)
        checks.integer("guard", "window", self.window, least=8)
        checks.integer("guard", "patience", self.patience, least=1)
        checks.integer("guard", "max_rollbacks", self.max_rollbacks, least=0)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is recorded of the steps, and which loggers get it."""

    every: int = 10
    tensorboard: bool = False
    wandb: str = ""
    mlflow: str = ""
    peak_tflops: float = 0.0
    timings: int = 5
    memory_step: int = 0
    memory_snapshot: bool = False

    def __post_init__(self) -> None:
        checks.integer("log", "every", self.every, least=1)
        checks.integer("log", "timings", self.timings, least=0)
        checks.integer("log", "memory_step", self.memory_step, least=2 if self.memory_step else 0)
        checks.finite("log", "peak_tflops", self.peak_tflops, least=0)


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """What is done against processes that hang (``docs/faults.md``).

    Attributes:
        timeout: seconds without any progress, after which the job names the process that keeps it
            waiting, and ends; more than the longest step takes, or checkpoint. 0: wait for ever.
    """

    timeout: float = 600.0

    def __post_init__(self) -> None:
        checks.finite("faults", "timeout", self.timeout, least=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run.

    Attributes:
        out: its folder: checkpoints, metrics, cache. A run resumes from what is there.
        steps: of the optimizer, in all.
        batch: sequences of a step, on all processes together.
        seed: of the weights, the order of the data and dropout.
        device: ``"cpu"``, ``"cuda"``; ``"auto"``: the GPU where there is one.
        export: folder for the trained weights and the tokenizer as a checkpoint of Hugging Face;
            empty: none.
        tune_host: let the processes keep the memory that they have touched (``tune_host``).
        arena: run each step in one block of memory (``memory.use_arena``).
        model: ``load`` alone, or ``preset`` and sizes (``fusedops.models.TransformerConfig``).
        parallel: ``fusedops.models.ParallelConfig``; ``dp`` is what the processes leave for it.

    The other fields are tables, whose keys ``fusedops train --example`` explains.
    """

    out: str
    steps: int
    batch: int
    data: DataConfig
    seed: int = 0
    device: str = "auto"
    export: str = ""
    tune_host: bool = True
    arena: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()

    def __post_init__(self) -> None:
        checks.integer("config", "steps", self.steps, least=1)
        checks.integer("config", "batch", self.batch, least=1)
        checks.integer("config", "seed", self.seed, least=0)
        checks.choice("config", "device", self.device, ("auto", "cpu", "cuda"))
        if not self.out:
            checks.fail("config", "out", "a folder", "an empty text")
        check_parallel(self.parallel)
        if self.schedule.warmup > self.steps:
            expected = f"at most steps, {self.steps} (lower schedule.warmup, or raise steps)"
            checks.fail("schedule", "warmup", expected, self.schedule.warmup)


def check_parallel(given: Mapping[str, Any]) -> ParallelConfig:
    """Return a checked ``ParallelConfig``; a missing ``dp`` is the least that ``ep`` fits into."""
    for name, key in (("param_dtype", "param"), ("reduce_dtype", "reduce")):
        if name in given:
            raise InputError(f"[parallel] must not have {name}: set precision.{key} instead")
    ep = given.get("ep")
    if given.get("mode") != "data" and isinstance(ep, int) and ep > 1:
        given = {"dp": ep} | dict(given)
    return config_table.fill(ParallelConfig, given, "parallel")


def load_config(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Config:
    """Return a checked configuration.

    Args:
        source: a TOML file, what one holds, or a configuration already.
        overrides: ``"optimizer.lr=3e-4"`` and the like, applied in turn.

    Raises:
        ValueError: the file cannot be read, or a key is unknown (with the nearest that is known),
            missing, of another type or out of range.

    Example:
        >>> from fusedops.train import load_config
        >>> load_config({"out": "runs/a", "steps": 9, "batch": 4, "data": {"train": ["a.txt"]}},
        ...             ["optimizer.lr=1e-3"]).optimizer.lr
        0.001
    """
    if isinstance(source, Config):
        values: dict[str, Any] = asdict(source)
    else:
        values = dict(source) if isinstance(source, Mapping) else config_table.load(source)
    try:
        return config_table.fill(Config, config_table.override(values, overrides))
    except InputError as error:
        named = f"{source}: " if isinstance(source, (str, Path)) else ""
        raise InputError(f"{named}{error}") from None
