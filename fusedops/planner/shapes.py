"""What a training step computes and how it is spread over devices: the input of ``step_time``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusedops._core import checks
from fusedops.parallel.pipeline.schedules import SCHEDULES

_OP = "step_time"
_RECOMPUTE = ("none", "elementwise", "selective", "products", "full")
_OFFLOAD = ("optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step computes and how it is spread over devices.

    Attributes:
        layers: of the model.
        hidden: width of the residual stream.
        heads: of the queries.
        kv_heads: of keys and values.
        inner: width of a feed-forward layer, or of an expert.
        gated: whether these have a gate.
        vocab: rows of the embedding.
        seq_len: tokens of a sequence.
        head_dim: of a head; 0: ``hidden / heads``.
        experts: of a layer; 0: none.
        top_k: experts of a token.
        sparse_layers: how many layers have experts; all by default.
        shared: width of the expert that every token visits; 0: none.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        virtual: stages of a pipeline rank.
        schedule: of the pipeline, a name of ``SCHEDULES``.
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        sp: sequence parallelism with ``tp``.
        overlap_microbatches: whether a layer computes two halves of a micro-batch in turn, so that
            the collectives of one are hidden behind the other.
        zero: ZeRO stage; 3 gathers weights (FSDP).
        micro_batch: sequences of a micro-batch.
        microbatches: of a step, on a data-parallel rank.
        rank_layers: of each pipeline rank, how many layers without and with experts it has; by
            default all ranks have equally many.
        recompute: ``"none"``, ``"elementwise"`` (norms and activations), ``"selective"``
            (attention), ``"products"`` (attention and about a third of the products, as selective
            activation checkpointing by operator) or ``"full"``.
        recomputed: share of the layers that recompute.
        imbalance: rows of the expert-parallel rank with most rows, by their mean over the ranks.
        offload: of ``"optimizer"`` (its states and its step are the host's) and ``"activations"``.
        saved_bytes: that a layer keeps of a micro-batch, of which offloading moves all.
        dtype: of products, ``"float32"``, ``"bfloat16"`` or ``"float8"``; activations and what
            travels have it as well, but 2 bytes with float8.
        reduce_bytes: of an element of the gradients that data-parallel ranks reduce.
        cast_bytes: that are moved per element of a product's input, and of its output's gradient,
            to convert them to float8; 0 where kernels before the product do that.
        frozen: whether the weights are not trained, but small adapters (LoRA): their products have
            no gradients of weights.
        flash: whether attention keeps its scores out of memory and computes no masked ones.

    Raises:
        ValueError: a size is not positive, or a word has no meaning.
        TypeError: a size is no integer.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    gated: bool
    vocab: int
    seq_len: int
    head_dim: int = 0
    experts: int = 0
    top_k: int = 1
    sparse_layers: int | None = None
    shared: int = 0
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    overlap_microbatches: bool = False
    zero: int = 0
    micro_batch: int = 1
    microbatches: int = 1
    rank_layers: tuple[tuple[int, int], ...] = ()
    recompute: str = "none"
    recomputed: float = 1.0
    imbalance: float = 1.0
    offload: tuple[str, ...] = ()
    saved_bytes: float = 0.0
    dtype: str = "bfloat16"
    reduce_bytes: int = 4
    cast_bytes: float = 0.0
    frozen: bool = False
    flash: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "zero", "shared", "head_dim"):
            checks.integer(_OP, name, getattr(self, name), least=0)
        if self.sparse_layers is not None:
            checks.integer(_OP, "sparse_layers", self.sparse_layers, least=0)
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "inner", "vocab", "seq_len", "top_k"),
            *("tp", "pp", "virtual", "dp", "cp", "ep", "micro_batch", "microbatches"),
        ):
            checks.integer(_OP, name, getattr(self, name), least=1)
        checks.choice(_OP, "recompute", self.recompute, _RECOMPUTE)
        checks.probability(_OP, "recomputed", self.recomputed)
        checks.finite(_OP, "imbalance", self.imbalance, least=1.0)
        if self.rank_layers and len(self.rank_layers) != self.pp:
            expected = f"of pp = {self.pp} ranks, or empty"
            checks.fail(_OP, "rank_layers", expected, f"those of {len(self.rank_layers)}")
        checks.choice(_OP, "schedule", self.schedule, SCHEDULES)
        for word in self.offload:
            checks.choice(_OP, "offload", word, _OFFLOAD)
        checks.choice(_OP, "dtype", self.dtype, ("bfloat16", "float16", "float32", "float8"))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, before ``sp``."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def element(self) -> int:
        """Bytes of an element of activations, and of what travels."""
        return 4 if self.dtype == "float32" else 2

    @property
    def routed(self) -> float:
        """Rows that the experts of a rank get of a micro-batch, of the rank with most rows."""
        rows = self.tokens / (self.tp if self.sp else 1) * self.top_k
        return rows * (self.imbalance if self.ep > 1 else 1.0)

    @property
    def width(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * self.head_dim or self.hidden

    @property
    def projected(self) -> float:
        """Width of queries, keys and values together."""
        return self.width * (1 + 2 * self.kv_heads / self.heads)

    def kinds(self) -> list[tuple[int, StepShape]]:
        """Return how many layers are alike, and a shape all of whose layers are so."""
        if not self.experts or self.sparse_layers in (None, self.layers):
            return [(self.layers, self)]
        dense = replace(self, experts=0, top_k=1, shared=0, sparse_layers=None, rank_layers=())
        sparse = replace(self, sparse_layers=None, rank_layers=())
        count = self.sparse_layers or 0
        kinds = [(self.layers - count, dense), (count, sparse)]
        return [(number, shape) for number, shape in kinds if number]

    @property
    def parameters(self) -> float:
        """Parameters on a rank."""
        layers = sum(count * shape._layer_parameters() for count, shape in self.kinds())
        return layers / self.pp + self.vocab * self.hidden / self.tp

    def _layer_parameters(self) -> float:
        attention = self.hidden * (self.projected + self.width) / self.tp
        products = 3 if self.gated else 2
        share = self.experts / self.ep if self.experts else 1 / self.tp
        experts = products * self.hidden * self.inner * share
        return attention + experts + products * self.hidden * self.shared / self.tp
