"""``ParallelConfig``: the layout of a training, as plain values that are validated.

Nothing here makes a process group or changes a model: a configuration can be written, compared and
refused on a machine with one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.models.config import TransformerConfig
from fusedops.parallel.pipeline.schedules import SCHEDULES, check_schedule
from fusedops.parallel.pipeline.split import at, balanced, check_layers
from fusedops.parallel.sizes import (
    DENSE,
    Sizes,
    check_divides,
    check_experts,
    check_ranks,
    divisors,
    refuse,
)

_OP = "ParallelConfig"
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("explicit", "data", "manual"),
    "context": ("ring", "all_to_all"),
    "router_loss": ("global", "local"),
    "ep_reduce": ("source", "node"),
    "pipeline_schedule": tuple(SCHEDULES),
    "pipeline_balance": ("operations", "measured", "layers"),
}
_DTYPES = {
    "param_dtype": ("bfloat16", "float16"),
    "reduce_dtype": ("float32", "bfloat16", "float16"),
}
_OFFLOADS = ("optimizer", "activations", "experts")
_RECOMPUTE = ("none", "selective", "full", "norm", "activation")
_MAX_CHUNKS = 8  # of expert_parallel


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is sharded over processes, and what its training saves.

    There are ``dp * tp * cp * pp`` processes. Experts are sharded over ``ep`` of the ``dp * cp``
    ranks that see different tokens.

    Attributes:
        dp: data parallel: ranks that get different sequences.
        tp: tensor parallel: shards of products, heads and the vocabulary.
        sp: sequence parallel: norms, dropout and residual sums on ``1 / tp`` of the tokens.
        cp: context parallel: shards of each sequence.
        pp: pipeline parallel: ranks that hold stages of layers.
        ep: expert parallel, inside of ``dp * cp``.
        ep_chunks: chunks of the tokens; the all-to-all of one overlaps the experts of another.
        ep_nodes: number of nodes of the ranks of ``ep``, which are adjacent on a node: a token is
            sent to each node once, and from there to its experts.
        ep_reduce: where results of experts are summed: ``"source"``: on the rank of the token;
            ``"node"``: on each of the ``ep_nodes`` first, which sends one row per token and rounds
            once more.
        ep_deterministic: add experts' gradients in an order that does not depend on ``ep``: weights
            then have the same bits for each that is a power of two. Experts compute the tokens of
            each rank apart, and gradients are summed after each micro-batch, which takes longer.
        router_loss: tokens of the load balance loss: ``"global"``: those of all ranks, whose
            choices are added up in each layer's forward; ``"local"``: each rank's own, a mean of
            which is taken, without communication.
        zero: what of each parameter is sharded over ``dp * cp``: 0 nothing, 1 the optimizer's
            states, 2 gradients as well, 3 weights as well.
        microbatches: forward and backward passes of a step.
        overlap_microbatches: run the layers on two halves of each micro-batch alternately, so that
            communication of ``tp`` and ``ep`` for one half overlaps computation of the other half;
            for pre-norm layers, with ``tp`` or ``ep``.
        pipeline_schedule: order of forwards and backwards over the ranks of ``pp``: ``"gpipe"``,
            ``"1f1b"``, ``"interleaved"``, ``"looped_bfs"``, ``"zero_bubble"``, ``"zbv"``,
            ``"dualpipev"``.
        pipeline_virtual: stages of a rank; by default the schedule's own number, 1 or 2.
        pipeline_balance: cost that stages balance: ``"operations"`` of a token, seconds that are
            ``"measured"`` on process 0, or the number of ``"layers"``.
        pipeline_cuts: instead of a balance: first layers of the stages after the first.
        mode: ``"explicit"``: the sizes as they stand; ``"data"``: all processes are ``dp``;
            ``"manual"``: the model calls the primitives of ``fusedops.parallel`` itself, and only
            the mesh is made and the gradients are reduced.
        context: how ``cp`` ranks attend to each other: ``"ring"``, or ``"all_to_all"``, which needs
            ``cp`` to divide the heads.
        overlap: overlap communication with computation: of gradients with the backward, of tensor
            parallelism with the chunks of its products.
        recompute: what the backward recomputes: ``"none"``, ``"full"`` (only the inputs of layers
            are saved), ``"norm"``, ``"activation"``, both joined by ``+``, which ``"selective"``
            means.
        recompute_layers: how many layers of each stage recompute, its first ones; by default all.
        recompute_slice_activation: save ``1 / tp`` of what full recomputation saves.
        mp_comm_recompute: repeat tensor parallelism's communication when a layer is recomputed,
            instead of saving its result.
        parallel_optimizer_comm_recompute: gather ``zero=3``'s weights again in the backward,
            instead of keeping them from the forward on.
        offload: ``"optimizer"``: masters and moments in host memory; ``"activations"``: what layers
            save for the backward; ``"experts"``: weights of experts, of which those that tokens
            chose come to the device for a layer's forward and backward. Several in a tuple.
        bucket_bytes: size of the buckets in which parameters and gradients are communicated.
        bucket_layers: instead of ``bucket_bytes``: first layers of the buckets, in ascending order.
        shard_threshold: parameters of fewer bytes are not sharded by ``zero``.
        not_sharded: patterns of parameters' names (``"*.bias"``) that ``zero`` does not shard.
        shard_ranks: ranks of a group over which ``zero`` shards, with replicas in other groups
            (HSDP); all of ``dp * cp`` by default.
        param_dtype: ``"bfloat16"`` or ``"float16"``: the dtype in which forward and backward use
            weights whose float32 masters the optimizer updates. Weights that ``zero`` shards keep
            the dtype of the model, float32, and are gathered in this one; others are stored in
            this one, and the optimizer of the engine has their masters.
        reduce_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: the dtype in which gradients
            are accumulated over micro-batches and summed over ranks; by default ``param_dtype``,
            and that of the parameters if there is none. Where ``zero`` does not shard a parameter,
            ranks sum in float32 at least.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value has no meaning, or two do not fit together.

    Example:
        >>> from fusedops.models import ParallelConfig
        >>> ParallelConfig(dp=2, tp=2, zero=1).sizes.ranks
        4
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    ep: int = 1
    ep_chunks: int = 1
    ep_nodes: int = 1
    ep_reduce: str = "source"
    ep_deterministic: bool = False
    router_loss: str = "global"
    zero: int = 0
    microbatches: int = 1
    overlap_microbatches: bool = False
    pipeline_schedule: str = "1f1b"
    pipeline_virtual: int | None = None
    pipeline_balance: str = "operations"
    pipeline_cuts: tuple[int, ...] | None = None
    mode: str = "explicit"
    context: str = "ring"
    overlap: bool = True
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_slice_activation: bool = False
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = True
    offload: tuple[str, ...] = ()
    bucket_bytes: int = 25 << 20
    bucket_layers: tuple[int, ...] | None = None
    shard_threshold: int = 0
    not_sharded: tuple[str, ...] = ()
    shard_ranks: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", _words("offload", self.offload))
        object.__setattr__(self, "not_sharded", _words("not_sharded", self.not_sharded))
        for name in (*DENSE, "ep", "ep_chunks", "ep_nodes", "microbatches"):
            checks.integer(_OP, name, getattr(self, name), least=1)
        for name in ("zero", "bucket_bytes", "shard_threshold"):
            checks.integer(_OP, name, getattr(self, name), least=0)
        checks.flags(_OP, self)
        if self.zero > 3:
            checks.fail(_OP, "zero", "0, 1, 2 or 3", self.zero)
        for name, choices in _CHOICES.items():
            checks.choice(_OP, name, getattr(self, name), choices)
        for name, choices in _DTYPES.items():
            if getattr(self, name) is not None:
                checks.choice(_OP, name, getattr(self, name), choices)
        for word in self.offload:
            checks.choice(_OP, "offload", word, _OFFLOADS)
        _check_recompute(self)
        _check_buckets(self)
        _check_modes(self)
        _check_pipeline(self)
        _ = self.sizes
        _check_exchange(self)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the mesh."""
        return Sizes(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def virtual(self) -> int:
        """Stages of a rank."""
        own = SCHEDULES[self.pipeline_schedule].virtual
        return own if self.pipeline_virtual is None else self.pipeline_virtual

    @property
    def recomputed(self) -> frozenset[str]:
        """What the backward recomputes: of ``"layer"``, ``"norm"``, ``"activation"``."""
        if self.recompute == "full":
            return frozenset(("layer",))
        words = set(self.recompute.split("+"))
        return frozenset({"norm", "activation"} if "selective" in words else words - {"none"})

    def for_ranks(self, ranks: int) -> ParallelConfig:
        """Return the configuration for so many processes.

        Args:
            ranks: processes of the job.

        Returns:
            This one; for ``mode="data"`` the explicit one with all processes as ``dp``.

        Raises:
            ValueError: its sizes do not make that number; the message has those that would.
        """
        if self.mode == "data":
            return replace(self, dp=ranks, mode="explicit")
        by_name = {name: getattr(self, name) for name in ("dp", "tp", "pp", "cp")}
        check_ranks(_OP, by_name, ranks, "processes")
        return self


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return a word or several as a tuple."""
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"{_OP}: {name} must be a word or several, got {checks.shown(value)}")
    return tuple(words)


def _check_recompute(config: ParallelConfig) -> None:
    if not isinstance(config.recompute, str):
        checks.fail_type(_OP, "recompute", "a str", config.recompute)
    words = config.recompute.split("+")
    for word in words:
        checks.choice(_OP, "recompute", word, _RECOMPUTE)
    if len(words) > 1 and {"none", "full"} & set(words):
        expected = "none or full alone, or others joined by +"
        checks.fail(_OP, "recompute", expected, config.recompute)
    if config.recompute_layers is not None:
        checks.integer(_OP, "recompute_layers", config.recompute_layers, least=1)
        if config.recompute == "none":
            expected = "None with recompute 'none', which recomputes no layer"
            checks.fail(_OP, "recompute_layers", expected, config.recompute_layers)
    if config.recompute_slice_activation:
        if config.recompute != "full":
            expected = "False unless recompute is 'full'"
            checks.fail(_OP, "recompute_slice_activation", expected, True)
        if config.sp:
            expected = "False with sp, which has cut the inputs of layers already"
            checks.fail(_OP, "recompute_slice_activation", expected, True)


def _check_buckets(config: ParallelConfig) -> None:
    if config.bucket_layers is None:
        return
    starts = checks.sizes(_OP, "bucket_layers", config.bucket_layers)
    object.__setattr__(config, "bucket_layers", starts)
    if not starts or starts[0] < 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
        checks.fail(_OP, "bucket_layers", "layers in ascending order, such as (0, 4, 8)", starts)


def _check_modes(config: ParallelConfig) -> None:
    if config.mode == "data":
        for name in ("dp", "tp", "cp", "pp", "ep"):
            if getattr(config, name) != 1:
                expected = "1 with mode 'data', in which every process is data parallel"
                checks.fail(_OP, name, expected, getattr(config, name))
    if config.shard_ranks is not None:
        checks.integer(_OP, "shard_ranks", config.shard_ranks, least=1)
        if config.zero == 0:
            expected = "None with zero 0, which divides nothing"
            checks.fail(_OP, "shard_ranks", expected, config.shard_ranks)
    if not config.overlap_microbatches:
        return
    if config.mode == "manual":
        expected = "False with mode 'manual', in which the model orders what it computes itself"
        checks.fail(_OP, "overlap_microbatches", expected, True)
    if config.ep_deterministic:
        raise UnsupportedError(
            f"{_OP}: overlap_microbatches must be False with ep_deterministic: each half adds a "
            "gradient of its own, which changes the order of the sums"
        )
    if "experts" in config.offload:
        raise UnsupportedError(
            f"{_OP}: overlap_microbatches must be False with offload 'experts': the weights of "
            "chosen experts would be copied to the device once for each half"
        )
    if config.tp == 1 and config.ep == 1:
        expected = "False with tp 1 and ep 1, where no communication could be overlapped"
        checks.fail(_OP, "overlap_microbatches", expected, True)


def _check_pipeline(config: ParallelConfig) -> None:
    if config.pipeline_cuts is not None:
        cuts = checks.sizes(_OP, "pipeline_cuts", config.pipeline_cuts)
        object.__setattr__(config, "pipeline_cuts", cuts)
    parts, virtual = config.microbatches, config.pipeline_virtual
    if config.pp == 1:
        if virtual not in (None, 1):
            checks.fail(_OP, "pipeline_virtual", "None or 1 with pp 1", virtual)
        return
    check_schedule(_OP, config.pipeline_schedule, config.pp, parts, virtual)
    if config.mode == "manual":
        raise UnsupportedError(
            f"{_OP}: pp must be 1 with mode 'manual', got {config.pp}: only its author "
            "knows where a model of any kind can be cut; fusedops.parallel.pipeline runs stages "
            "of your own"
        )


def check_stored(op: str, model: TransformerConfig, config: ParallelConfig, device: str) -> None:
    """Raise unless experts can be offloaded to host memory.

    Raises:
        ValueError: the model has no experts.
        UnsupportedError: their gradients are summed, or their weights gathered, on devices.
    """
    if "experts" not in config.offload:
        return
    if not model.sparse_layers:
        checks.fail(op, "offload", "without 'experts' for a model that has none", config.offload)
    replicas = config.sizes.edp * config.tp
    if replicas > 1 and (config.zero or device != "cpu"):
        raise UnsupportedError(
            f"{op}: offload must be without 'experts' where {replicas} processes have the same "
            "experts and zero divides them, or devices add their gradients: with ep = dp x cp and "
            "tp 1 each expert is on one process"
        )


def _check_exchange(config: ParallelConfig) -> None:
    if config.ep_chunks > _MAX_CHUNKS:
        checks.fail(_OP, "ep_chunks", f"from 1 to {_MAX_CHUNKS}", config.ep_chunks)
    if config.ep_chunks > 1 and config.ep == 1:
        expected = "1 with ep 1, where no token travels"
        checks.fail(_OP, "ep_chunks", expected, config.ep_chunks)
    check_divides(_OP, "ep_nodes", config.ep_nodes, config.ep, "ep")
    if config.ep_reduce == "node" and config.ep_nodes == 1:
        checks.fail(_OP, "ep_reduce", "'source' with ep_nodes 1", config.ep_reduce)
    if not config.ep_deterministic:
        return
    if config.ep & (config.ep - 1):
        expected = "a power of two with ep_deterministic, whose sums are of pairs"
        checks.fail(_OP, "ep", expected, config.ep)
    for name in ("tp", "pp", "ep_chunks", "ep_nodes"):
        if getattr(config, name) != 1:
            raise UnsupportedError(
                f"{_OP}: {name} must be 1 with ep_deterministic, got {getattr(config, name)}: it "
                "splits the tokens of a rank, or sums, in another way"
            )
    if config.shard_ranks is not None:
        checks.fail(_OP, "shard_ranks", "None with ep_deterministic", config.shard_ranks)
    if config.param_dtype is not None:
        raise UnsupportedError(
            f"{_OP}: param_dtype must be None with ep_deterministic, got {config.param_dtype!r}: "
            "each sum would be rounded; use torch.autocast"
        )


def check_stages(op: str, model: TransformerConfig, config: ParallelConfig) -> None:
    """Raise unless a model has enough layers for its stages; the message says what would fit."""
    if config.pp == 1:
        return
    stages = config.pp * config.virtual
    fixed = SCHEDULES[config.pipeline_schedule].fixed
    check_layers(op, model.depth, stages, config.virtual, fixed=fixed)
    if config.pipeline_cuts is not None:
        at(config.pipeline_cuts, model.depth, stages, op)


def layer_runs(model: TransformerConfig, config: ParallelConfig) -> list[range] | None:
    """Return the layers of each stage where a configuration alone decides them, else ``None``."""
    stages = config.pp * config.virtual
    if config.pipeline_cuts is not None:
        return at(config.pipeline_cuts, model.num_layers, stages)
    if config.pipeline_balance == "layers":
        return balanced([1.0] * model.num_layers, stages)
    return None


def check_split(op: str, model: TransformerConfig, *, tp: int, ep: int, data: int) -> None:
    """Raise unless ``tp`` divides heads and features, and ``ep`` the experts and ``data`` ranks.

    The message has the nearest sizes that fit. ``data`` is ``dp * cp``.
    """
    heads, keys = model.num_heads, model.kv_heads
    check_divides(op, "tp", tp, heads, "the heads")
    if keys % tp and tp % keys:
        fits = [n for n in divisors(heads) if keys % n == 0 or n % keys == 0]
        refuse(op, "tp", f"a divisor or a multiple of the {keys} heads of keys", tp, fits)
    check_divides(op, "tp", tp, model.intermediate_size, "intermediate_size")
    if ep == 1:
        return
    if not model.sparse_layers:
        checks.fail(op, "ep", "1 for a model without experts", ep)
    check_experts(op, ep, data, model.num_experts)
