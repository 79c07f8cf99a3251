"""Seconds of a training step on given devices: a closed form with few measured constants.

A layer's time is that of its matrix products (a roofline whose efficiency falls with the length of
their sums), of attention, of what is no product by the bytes that it moves, and of the
communication that nothing hides; or the time in which the host starts its kernels, if that is
longer. Layers, micro-batches and the bubble of the pipeline's schedule give the step, with
embedding and loss, the all-reduce of gradients and the optimizer. docs/planning.md has the formulae
and how far they are from measured steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusedops._core import checks
from fusedops.planner.device import Device

_OP = "step_time"
_HALF = 2  # bytes of an activation, and of a weight in a collective
_KERNEL_SECONDS = 4e-6  # of a product, whatever its size
# Bytes that AdamW reads and writes per parameter: weights, gradients, two moments and a master
# copy.
_OPTIMIZER_BYTES = 34
# Passes of a layer over its hidden and its inner width, forward, that no product does: norms,
# residual sums, activation; the backward takes half as much again.
_HIDDEN_PASSES, _INNER_PASSES, _GATED_PASSES = 12, 4, 6
_LOGIT_PASSES = 6
# Passes over the scores of attention that keeps them in memory: product, mask and softmax, dropout.
_SCORE_PASSES = 4
# Floating-point operations of attention's backward by those of its forward.
_ATTENTION_BACKWARD = 2.5
_RECOMPUTE = ("none", "selective", "products", "full")
PARTS = (
    *("products", "attention", "elementwise", "recomputation", "head", "layers", "host"),
    *("tensor", "context", "experts", "pipeline", "bubble", "data", "optimizer", "step"),
)


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
        experts: of a layer; 0: none.
        top_k: experts of a token.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        virtual: stages of a pipeline rank.
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        sp: sequence parallelism with ``tp``.
        zero: ZeRO stage; 3 gathers weights (FSDP).
        micro_batch: sequences of a micro-batch.
        microbatches: of a step, on a data-parallel rank.
        recompute: ``"none"``, ``"selective"`` (attention), ``"products"`` (attention and about a
            third of the products, as selective activation checkpointing by operator) or ``"full"``.
        dtype: of products, ``"bfloat16"`` or ``"float8"``.
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
    experts: int = 0
    top_k: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    micro_batch: int = 1
    microbatches: int = 1
    recompute: str = "none"
    dtype: str = "bfloat16"
    frozen: bool = False
    flash: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "zero"):
            checks.integer(_OP, name, getattr(self, name), least=0)
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "inner", "vocab", "seq_len", "top_k"),
            *("tp", "pp", "virtual", "dp", "cp", "ep", "micro_batch", "microbatches"),
        ):
            checks.integer(_OP, name, getattr(self, name), least=1)
        checks.choice(_OP, "recompute", self.recompute, _RECOMPUTE)
        checks.choice(_OP, "dtype", self.dtype, ("bfloat16", "float16", "float32", "float8"))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, before ``sp``."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer on a rank."""
        attention = self.hidden**2 * (2 + 2 * self.kv_heads / self.heads) / self.tp
        feed_forward = (3 if self.gated else 2) * self.hidden * self.inner
        return attention + (
            feed_forward * self.experts / self.ep if self.experts else feed_forward / self.tp
        )

    @property
    def parameters(self) -> float:
        """Parameters on a rank."""
        return self.layer_parameters * self.layers / self.pp + self.vocab * self.hidden / self.tp


@dataclass(frozen=True)
class StepEstimate:
    """The time of a step.

    Attributes:
        parts: seconds by name of ``PARTS``. ``layers`` is time of a layer in which no kernel runs,
            ``host`` what the host needs beyond the device, ``tensor`` to ``data`` communication
            that nothing hides.
        hidden: seconds of communication that computation hides.
    """

    parts: dict[str, float]
    hidden: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Costs:
    """Seconds of pieces of a step on a device."""

    shape: StepShape
    device: Device

    def bandwidth(self) -> float:
        return self.device.memory.bandwidth * self.device.efficiency.elementwise

    def product(self, rows: float, columns: float, inner: float, dtype: str) -> float:
        """Return the seconds of ``[rows, inner] @ [inner, columns]``."""
        usual = self.device.efficiency
        share = usual.float8 if dtype == "float8" else usual.products
        share *= inner / (inner + usual.inner)
        share *= rows / (rows + usual.outer) * columns / (columns + usual.outer)
        compute = 2 * rows * columns * inner / (self.device.peak_of(dtype) * share)
        moved = _HALF * (rows * columns + rows * inner + columns * inner)
        return max(compute, moved / self.device.memory.bandwidth) + _KERNEL_SECONDS

    def products(
        self, rows: float, columns: float, inner: float, dtype: str
    ) -> tuple[float, float]:
        """Return the seconds of a product, and of those of its gradients."""
        gradients = self.product(rows, inner, columns, dtype)
        if not self.shape.frozen:
            gradients += self.product(columns, inner, rows, dtype)
        return self.product(rows, columns, inner, dtype), gradients

    def link(self, ranks: int) -> float:
        """Return the bytes/s of a group whose innermost rank is ``ranks`` devices wide."""
        links, usual = self.device.links, self.device.efficiency
        if ranks > links.devices_per_node:
            return links.network * usual.network
        return links.node * usual.node

    def layer_products(self) -> tuple[float, float]:
        shape = self.shape
        tokens, hidden = shape.tokens, shape.hidden
        queries = hidden * (1 + 2 * shape.kv_heads / shape.heads)
        # Of experts: how many a rank has, and the rows of each, which the router spreads evenly.
        local = shape.experts / shape.ep if shape.experts else 1
        rows = tokens * shape.top_k / local if shape.experts else tokens
        inner = shape.inner / (1 if shape.experts else shape.tp)
        gates = 2 if shape.gated else 1
        sizes = [
            (1, (tokens, queries / shape.tp, hidden)),
            (1, (tokens, hidden, hidden / shape.tp)),
            (local, (rows, inner * gates, hidden)),
            (local, (rows, hidden, inner)),
        ]
        forward = gradients = 0.0
        for count, size in sizes:
            product, backward = self.products(*size, shape.dtype)
            forward, gradients = forward + count * product, gradients + count * backward
        return forward, gradients

    def attention(self) -> float:
        """Return the seconds of attention's forward, half of the scores masked."""
        shape = self.shape
        sequence, local = shape.seq_len, shape.hidden / shape.tp
        operations = 2 * shape.micro_batch * sequence * (sequence / shape.cp) * local
        peak = self.device.peak["bfloat16"] * self.device.efficiency.attention
        if shape.flash:
            return operations / peak
        scores = shape.micro_batch * shape.heads / shape.tp * sequence * (sequence / shape.cp)
        return _SCORE_PASSES * _HALF * scores / self.bandwidth()

    def elementwise(self) -> float:
        shape = self.shape
        passes = _GATED_PASSES if shape.gated else _INNER_PASSES
        hidden = _HIDDEN_PASSES * shape.hidden / (shape.tp if shape.sp else 1)
        moved = shape.tokens * _HALF * (hidden + passes * shape.inner / shape.tp)
        return moved / self.bandwidth()

    def tensor(self) -> float:
        """Return the seconds of the two sums over tensor-parallel ranks of a forward."""
        shape = self.shape
        moved = shape.tokens * shape.hidden * _HALF
        if shape.tp == 1:
            return 0.0
        seconds = 2 * (shape.tp - 1) / shape.tp * moved / self.link(shape.tp)
        return 2 * (seconds + self.device.efficiency.collective_seconds * shape.tp**0.5)

    def context(self) -> float:
        """Return the seconds in which keys and values travel in a forward."""
        shape = self.shape
        width = 2 * shape.hidden * shape.kv_heads / shape.heads / shape.tp
        moved = shape.tokens * width * _HALF * (shape.cp - 1)
        return moved / self.link(shape.tp * shape.cp)

    def experts(self) -> float:
        """Return the seconds of the two all-to-alls of a forward."""
        shape = self.shape
        if not shape.experts:
            return 0.0
        moved = shape.tokens * shape.top_k * shape.hidden * _HALF
        links, usual = self.device.links, self.device.efficiency
        # Ranks of the group on this node; the others are reached at the same time by the network.
        near = min(shape.ep, max(1, links.devices_per_node // shape.tp))
        inside = moved * (near - 1) / shape.ep / (links.node * usual.node)
        outside = moved * (shape.ep - near) / shape.ep / (links.network * usual.network)
        return 2 * max(inside, outside)

    def head(self) -> float:
        """Return the seconds of the projection on the vocabulary and the loss, both directions."""
        shape = self.shape
        columns = shape.vocab / shape.tp
        both = sum(self.products(shape.tokens, columns, shape.hidden, "bfloat16"))
        return both + shape.tokens * columns * _HALF * _LOGIT_PASSES / self.bandwidth()

    def sent(self) -> float:
        """Return the seconds in which a stage's output travels to the next."""
        shape, links = self.shape, self.device.links
        moved = shape.tokens * shape.hidden * _HALF / (shape.tp if shape.sp else 1)
        return moved / (links.network * self.device.efficiency.point_to_point)


def step_time(shape: StepShape, device: Device) -> StepEstimate:
    """Return the seconds of a step by part.

    Args:
        shape: what is computed and how it is spread.
        device: each of the devices.

    Example:
        >>> from fusedops.planner import StepShape, load_device, step_time
        >>> sizes = dict(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336, gated=True)
        >>> shape = StepShape(**sizes, vocab=128256, seq_len=8192, dp=8, zero=3, microbatches=2)
        >>> 1.0 < step_time(shape, load_device("h100")).seconds < 2.5
        True
    """
    costs, usual = _Costs(shape, device), device.efficiency
    forward, gradients = costs.layer_products()
    attention, elementwise = costs.attention(), costs.elementwise()
    once = {"tensor": costs.tensor(), "experts": costs.experts(), "context": costs.context()}
    layer = {
        "products": forward + gradients,
        "attention": attention * (1 + _ATTENTION_BACKWARD),
        "elementwise": elementwise * 2.5,
        "recomputation": 0.0,
        "layers": usual.layer_seconds,
    }
    # The backward sends what the forward sends; context parallelism the gradients of keys and
    # values too.
    passes = {"tensor": 2, "experts": 2, "context": 3}
    if shape.recompute == "full":
        layer["recomputation"] = forward + attention + elementwise
        passes = {name: count + 1 for name, count in passes.items()}
    elif shape.recompute == "selective":
        layer["recomputation"] = attention
    elif shape.recompute == "products":
        layer["recomputation"] = attention + 0.3 * forward + 0.5 * elementwise
    layer |= {name: passes[name] * seconds for name, seconds in once.items()}
    host = usual.host_seconds * (1.0 if shape.recompute == "full" else 0.75)
    host *= 1 + usual.host_spread * max(0.0, math.log2(shape.tp) - 2)
    layer["host"] = max(0.0, host - sum(layer.values()))
    mine = shape.layers / shape.pp
    count = shape.microbatches * mine
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {name: seconds * count for name, seconds in layer.items()}
    of_stage = sum(layer.values()) * mine
    parts["head"] = costs.head() * shape.microbatches
    if shape.pp > 1:
        parts["bubble"] = (shape.pp - 1) / shape.virtual * of_stage
        rounds = (
            shape.pp - 1 + shape.virtual * shape.pp + shape.microbatches * (shape.virtual - 1) / 2
        )
        parts["pipeline"] = 2 * rounds * costs.sent()
    data, hidden = _data(shape, costs, of_stage)
    parts["data"] = data
    shared = shape.dp * shape.cp if shape.zero else 1
    if not shape.frozen:
        updated = _OPTIMIZER_BYTES * shape.parameters / shared
        parts["optimizer"] = updated / device.memory.bandwidth
    parts["step"] = usual.step_seconds + usual.microbatch_seconds * shape.microbatches
    return StepEstimate(parts, hidden)


def _data(shape: StepShape, costs: _Costs, of_stage: float) -> tuple[float, float]:
    """Return the seconds of data parallelism's communication that show, and those that do not."""
    ranks = shape.dp * shape.cp
    if ranks == 1:
        return 0.0, 0.0
    usual = costs.device.efficiency
    if shape.frozen and shape.zero < 3:
        return 0.0, 0.0
    moved = shape.parameters * _HALF * (ranks - 1) / ranks
    band = costs.link(shape.tp * ranks)
    if shape.zero == 3:
        total = shape.microbatches * 3 * moved / band
        shown = max(0.0, total - shape.microbatches * of_stage) + usual.gather * total
    else:
        total = 2 * moved / band
        shown = total * (1 - usual.overlap)
    return shown, max(0.0, total - shown)


def model_flops(shape: StepShape) -> float:
    """Return the floating-point operations of a step of one model replica.

    Those of the products of forward and backward, and of the half of attention's scores that is not
    masked; nothing for recomputation. Frozen weights count as trained ones, as tables of this field
    do.
    """
    tokens = shape.micro_batch * shape.seq_len * shape.microbatches
    feed_forward = (3 if shape.gated else 2) * shape.hidden * shape.inner
    weights = shape.hidden**2 * (2 + 2 * shape.kv_heads / shape.heads)
    weights += feed_forward * (shape.top_k if shape.experts else 1)
    attention = shape.seq_len * shape.hidden
    layers = shape.layers * (weights + attention) + shape.vocab * shape.hidden
    return 6 * tokens * layers


def utilization(shape: StepShape, device: Device, seconds: float) -> float:
    """Return the model FLOP/s utilization (MFU) of a step, as a share of bfloat16's peak."""
    devices = shape.tp * shape.pp * shape.cp
    return model_flops(shape) / devices / seconds / device.peak["bfloat16"]
