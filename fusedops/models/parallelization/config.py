"""``ParallelConfig``: the layout of a training, as plain values that are validated.

Nothing here makes a process group or changes a model: a configuration can be written, compared and
refused on a machine with one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.models.config import TransformerConfig
from fusedops.parallel.pipeline.schedules import SCHEDULES, check_schedule
from fusedops.parallel.pipeline.split import at, check_layers
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
_OFFLOADS = ("optimizer", "activations", "experts")
_RECOMPUTE = ("none", "selective", "full", "norm", "activation")
_MAX_CHUNKS = 8  # of expert_parallel
_COUNTS = (*DENSE, "ep", "ep_chunks", "ep_nodes", "microbatches", "recompute_layers", "shard_ranks")
_RULES: dict[str, checks.Rule] = {
    **dict.fromkeys(_COUNTS, partial(checks.integer, least=1)),
    **dict.fromkeys(("zero", "bucket_bytes", "shard_threshold"), partial(checks.integer, least=0)),
    "mode": partial(checks.choice, choices=("explicit", "data", "manual")),
    "context": partial(checks.choice, choices=("ring", "all_to_all")),
    "router_loss": partial(checks.choice, choices=("global", "local")),
    "ep_reduce": partial(checks.choice, choices=("source", "node")),
    "pipeline_schedule": partial(checks.choice, choices=tuple(SCHEDULES)),
    "pipeline_balance": partial(checks.choice, choices=("operations", "layers")),
    "param_dtype": partial(checks.choice, choices=("bfloat16", "float16")),
    "reduce_dtype": partial(checks.choice, choices=("float32", "bfloat16", "float16")),
}


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
        pipeline_balance: cost that stages balance: ``"operations"`` of a token, or the number of
            ``"layers"``.
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
        for name in ("bucket_layers", "pipeline_cuts"):
            if getattr(self, name) is not None:
                layers = checks.sizes(_OP, name, getattr(self, name))
                object.__setattr__(self, name, layers)
        checks.fields(_OP, self, _RULES)
        for word in self.offload:
            checks.choice(_OP, "offload", word, _OFFLOADS)
        if not isinstance(self.recompute, str):
            checks.fail_type(_OP, "recompute", "a str", self.recompute)
        for word in self.recompute.split("+"):
            checks.choice(_OP, "recompute", word, _RECOMPUTE)
        for is_refused, name, expected, reason in _refusals(self):
            if is_refused:
                got = checks.shown(getattr(self, name))
                raise UnsupportedError(f"{_OP}: {name} must be {expected}, got {got}: {reason}")
        for is_wrong, name, expected in _relations(self):
            if is_wrong:
                checks.fail(_OP, name, expected, getattr(self, name))
        if self.pp > 1:
            check_schedule(
                _OP, self.pipeline_schedule, self.pp, self.microbatches, self.pipeline_virtual
            )
        _ = self.sizes
        check_divides(_OP, "ep_nodes", self.ep_nodes, self.ep, "ep")

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


def _relations(config: ParallelConfig) -> Iterator[tuple[bool, str, str]]:
    """Yield whether fields do not fit together, one of them, and what it must be."""
    yield config.zero > 3, "zero", "0, 1, 2 or 3"
    words = config.recompute.split("+")
    joined = len(words) > 1 and not {"none", "full"}.isdisjoint(words)
    yield joined, "recompute", "none or full alone, or others joined by +"
    unused = config.recompute_layers is not None and config.recompute == "none"
    yield unused, "recompute_layers", "None with recompute 'none', which recomputes no layer"
    name, slices = "recompute_slice_activation", config.recompute_slice_activation
    yield slices and config.recompute != "full", name, "False unless recompute is 'full'"
    yield slices and config.sp, name, "False with sp, which has cut the inputs of layers already"
    starts = (-1, *(config.bucket_layers or (0,)))
    ascending = all(a < b for a, b in zip(starts, starts[1:], strict=False))
    wrong = config.bucket_layers == () or not ascending
    yield wrong, "bucket_layers", "layers in ascending order, such as (0, 4, 8)"
    for name in ("dp", "tp", "cp", "pp", "ep"):
        given = config.mode == "data" and getattr(config, name) != 1
        yield given, name, "1 with mode 'data', in which every process is data parallel"
    unused = config.shard_ranks is not None and config.zero == 0
    yield unused, "shard_ranks", "None with zero 0, which divides nothing"
    name, overlaps = "overlap_microbatches", config.overlap_microbatches
    expected = "False with mode 'manual', in which the model orders what it computes itself"
    yield overlaps and config.mode == "manual", name, expected
    expected = "False with tp 1 and ep 1, where no communication could be overlapped"
    yield overlaps and config.tp == config.ep == 1, name, expected
    unused = config.pp == 1 and config.pipeline_virtual not in (None, 1)
    yield unused, "pipeline_virtual", "None or 1 with pp 1"
    yield config.ep_chunks > _MAX_CHUNKS, "ep_chunks", f"from 1 to {_MAX_CHUNKS}"
    unused = config.ep_chunks > 1 and config.ep == 1
    yield unused, "ep_chunks", "1 with ep 1, where no token travels"
    unused = config.ep_reduce == "node" and config.ep_nodes == 1
    yield unused, "ep_reduce", "'source' with ep_nodes 1"
    odd = config.ep_deterministic and config.ep & (config.ep - 1) != 0
    yield odd, "ep", "a power of two with ep_deterministic, whose sums are of pairs"
    given = config.ep_deterministic and config.shard_ranks is not None
    yield given, "shard_ranks", "None with ep_deterministic"


def _refusals(config: ParallelConfig) -> Iterator[tuple[bool, str, str, str]]:
    """Yield whether fields ask for what does not exist, one, what it must be, and why."""
    overlaps, deterministic = config.overlap_microbatches, config.ep_deterministic
    reason = "each half adds a gradient of its own, which changes the order of the sums"
    refused = overlaps and deterministic
    yield refused, "overlap_microbatches", "False with ep_deterministic", reason
    reason = "the weights of chosen experts would be copied to the device once for each half"
    refused = overlaps and "experts" in config.offload
    yield refused, "overlap_microbatches", "False with offload 'experts'", reason
    reason = (
        "only its author knows where a model of any kind can be cut; fusedops.parallel.pipeline "
        "runs stages of your own"
    )
    yield config.pp > 1 and config.mode == "manual", "pp", "1 with mode 'manual'", reason
    reason = "it splits the tokens of a rank, or sums, in another way"
    for name in ("tp", "pp", "ep_chunks", "ep_nodes"):
        refused = deterministic and getattr(config, name) != 1
        yield refused, name, "1 with ep_deterministic", reason
    reason = "each sum would be rounded; use torch.autocast"
    refused = deterministic and config.param_dtype is not None
    yield refused, "param_dtype", "None with ep_deterministic", reason


def check_stages(op: str, model: TransformerConfig, config: ParallelConfig) -> None:
    """Raise unless a model has enough layers for its stages; the message says what would fit."""
    if config.pp == 1:
        return
    stages = config.pp * config.virtual
    fixed = SCHEDULES[config.pipeline_schedule].fixed
    check_layers(op, model.num_layers, stages, config.virtual, fixed=fixed)
    if config.pipeline_cuts is not None:
        at(config.pipeline_cuts, model.num_layers, stages, op)


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
