"""How a model is trained: how it is spread over devices, and the shape of its micro-batches.

A layout is checked against a model before anything is computed: the message says which product is
wrong, and which sizes would fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization.config import ParallelConfig, check_split, check_stages
from fusedops.models.parallelization.stage_costs import by_operations
from fusedops.parallel.pipeline.split import at, balanced
from fusedops.parallel.sizes import check_divides, check_ranks
from fusedops.planner.pipelines import ScheduleCost, schedule_cost, stages_of_rank

_OP = "plan"
KERNELS = ("fused", "stock", "eager")
OFFLOADS = ("optimizer", "activations")
# What ``recompute`` may recompute alone or joined by ``+``.
PARTIAL_RECOMPUTE = ("scores", "norm", "activation")
RECOMPUTE = ("none", "selective", "full", *PARTIAL_RECOMPUTE)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CACHED = 1024


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of each number."""

    weights: int  # of the weights that the layers read
    gradients: int  # of the gradients as they are accumulated
    master: int  # of the optimizer's own copy of the weights; 0: it updates the weights
    moments: int  # of AdamW's two moments together
    activations: int  # of what products and attention compute
    stream: int  # of the residual stream, which norms read
    # Of the copies of weights that autocast makes in the forward and keeps for the backward
    casts: int = 0

    @property
    def states(self) -> int:
        """Bytes of the optimizer per parameter."""
        return self.master + self.moments


PRECISIONS = {
    "float32": ElementBytes(4, 4, 0, 8, 4, 4),
    "autocast": ElementBytes(4, 4, 0, 8, 2, 4, casts=2),
    "mixed": ElementBytes(2, 4, 4, 8, 2, 2),
    "half-gradients": ElementBytes(2, 2, 4, 8, 2, 2),
    "half": ElementBytes(2, 2, 0, 4, 2, 2),
}


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """The micro-batch of a data-parallel rank, and how it is computed.

    Attributes:
        micro_batch: sequences of a micro-batch, on each data-parallel rank.
        seq_len: tokens of a sequence; the model's longest by default.
        precision: a name of ``PRECISIONS``.
        kernels: ``"fused"``: what this package's ops save; ``"stock"``: transformers' modules in
            eager torch, with fused attention; ``"eager"``: with the attention's scores in memory.
        dropout: whether masks of dropout are saved (this package's ops save none).
        chunked_loss: ``linear_cross_entropy``: the logits never exist all at once.
        recompute_scores: recompute the attention scores that ``"eager"`` saves; the
            ``recompute="selective"`` of ``ParallelConfig`` implies it.
        optimizer_overlap: the offloaded optimizer steps during the backward and needs its states
            twice; otherwise it steps in place, with half of the host memory.
        expert_imbalance: rows of the expert-parallel rank that gets most, by their mean over the
            ranks; 1: the router spreads the tokens evenly.

    Raises:
        ValueError: a value has no meaning.
        TypeError: a value has the wrong type.
    """

    micro_batch: int = 1
    seq_len: int | None = None
    precision: str = "mixed"
    kernels: str = "fused"
    dropout: bool = False
    chunked_loss: bool = False
    recompute_scores: bool = False
    optimizer_overlap: bool = True
    expert_imbalance: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        checks.integer(op, "micro_batch", self.micro_batch, least=1)
        if self.seq_len is not None:
            checks.integer(op, "seq_len", self.seq_len, least=1)
        checks.fields(op, self, {})
        checks.choice(op, "precision", self.precision, PRECISIONS)
        checks.choice(op, "kernels", self.kernels, KERNELS)
        checks.finite(op, "expert_imbalance", self.expert_imbalance, least=1.0)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over devices, and the shape of its training.

    Attributes:
        parallel: the parallel sizes, recomputation and offloading. Its offloading of experts
            cannot be estimated.
        training: the micro-batch and its precision.

    Raises:
        ValueError: two values do not fit together.

    Example:
        >>> from fusedops.models import ParallelConfig
        >>> from fusedops.planner import Layout
        >>> Layout(ParallelConfig(dp=2, tp=4)).devices
        8
    """

    parallel: ParallelConfig = ParallelConfig()
    training: TrainingShape = TrainingShape()

    def __post_init__(self) -> None:
        if "experts" in self.parallel.offload:
            expected = "without 'experts', whose bytes depend on the choices of the router"
            checks.fail(_OP, "offload", expected, self.parallel.offload)
        if self.training.recompute_scores and self.parallel.recompute == "full":
            checks.fail(_OP, "recompute", "full alone, or others joined by +", "full+scores")

    @classmethod
    def of(cls, **options: Any) -> Layout:
        """Return a layout from fields of ``ParallelConfig`` and of ``TrainingShape``.

        Args:
            **options: the fields; ``recompute`` may have the word ``"scores"``.

        Raises:
            ValueError: a value has no meaning, or two do not fit together.
            TypeError: there is no such field, or a value has the wrong type.
        """
        return cls().replace(**options)

    def replace(self, **options: Any) -> Layout:
        """Return this layout with other values of some fields, as of ``of``."""
        names = {field.name for field in fields(TrainingShape)}
        if isinstance(options.get("recompute"), str):
            words = options["recompute"].split("+")
            options["recompute_scores"] = "scores" in words
            others = [word for word in words if word != "scores"]
            options["recompute"] = "+".join(others) or "none"
        shape = {name: value for name, value in options.items() if name in names}
        rest = {name: value for name, value in options.items() if name not in names}
        return Layout(replace(self.parallel, **rest), replace(self.training, **shape))

    def options(self) -> dict[str, Any]:
        """Return the fields that an estimate depends on as ``of`` takes them, for JSON."""
        both = asdict(self.parallel) | asdict(self.training) | {"recompute": self.recompute}
        return {name: both[name] for name in _OPTIONS}

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.parallel.sizes.ranks

    @property
    def recompute(self) -> str:
        """The words of ``RECOMPUTE`` that say what is recomputed, joined by ``+``."""
        if not self.training.recompute_scores or self.parallel.recompute == "selective":
            return self.parallel.recompute
        words = [] if self.parallel.recompute == "none" else [self.parallel.recompute]
        return "+".join(["scores", *words])

    @property
    def bytes_of(self) -> ElementBytes:
        """The bytes of each number; a ``param_dtype`` replaces ``precision``."""
        if self.parallel.param_dtype is None:
            return PRECISIONS[self.training.precision]
        is_wide = self.parallel.reduce_dtype == "float32"
        return PRECISIONS["mixed" if is_wide else "half-gradients"]

    @property
    def dtype(self) -> str:
        """The dtype of products."""
        if self.parallel.param_dtype is not None:
            return self.parallel.param_dtype
        return "float32" if self.training.precision == "float32" else "bfloat16"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients as they are accumulated over micro-batches."""
        config, size = self.parallel, self.bytes_of.gradients
        if config.param_dtype is not None or config.reduce_dtype is None or config.zero >= 2:
            return size  # sharded gradients have the dtype of the parameters
        reduced = _BYTES[config.reduce_dtype]
        return reduced if config.zero else max(size, reduced)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of an element of the gradients that data-parallel ranks sum."""
        dtype = self.parallel.reduce_dtype
        size = self.bytes_of.gradients if dtype is None else _BYTES[dtype]
        # Replicas sum half-precision gradients in float32.
        return size if self.parallel.zero else max(size, _BYTES["float32"])

    @property
    def bytes_of_experts(self) -> int:
        """Bytes of what experts compute: autocast does not know torch's product of experts."""
        sizes = self.bytes_of
        stream = sizes.casts and self.training.kernels != "fused"
        return sizes.stream if stream else sizes.activations

    @property
    def expert_imbalance(self) -> float:
        """``TrainingShape.expert_imbalance`` where there are ranks to be unequal."""
        return self.training.expert_imbalance if self.parallel.ep > 1 else 1.0

    @property
    def recomputed(self) -> frozenset[str]:
        """What the backward recomputes, in words of ``PARTIAL_RECOMPUTE``."""
        words, partial = self.recompute.split("+"), frozenset(PARTIAL_RECOMPUTE)
        return partial if "selective" in words else partial.intersection(words)

    @cached_property
    def without_recomputation(self) -> Layout:
        """The same without recomputation, which layers after ``recompute_layers`` have not."""
        plain = replace(
            self.parallel, recompute="none", recompute_layers=None, recompute_slice_activation=False
        )
        return Layout(plain, self.training)

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return 1 if self.parallel.pp == 1 else self.parallel.pp * self.parallel.virtual

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits, with equal stages.

        ``(p - 1) / (v m + p - 1)`` with GPipe, 1F1B and the interleaved schedule.
        """
        return self._schedule_cost.bubble

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Of how many micro-batches each rank of the pipeline keeps what its layers save.

        ``min(p - rank, m)`` with 1F1B, m with GPipe; interleaved by v the first rank keeps
        ``(1 + (p - 1) / (p v)) p`` of them.
        """
        return self._schedule_cost.in_flight

    @property
    def _schedule_cost(self) -> ScheduleCost:
        config = self.parallel
        if config.pp == 1:
            return ScheduleCost(0.0, (1.0,))
        return schedule_cost(
            config.pipeline_schedule, config.pp, config.microbatches, config.virtual
        )

    def tokens(self, model: TransformerConfig) -> int:
        """Return the tokens of a micro-batch on one device, before ``sp``."""
        return self.training.micro_batch * self.length(model) // self.parallel.cp

    def length(self, model: TransformerConfig) -> int:
        """Return the tokens of a sequence."""
        return model.seq_len if self.training.seq_len is None else self.training.seq_len

    def runs(self, model: TransformerConfig) -> tuple[range, ...]:
        """Return the layers of each stage, in runs that balance the operations by default."""
        config = self.parallel
        if config.pp == 1:
            return (range(model.num_layers),)
        return layer_runs(model, self.stages, config.pipeline_balance, config.pipeline_cuts)

    def layers_of(self, model: TransformerConfig, rank: int) -> list[int]:
        """Return the layers of a rank of the pipeline."""
        runs = self.runs(model)
        return [layer for stage in self.stages_of(rank) for layer in runs[stage]]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank of the pipeline."""
        config = self.parallel
        if config.pp == 1:
            return [0]
        return stages_of_rank(config.pipeline_schedule, config.pp, config.virtual, rank)


@lru_cache(_CACHED)
def layer_runs(
    model: TransformerConfig, stages: int, balance: str, cuts: tuple[int, ...] | None = None
) -> tuple[range, ...]:
    """Return the layers of each of all ranks' stages, as ``pipeline_balance`` and ``_cuts`` ask."""
    if cuts is not None:
        return tuple(at(cuts, model.num_layers, stages, _OP))
    if balance == "layers":
        return tuple(balanced([1.0] * model.num_layers, stages))
    layers, head = by_operations(model)
    return tuple(balanced(layers, stages, last=head))


_OPTIONS = (
    *("dp", "tp", "pp", "cp", "ep", "zero", "sp", "micro_batch", "microbatches", "seq_len"),
    *("pipeline_schedule", "pipeline_virtual", "precision", "kernels", "dropout", "chunked_loss"),
    *("expert_imbalance", "pipeline_cuts", "recompute", "recompute_layers"),
    *("recompute_slice_activation", "mp_comm_recompute", "parallel_optimizer_comm_recompute"),
    *("offload", "optimizer_overlap", "bucket_bytes", "param_dtype", "reduce_dtype"),
)


def check_kind(model: TransformerConfig) -> None:
    """Raise an ``UnsupportedError`` for models whose layers the planner has no formulas for."""
    for name in ("kv_lora_rank", "dense_layers", "expert_size"):
        value = getattr(model, name)
        if value:
            reason = f"the planner has no formulas for models with {name}, got {value}"
            raise checks.UnsupportedError(f"{_OP}: {reason}")


def check(model: TransformerConfig, layout: Layout, devices: int | None = None) -> None:
    """Raise unless the layout fits the model, and takes this many devices.

    Args:
        model: what is trained.
        layout: how.
        devices: how many there are; not looked at if ``None``.

    Raises:
        ValueError: a size does not fit; the message says which sizes would.
        UnsupportedError: layers are of a kind that the planner has no formulas for.
    """
    config = layout.parallel
    check_kind(model)
    if devices is not None:
        sizes = {name: getattr(config, name) for name in ("dp", "tp", "pp", "cp")}
        check_ranks(_OP, sizes, devices)
    check_split(_OP, model, tp=config.tp, ep=config.ep, data=config.sizes.data)
    check_stages(_OP, model, config)
    length = layout.length(model)
    if model.position_tables and length > model.seq_len:
        expected = f"at most {model.seq_len}, the positions that the model has"
        checks.fail(_OP, "seq_len", expected, length)
    check_divides(_OP, "cp", config.cp, length, "the tokens of a sequence")
    if config.sp:
        tokens = layout.tokens(model)
        check_divides(_OP, "tp", config.tp, tokens, "the tokens of a device (sp)")
