"""Seconds of a training step on given devices: a closed form with few measured constants.

A layer's time is that of its matrix products (a roofline whose efficiency falls with the length of
their sums), of attention, of what is no product by the bytes that it moves, and of the
communication that nothing hides; or the time in which the host starts its kernels, if that is
longer. Layers, micro-batches and the bubble of the pipeline's schedule give the step, with
embedding and loss, the all-reduce of gradients and the optimizer. docs/estimates.md has the
formulae, and docs/planning.md how far they are from measured steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusedops.parallel.pipeline.schedules import SCHEDULES
from fusedops.planner.device import Device
from fusedops.planner.pipelines import schedule_cost
from fusedops.planner.shapes import StepShape

KERNEL_SECONDS = 4e-6  # of a product, whatever its size
# Bytes that AdamW reads and writes per parameter: weights, gradients, two moments and a master
# copy.
_OPTIMIZER_BYTES = 34
# Passes of a layer over its hidden and its inner width, forward, that no product does: norms,
# residual sums, activation; the backward takes half as much again.
_HIDDEN_PASSES, _INNER_PASSES, _GATED_PASSES = 12, 4, 6
_LOGIT_PASSES = 6
# Passes over the routed rows, forward: permuted, sent, arranged by expert, weighed and added.
_ROUTED_PASSES = 6
# Passes over the scores of attention that keeps them in memory, forward, that no product does: the
# softmax with its mask reads and writes them, dropout as well, and a mask of a byte.
_SCORE_PASSES = 4.5
# Time of attention's backward by that of its forward: by operations, and where the scores are in
# memory by passes (5.5 without a product, and four products).
_ATTENTION_BACKWARD, _SCORES_BACKWARD = 2.5, 1.5
# Share of half precision's peak in products of attention whose heads are no multiple of 8 elements:
# tensor cores take no others, and 10 of 312 TFLOP/s were left (A100, heads of 108).
_UNALIGNED = 0.037
# Bytes that the host's AdamW reads and writes per parameter, and those that travel: a gradient to
# it, a weight back.
_HOST_OPTIMIZER_BYTES, _TRAVELLING_BYTES = 30, 4
# Of these a bubble is (p - 1) / v stages of a micro-batch; that of others is read off their table.
_PLAIN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs")
PARTS = (
    *("products", "attention", "elementwise", "recomputation", "head", "layers", "host"),
    *("tensor", "context", "experts", "pipeline", "bubble", "data", "offload", "optimizer", "step"),
)


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

    def product(self, rows: float, columns: float, inner: float, dtype: str) -> float:
        """Return the seconds of ``[rows, inner] @ [inner, columns]``."""
        usual = self.device.efficiency
        share = usual.float8 if dtype == "float8" else usual.products
        share *= inner / (inner + usual.inner)
        share *= rows / (rows + usual.outer) * columns / (columns + usual.outer)
        compute = 2 * rows * columns * inner / (self.device.peak_of(dtype) * share)
        moved = self.shape.element * (rows * columns + rows * inner + columns * inner)
        return max(compute, moved / self.device.memory.bandwidth) + KERNEL_SECONDS

    def products(self, rows: float, width: float, inner: float, dtype: str) -> tuple[float, float]:
        """Return the seconds of a product, and of those of its gradients."""
        gradients = self.product(rows, inner, width, dtype)
        if not self.shape.frozen:
            gradients += self.product(width, inner, rows, dtype)
        return self.product(rows, width, inner, dtype), gradients

    def sent_by_ring(self, ranks: int) -> float:
        """Return the bytes/s at which each rank of a ring of devices sends to its neighbour.

        The slowest neighbours are on two nodes, with one network link between them.
        """
        links, usual = self.device.links, self.device.efficiency
        if ranks > links.devices_per_node:
            return links.network * usual.network
        return links.node * usual.node

    def sizes(self) -> list[tuple[float, tuple[float, float, float]]]:
        """Return the products of a layer: how many, and rows, columns and length of their sums."""
        shape = self.shape
        tokens, hidden = shape.tokens, shape.hidden
        # Of experts: how many a rank has, and the rows of each, which the router spreads evenly.
        local = shape.experts / shape.ep if shape.experts else 1
        rows = shape.routed / local if shape.experts else tokens
        inner = shape.inner / (1 if shape.experts else shape.tp)
        gates = 2 if shape.gated else 1
        sizes = [
            (1, (tokens, shape.projected / shape.tp, hidden)),
            (1, (tokens, hidden, shape.width / shape.tp)),
            (local, (rows, inner * gates, hidden)),
            (local, (rows, hidden, inner)),
        ]
        if shape.shared:
            width = shape.shared / shape.tp
            sizes += [(1, (tokens, width * gates, hidden)), (1, (tokens, hidden, width))]
        return sizes

    def layer_products(self) -> tuple[float, float]:
        """Return the seconds of a layer's products, and of those of their gradients."""
        forward = gradients = 0.0
        for count, size in self.sizes():
            product, backward = self.products(*size, self.shape.dtype)
            forward, gradients = forward + count * product, gradients + count * backward
        return forward, gradients

    def casts(self) -> tuple[float, float]:
        """Return the seconds of conversions to float8 before the products, forward and backward."""
        moved = self.shape.cast_bytes / self.device.elementwise_rate
        sizes = self.sizes()
        return (
            moved * sum(count * rows * inner for count, (rows, _, inner) in sizes),
            moved * sum(count * rows * columns for count, (rows, columns, _) in sizes),
        )

    def attention(self) -> float:
        """Return the seconds of attention's forward, half of the scores masked."""
        shape, usual = self.shape, self.device.efficiency
        sequence, local = shape.seq_len, shape.width / shape.tp
        operations = 2 * shape.micro_batch * sequence * (sequence / shape.cp) * local
        peak = self.device.peak_of("bfloat16" if shape.dtype == "float8" else shape.dtype)
        if shape.flash:
            return operations / (peak * usual.attention)
        scores = shape.micro_batch * shape.heads / shape.tp * sequence * (sequence / shape.cp)
        one_pass = self.shape.element * scores / self.device.elementwise_rate
        head_dim = shape.head_dim or shape.hidden // shape.heads
        share = _UNALIGNED if head_dim % 8 else usual.products
        # Both products compute masked scores too; one writes the scores, the other reads them.
        products = max(2 * operations / (peak * share), 2 * one_pass)
        return products + _SCORE_PASSES * one_pass

    def elementwise(self) -> float:
        shape = self.shape
        passes = _GATED_PASSES if shape.gated else _INNER_PASSES
        hidden = _HIDDEN_PASSES * shape.hidden / (shape.tp if shape.sp else 1)
        if shape.experts:
            width = shape.shared / shape.tp
            routed = shape.routed * (passes * shape.inner + _ROUTED_PASSES * shape.hidden)
        else:
            width, routed = shape.inner / shape.tp, 0.0
        moved = shape.element * (shape.tokens * (hidden + passes * width) + routed)
        return moved / self.device.elementwise_rate

    def tensor(self) -> float:
        """Return the seconds of the two sums over tensor-parallel ranks of a forward."""
        shape = self.shape
        moved = shape.tokens * shape.hidden * shape.element
        if shape.tp == 1:
            return 0.0
        usual = self.device.efficiency
        seconds = 2 * (shape.tp - 1) / shape.tp * moved / self.device.collective_rate(shape.tp)
        seconds += usual.collective_seconds * shape.tp**0.5
        return 2 * seconds * (usual.sequence if shape.sp else 1.0)

    def context(self) -> float:
        """Return the seconds in which keys and values travel in a forward."""
        shape = self.shape
        width = (shape.projected - shape.width) / shape.tp
        moved = shape.tokens * width * shape.element * (shape.cp - 1)
        return moved / self.sent_by_ring(shape.tp * shape.cp)

    def experts(self) -> float:
        """Return the seconds of the two all-to-alls of a forward."""
        shape = self.shape
        if not shape.experts:
            return 0.0
        links, usual = self.device.links, self.device.efficiency
        row = shape.hidden * shape.element
        # Ranks of the group on this node; the others are reached at the same time by the network,
        # where a row travels once to each node that has experts for it.
        near = min(shape.ep, max(1, links.devices_per_node // shape.tp))
        nodes = shape.ep / near
        inside = shape.routed * row * (near - 1) / near / (links.node * usual.node)
        reached = nodes * (1 - (1 - 1 / nodes) ** shape.top_k) * (1 - 1 / nodes)
        outside = shape.routed / shape.top_k * reached * row / (links.network * usual.network)
        return 2 * max(inside, outside)

    def head(self) -> float:
        """Return the seconds of the projection on the vocabulary and the loss, both directions."""
        shape = self.shape
        columns = shape.vocab / shape.tp
        # Trainers with float8 compute it in bfloat16.
        dtype = "bfloat16" if shape.dtype == "float8" else shape.dtype
        both = sum(self.products(shape.tokens, columns, shape.hidden, dtype))
        moved = shape.tokens * columns * shape.element * _LOGIT_PASSES
        return both + moved / self.device.elementwise_rate

    def sent(self) -> float:
        """Return the seconds in which a stage's output travels to the next."""
        shape, links = self.shape, self.device.links
        moved = shape.tokens * shape.hidden * shape.element / (shape.tp if shape.sp else 1)
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
    parts = dict.fromkeys(PARTS, 0.0)
    kinds = shape.kinds()
    layers = [_layer(_Costs(kind, device)) for _, kind in kinds]
    of_layers = [sum(layer.values()) for layer, _ in layers]
    head = costs.head()
    counts, has_head = _slowest_rank(shape, kinds, of_layers, head)
    hidden = 0.0
    for count, (layer, overlapped) in zip(counts, layers, strict=True):
        passes = shape.microbatches * count
        hidden += overlapped * passes
        for name, seconds in layer.items():
            parts[name] += seconds * passes
    of_stage = sum(
        count * seconds / shape.pp for (count, _), seconds in zip(kinds, of_layers, strict=True)
    )
    parts["head"] = head * shape.microbatches if has_head else 0.0
    if shape.pp > 1:
        parts["bubble"] = (_bubble(shape) + usual.stage_wait * shape.microbatches) * of_stage
        rounds: float = shape.pp - 1 + shape.virtual * shape.pp
        rounds += shape.microbatches * (shape.virtual - 1) / 2
        parts["pipeline"] = 2 * rounds * costs.sent()
    parts["data"], overlapped = _data(shape, costs, of_stage)
    if not shape.frozen:
        parts["optimizer"] = _optimizer(shape, device)
    parts["step"] = usual.step_seconds + usual.microbatch_seconds * shape.microbatches
    if not shape.frozen:
        moved = usual.accumulation * shape.parameters * (shape.microbatches - 1)
        parts["step"] += moved / device.elementwise_rate
    return StepEstimate(parts, hidden + overlapped)


def _slowest_rank(
    shape: StepShape, kinds: list[tuple[int, StepShape]], of_layers: list[float], head: float
) -> tuple[list[float], bool]:
    """Return how many layers of each kind the slowest pipeline rank has, and whether the head."""
    if not shape.rank_layers:
        return [count / shape.pp for count, _ in kinds], True
    places = [1 if kind.experts else 0 for _, kind in kinds]
    ranks = [[float(layers[place]) for place in places] for layers in shape.rank_layers]
    # The last stage is on the last rank, but on the first one of a V.
    last = 0 if SCHEDULES[shape.schedule].is_v else len(ranks) - 1
    loads = [
        sum(count * seconds for count, seconds in zip(counts, of_layers, strict=True))
        + (head if rank == last else 0.0)
        for rank, counts in enumerate(ranks)
    ]
    slowest = max(range(len(ranks)), key=loads.__getitem__)
    return ranks[slowest], slowest == last


def _layer(costs: _Costs) -> tuple[dict[str, float], float]:
    """Return ``_layer_of_kind`` on average of the layers that recompute and of the others."""
    share = costs.shape.recomputed
    layer, hidden = _layer_of_kind(costs)
    if share == 1 or costs.shape.recompute == "none":
        return layer, hidden
    plain, of_plain = _layer_of_kind(_Costs(replace(costs.shape, recompute="none"), costs.device))
    mixed = {name: share * layer[name] + (1 - share) * plain[name] for name in layer}
    return mixed, share * hidden + (1 - share) * of_plain


def _layer_of_kind(costs: _Costs) -> tuple[dict[str, float], float]:
    """Return the seconds of a layer and micro-batch by part, and of what is hidden behind them."""
    shape, usual = costs.shape, costs.device.efficiency
    if shape.overlap_microbatches and shape.micro_batch % 2 == 0:
        return _layer_of_halves(costs)
    forward, gradients = costs.layer_products()
    attention, elementwise = costs.attention(), costs.elementwise()
    backward = _ATTENTION_BACKWARD if shape.flash else _SCORES_BACKWARD
    cast, cast_gradients = costs.casts() if shape.cast_bytes else (0.0, 0.0)
    once = {"tensor": costs.tensor(), "experts": costs.experts(), "context": costs.context()}
    layer = {
        "products": forward + gradients,
        "attention": attention * (1 + backward),
        "elementwise": elementwise * 2.5 + cast + cast_gradients,
        "recomputation": 0.0,
        "layers": usual.layer_seconds + (usual.expert_seconds if shape.experts else 0.0),
    }
    # The backward sends what the forward sends; context parallelism the gradients of keys and
    # values too.
    passes = {"tensor": 2, "experts": 2, "context": 3}
    if shape.recompute == "full":
        layer["recomputation"] = forward + attention + elementwise + cast
        passes = {name: count + 1 for name, count in passes.items()}
    elif shape.recompute == "elementwise":
        layer["recomputation"] = elementwise
    elif shape.recompute == "selective":
        layer["recomputation"] = attention
    elif shape.recompute == "products":
        layer["recomputation"] = attention + 0.3 * forward + 0.5 * (elementwise + cast)
    layer |= {name: passes[name] * seconds for name, seconds in once.items()}
    host = usual.host_seconds * (1.0 if shape.recompute == "full" else 0.75)
    host *= 1 + usual.host_spread * max(0.0, math.log2(shape.tp) - 2)
    layer["host"] = max(0.0, host - sum(layer.values()))
    layer["offload"] = 0.0
    if "activations" not in shape.offload:
        return layer, 0.0
    # Saved in the forward, fetched in the backward, each while the layer computes.
    moved = 2 * shape.saved_bytes / costs.device.links.host
    layer["offload"] = max(0.0, moved - sum(layer.values()))
    return layer, moved - layer["offload"]


def _layer_of_halves(costs: _Costs) -> tuple[dict[str, float], float]:
    """Return ``_layer_of_kind`` of two halves, each of which hides the other's collectives."""
    shape, names = costs.shape, ("tensor", "experts")
    half = replace(
        shape,
        micro_batch=shape.micro_batch // 2,
        saved_bytes=shape.saved_bytes / 2,
        overlap_microbatches=False,
    )
    layer, hidden = _layer_of_kind(_Costs(half, costs.device))
    layer = {name: 2 * seconds for name, seconds in layer.items()}
    sent = sum(layer[name] for name in names)
    spared = costs.device.efficiency.overlap_microbatches * min(sent, sum(layer.values()) - sent)
    layer |= {name: layer[name] * (1 - spared / sent) for name in names if sent}
    return layer, 2 * hidden + spared


def _bubble(shape: StepShape) -> float:
    """Return how many stages of a micro-batch a pipeline rank waits."""
    if shape.schedule in _PLAIN_SCHEDULES:
        return (shape.pp - 1) / shape.virtual
    cost = schedule_cost(shape.schedule, shape.pp, shape.microbatches, shape.virtual)
    return cost.bubble / (1 - cost.bubble) * shape.microbatches


def _optimizer(shape: StepShape, device: Device) -> float:
    """Return the seconds of AdamW on the device, or of the host's and of what travels."""
    share = shape.parameters / (shape.dp * shape.cp if shape.zero else 1)
    if "optimizer" not in shape.offload:
        bandwidth = device.memory.bandwidth * device.efficiency.optimizer
        return _OPTIMIZER_BYTES * share / bandwidth
    links = device.links
    return share * (_TRAVELLING_BYTES / links.host + _HOST_OPTIMIZER_BYTES / links.host_memory)


def _data(shape: StepShape, costs: _Costs, of_stage: float) -> tuple[float, float]:
    """Return the seconds of data parallelism's communication that show, and those that do not."""
    ranks = shape.dp * shape.cp
    if ranks == 1:
        return 0.0, 0.0
    usual = costs.device.efficiency
    if shape.frozen and shape.zero < 3:
        return 0.0, 0.0
    away = shape.parameters * (ranks - 1) / ranks
    weights, gradients = shape.element * away, shape.reduce_bytes * away
    band = costs.device.collective_rate(ranks, shape.tp)
    if shape.zero == 3:
        total = shape.microbatches * (2 * weights + gradients) / band
        shown = max(0.0, total - shape.microbatches * of_stage) + usual.gather * total
    else:
        # ZeRO-2 stores gradients sharded: each micro-batch reduces its own.
        times = shape.microbatches if shape.zero == 2 else 1
        reduced = (times if shape.zero else 2) * gradients / band
        gathered = weights / band if shape.zero else 0.0
        total = reduced + gathered
        shown = reduced * (1 - usual.overlap) + gathered * usual.zero_gather
    return shown, max(0.0, total - shown)


def model_flops(shape: StepShape) -> float:
    """Return the floating-point operations of a step of one model replica.

    Those of the products of forward and backward, and of the half of attention's scores that is not
    masked; nothing for recomputation. Frozen weights count as trained ones, as tables of this field
    do.
    """
    tokens = shape.micro_batch * shape.seq_len * shape.microbatches
    products = 3 if shape.gated else 2
    weights = float(shape.vocab * shape.hidden)
    for count, kind in shape.kinds():
        feed_forward = kind.inner * (kind.top_k if kind.experts else 1) + kind.shared
        layer = shape.hidden * (shape.projected + shape.width + products * feed_forward)
        weights += count * (layer + shape.seq_len * shape.width)
    return 6 * tokens * weights


def utilization(shape: StepShape, device: Device, seconds: float) -> float:
    """Return the model FLOP/s utilization (MFU) of a step, as a share of bfloat16's peak."""
    devices = shape.tp * shape.pp * shape.cp
    return model_flops(shape) / devices / seconds / device.peak["bfloat16"]
