"""Bytes of a training step on the device that needs most: a closed form, without a GPU or a model.

Static memory is a sum of parameters times bytes, divided by the number of ranks that share it. The
rest is computed at six moments of the last micro-batch; the peak of a stage is the largest:

    loss   everything that the layers kept, and the logits with their gradient
    head   the gradient of the logits, and that of the projection on the vocabulary
    layer  everything that the layers kept, and what the backward of the last one adds
    first  the same of the first layer, which is alone, and the gradients of all others
    end    all gradients, and that of the embedding
    step   weights, gradients and states

Between them bytes rise or fall in a line, layer by layer, so that no other moment is larger. The
optimizer is one that needs no memory of its own (``fusedops.optim.AdamW``, torch's ``fused=True``).
Fragmentation, the libraries' workspaces and what is no tensor are not in it.

``docs/estimates.md`` has the formulas with their reasons, and the comparison with measured peaks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fusedops.models.config import TransformerConfig, Weights
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.parallel.pipeline.schedules import SCHEDULES
from fusedops.planner import saved_tensors
from fusedops.planner.layout import Layout, TrainingShape, check
from fusedops.planner.saved_tensors import SavedActivation

PARTS = ("weights", "gradients", "states", "activations", "communication", "logits")
# linear_cross_entropy's logits in memory at a time.
_CHUNK = 4096
# OffloadedAdamW: parameters that are stepped together, and how many such buckets are under way.
_STEP_BUCKET, _STEP_WORKERS = 32 << 20, 2
_FLOAT32 = 4
# A search estimates thousands of layouts, and an estimate asks the same of a layer several times.
_CACHED = 1024


@dataclass(frozen=True)
class Estimate:
    """The memory of a layout.

    Attributes:
        parameters: of the model.
        parts: bytes of each of ``PARTS`` on the fullest device at its peak.
        moment: the one of the six moments that has the peak.
        stage: the pipeline rank of the device.
        weights: bytes of the weights on it.
        gradients: bytes of all gradients on it.
        states: bytes of the optimizer's states on it.
        host: bytes in the host's memory, per device.
    """

    parameters: int
    parts: dict[str, int]
    moment: str
    stage: int
    weights: int
    gradients: int
    states: int
    host: int

    @property
    def peak(self) -> int:
        """Bytes on the fullest device."""
        return sum(self.parts.values())

    @property
    def static(self) -> int:
        """Bytes of weights, gradients and states on it."""
        return self.weights + self.gradients + self.states


def estimate(model: TransformerConfig, layout: Layout, *, devices: int | None = None) -> Estimate:
    """Return the bytes of a step on the fullest device.

    Args:
        model: what is trained; ``preset`` has published ones.
        layout: how.
        devices: how many there are, if that is to be checked.

    Raises:
        ValueError: the layout does not fit the model or the devices.

    Example:
        >>> from fusedops.planner import Layout, estimate, preset
        >>> one = estimate(preset("gpt2"), Layout.of(precision="float32"))
        >>> one.moment, one.weights
        ('loss', 497759232)
    """
    check(model, layout, devices)
    return estimate_unchecked(model, layout)


def estimate_unchecked(model: TransformerConfig, layout: Layout) -> Estimate:
    """Return what ``estimate`` does of a layout that fits the model."""
    stages = [_Stage(model, layout, index) for index in _ranks_to_compare(model, layout)]
    peaks = [stage.peak() for stage in stages]
    fullest, (moment, parts) = max(
        zip(stages, peaks, strict=True), key=lambda stage: sum(stage[1][1].values())
    )
    return Estimate(
        parameters=model.parameters().total,
        parts={name: math.ceil(parts[name]) for name in PARTS},
        moment=moment,
        stage=fullest.index,
        weights=math.ceil(fullest.weights),
        gradients=math.ceil(fullest.gradients),
        states=math.ceil(fullest.states),
        host=max(math.ceil(stage.host) for stage in stages),
    )


def _ranks_to_compare(model: TransformerConfig, layout: Layout) -> Iterable[int]:
    """Return the pipeline ranks of which one is the fullest."""
    ranks = range(layout.parallel.pp)
    if model.sparse_layers not in (0, model.num_layers):
        return ranks
    # Of inner ranks with as many layers, the one with most micro-batches in flight.
    inner: dict[int, int] = {}
    for rank in ranks[1:-1]:
        count = len(layout.layers_of(model, rank))
        other = inner.setdefault(count, rank)
        if layout.in_flight[rank] > layout.in_flight[other]:
            inner[count] = rank
    return {0, *inner.values(), ranks[-1]}


def weights_of_rank(
    model: TransformerConfig, layout: Layout, rank: int, *, inside: bool = False
) -> Weights:
    """Return the parameters of a pipeline rank, of all its devices; ``inside``: of its layers."""
    stage = _Stage(model, layout, rank)
    return stage.inside if inside else stage.parameters


def _bytes(tensors: Iterable[SavedActivation], layout: Layout, *, recomputed: bool = True) -> float:
    """Return the bytes per token; without ``recomputed``, of what the backward needs saved."""
    omitted = frozenset() if recomputed else layout.recomputed
    return sum(
        tensor.bytes_per_token(layout) for tensor in tensors if tensor.recompute not in omitted
    )


@lru_cache(_CACHED)
def _layer_weights(model: TransformerConfig, index: int) -> tuple[Weights, Weights]:
    """Return the parameters of a layer, and those of its feed-forward part."""
    return model.layer(index), model.feed_forward(index)


def _layer_token_bytes(model: TransformerConfig, layout: Layout, index: int) -> tuple[float, float]:
    """Return a layer's saved bytes per token, and those of what the backward does not recompute."""
    config = layout.parallel
    sizes = config.tp, config.sp, config.ep
    return _token_bytes(model, layout.training, sizes, config.recompute, index)


@lru_cache(_CACHED)
def _token_bytes(
    model: TransformerConfig,
    training: TrainingShape,
    sizes: tuple[int, bool, int],
    recompute: str,
    index: int,
) -> tuple[float, float]:
    tp, sp, ep = sizes
    layout = Layout(ParallelConfig(tp=tp, sp=sp, dp=ep, ep=ep, recompute=recompute), training)
    tensors = saved_tensors.layer(model, layout, index)
    return _bytes(tensors, layout), _bytes(tensors, layout, recomputed=False)


def layer_bytes(model: TransformerConfig, layout: Layout, index: int) -> float:
    """Return the bytes that a layer keeps of a micro-batch on one device."""
    tokens = layout.tokens(model)
    if layout.recompute != "full":
        return _layer_token_bytes(model, layout, index)[1] * tokens
    config, hidden = layout.parallel, model.hidden_size * layout.bytes_of.stream
    saved = hidden / (config.tp if config.sp or config.recompute_slice_activation else 1)
    if not config.mp_comm_recompute and config.tp > 1:
        saved += hidden * _kept_results(model, layout, index)
    return saved * tokens


def _kept_results(model: TransformerConfig, layout: Layout, index: int) -> float:
    """Return the results of collectives that full recomputation keeps, in hidden states."""
    config = layout.parallel
    if not config.sp:
        return 2  # of attention, and of the feed-forward part or the tokens of experts
    if config.overlap and not config.overlap_microbatches:
        return 1  # the gathered input of attention; rings run again
    # All-gathers, and reduce-scatters, whose results are 1/tp. Experts have none.
    return (1 if model.is_sparse(index) else 2) * (1 + 1 / config.tp)


def _temporary_bytes(model: TransformerConfig, layout: Layout, index: int) -> float:
    """Return the peak bytes that the backward of a layer adds to what the layers saved."""
    tokens = layout.tokens(model)
    item, tp = layout.bytes_of.activations, layout.parallel.tp
    # The feed-forward layer's backward comes first.
    feed_forward = _widest(model, layout, index) * item / tp
    attention = 0.0
    if layout.training.kernels == "eager":  # gradients of the probabilities and of the scores
        attention = 2.0 * model.num_heads * layout.length(model) * item / tp
        attention -= model.intermediate_size * item / tp  # the other half has been freed
    stream = 2 * model.hidden_size * layout.bytes_of.stream / (tp if layout.parallel.sp else 1)
    temporary = (max(feed_forward, attention) + stream) * tokens
    recomputed = _layer_token_bytes(model, layout, index)[0] * tokens
    recomputed -= layer_bytes(model, layout, index)
    return temporary + max(0.0, recomputed)


def _widest(model: TransformerConfig, layout: Layout, index: int) -> float:
    """Return the peak of elements per token that a feed-forward layer's backward allocates."""
    f, fused = model.intermediate_size, layout.training.kernels == "fused"
    if not model.is_sparse(index):
        # One op: gradient of the pre-activation, and the recomputed hidden layer. Several ops: the
        # gradients of gate and up, or of both factors of gelu_new; one saved tensor is freed then.
        one_op = fused and not model.post_norm
        return f * (2 if one_op or model.gated or (model.activation == "gelu_new") else 1)
    k, products = model.top_k * layout.expert_imbalance, 2 if model.gated else 1
    if fused:  # the same, and a gradient of the input for each slot
        return k * (f * (products + 1) + model.hidden_size)
    return k * f * products * layout.bytes_of_experts / layout.bytes_of.activations


def _arriving_share(
    model: TransformerConfig, layout: Layout, index: int, accumulates: bool
) -> float:
    """Return the share of a feed-forward layer's weights whose new gradients exist at once.

    They are those of one operation: of both products, of gate and up, or of one product. With
    ``accumulates`` each is added to the earlier gradient and freed; else the new ones are kept.
    """
    products = 3 if model.gated else 2
    one_op = layout.training.kernels == "fused" and not model.post_norm
    if not accumulates:
        return 1.0 if one_op else 1 / products
    if model.is_sparse(index):
        return 1.0 if one_op else (products - 1) / products
    return (2 if one_op else 1) / products


def _converted_share(model: TransformerConfig, layout: Layout, index: int) -> float:
    """Return the share of a feed-forward layer whose autocast gradients are not converted yet.

    They have the size of autocast's weights, which are freed by then. Only those of the last
    product are kept until conversion; those of single experts are converted at once.
    """
    if layout.training.kernels == "fused":
        return 1 / 2
    if model.is_sparse(index):
        return 0.0
    return 1 / 3 if model.gated else 1 / 2


class _Stage:
    """The memory of one pipeline rank of a layout, on one of its devices."""

    def __init__(self, model: TransformerConfig, layout: Layout, index: int) -> None:
        self.model, self.layout, self.index = model, layout, index
        stages = layout.stages_of(index)
        runs, count = layout.runs(model), layout.parallel.recompute_layers
        self.layers = [layer for stage in stages for layer in runs[stage]]
        # Layers that recompute nothing: those after the first ones of each stage.
        plain = [layer for stage in stages for layer in runs[stage][count:]] if count else []
        self.plain = frozenset(plain)
        self.first, self.last = 0 in stages, layout.stages - 1 in stages
        config, sizes = layout.parallel, layout.bytes_of
        self.gradient_bytes = layout.gradient_bytes
        self.ranks = config.sizes.data
        self.kinds = model.kinds(self.layers)
        of_kinds = [_layer_weights(model, layer)[0] for layer in self.kinds]
        inside = sum(map(operator.mul, of_kinds, self.kinds.values()), Weights())
        self.inside = inside
        self.parameters = inside + self._outside()
        self.largest_layer = self._on_device(max(of_kinds, key=lambda weights: weights.total))
        self.vocabulary = model.vocab_size * model.hidden_size / config.tp
        self.has_vocabulary = self.first or self.last
        self.weights = self._on_device(self.parameters, shared=config.zero >= 3) * sizes.weights
        if config.param_dtype is not None and config.zero == 3 and self.ranks > 1:
            self.weights = 0.0  # the shards are the masters, which the states count
        gradients = self._on_device(self.parameters, shared=config.zero >= 2)
        self.gradients = gradients * self.gradient_bytes
        self.states = self._on_device(self.parameters, shared=config.zero >= 1) * sizes.states
        # Autocast's copies: of what products read, until the backward has used them.
        head = self.vocabulary if self.last else 0.0
        self.casts = (self._converted(inside) + head) * sizes.casts
        self.host = 0.0
        self.kept = self._saved()
        if "activations" in config.offload:
            layers = self._saved_by_layers()
            widest = max(layer_bytes(model, of_kind, layer) for layer, _, of_kind in self._kinds())
            self.kept -= max(0.0, layers - 2 * widest)  # one is in use, one in transit
            self.host += layers  # all are offloaded when the backward begins
        if "optimizer" in config.offload:
            self.host += self._host_of_optimizer()
            self.states = 0.0

    def peak(self) -> tuple[str, dict[str, float]]:
        """Return the moment of the peak, and the bytes of each part then."""
        return max(self._moments().items(), key=lambda item: sum(item[1].values()))

    def _moments(self) -> dict[str, dict[str, float]]:
        layout, model = self.layout, self.model
        sizes = layout.bytes_of
        # Gradients of earlier micro-batches exist, or the buckets that are reduced.
        in_buckets = layout.parallel.zero == 0 and self.ranks > 1
        accumulates = layout.parallel.microbatches > 1 or in_buckets
        tokens = layout.tokens(model)
        row = model.vocab_size / layout.parallel.tp
        last, first = self.layers[-1], self.layers[0]
        # Autograd adds a new gradient to the accumulated one: for a moment both exist.
        # With a tied head that of the head waits for the embedding's, the last one.
        head = self.vocabulary * self.gradient_bytes if self.last else 0.0
        words = self.vocabulary * self.gradient_bytes if self.first else 0.0
        waiting = head if model.tied and self.first else 0.0
        first_weights, first_feed_forward = _layer_weights(model, first)
        inside, feed_forward = self._on_device(first_weights), self._on_device(first_feed_forward)
        widest = self.gradient_bytes * max(
            self._on_device(_layer_weights(model, layer)[1])
            * _arriving_share(model, layout, layer, accumulates)
            for layer in self.kinds
        )
        # torch's linear layer gives a view as its weight's gradient: the sum is a third tensor. Not
        # where autocast converts it.
        summed = waiting * (1 if layout.training.kernels == "fused" or sizes.casts else 2)
        after = self.kept if layout.parallel.pp > 1 else 0.0  # of the other micro-batches
        if accumulates:
            before = self.gradients
            in_first = before + self._arriving(widest + waiting)
            at_end = before + self._arriving(words + summed)
        else:
            before = 0.0
            missing = (inside - feed_forward) * self.gradient_bytes + words - waiting
            in_first = self.gradients - self._arriving(missing)
            at_end = self.gradients + self._arriving(summed)
        in_last = before + self._arriving(widest + (waiting if accumulates else head))
        stream = 2 * model.hidden_size * sizes.stream * tokens
        converted = self._converted(first_weights)
        used = 1 - _converted_share(model, layout, first)
        waiting_casts = converted - self._converted(first_feed_forward) * used
        moments = {
            "layer": self._parts(
                in_last,
                self.kept + _temporary_bytes(model, self._layout_of(last), last),
                casts=self._casts(converted),
            ),
            "first": self._parts(
                in_first,
                max(after, layer_bytes(model, self._layout_of(first), first))
                + _temporary_bytes(model, self._layout_of(first), first),
                casts=waiting_casts * sizes.casts,
            ),
            "end": self._parts(at_end, after + stream),
            "step": self._parts(self.gradients, 0.0),
        }
        if self.last:
            casts = self._casts(self.vocabulary)
            moments["loss"] = self._parts(
                self.gradients if accumulates else 0.0, self.kept, self._loss() * tokens, casts
            )
            logits = 0.0 if layout.training.chunked_loss else row * sizes.activations * tokens
            moments["head"] = self._parts(before + self._arriving(head), self.kept, logits, casts)
        return moments

    def _parts(
        self, gradients: float, activations: float, logits: float = 0.0, casts: float = 0.0
    ) -> dict[str, float]:
        return {
            "weights": self.weights + casts,
            "gradients": gradients,
            "states": self.states,
            "activations": activations,
            "communication": self._communication(),
            "logits": logits,
        }

    def _casts(self, numbers: float) -> float:
        """Return the bytes of autocast's copies of weights before the backward has used any."""
        if self.layout.recompute != "full":
            return self.casts
        plain = sum((_layer_weights(self.model, layer)[0] for layer in self.plain), Weights())
        return (numbers + self._converted(plain)) * self.layout.bytes_of.casts

    def _outside(self) -> Weights:
        """Return the parameters that are not in layers; a tied head elsewhere has its own copy."""
        weights = Weights()
        if self.first:
            weights += self.model.embedding()
        if self.last:
            own = None if self.first else True
            weights += self.model.output(own_weight=own)
        return weights

    def _on_device(self, weights: Weights, *, shared: bool = False) -> float:
        """Return how many of the parameters a device has; ``shared``: divided over its replicas.

        Tensor parallelism replicates experts, so that their replicas are on ``dp * cp * tp / ep``
        ranks.
        """
        tp, ep = self.layout.parallel.tp, self.layout.parallel.ep
        dense = weights.split / tp + weights.replicated
        experts = weights.experts / ep
        if shared and self.ranks > 1:
            return dense / self.ranks + experts / (self.ranks * tp / ep)
        return dense + experts

    def _converted(self, weights: Weights) -> float:
        """Return how many of the parameters a device has that autocast converts."""
        converted = self._on_device(weights)
        if self.layout.training.kernels == "fused":
            return converted
        return converted - self._on_device(Weights(experts=weights.experts))

    def _saved(self) -> float:
        model, layout = self.model, self.layout
        outside = saved_tensors.before(model, layout) if self.first else []
        outside = [*outside, *(saved_tensors.after(model, layout) if self.last else [])]
        kept = _bytes(outside, layout) * layout.tokens(model)
        return self._saved_by_layers() + kept * layout.in_flight[self.index]

    def _saved_by_layers(self) -> float:
        saved = sum(
            layer_bytes(self.model, layout, layer) * n for layer, n, layout in self._kinds()
        )
        return saved * self.layout.in_flight[self.index]

    def _layout_of(self, layer: int) -> Layout:
        """Return the layout of a layer, which has no recomputation where that layer has none."""
        return self.layout.without_recomputation if layer in self.plain else self.layout

    def _kinds(self) -> Iterator[tuple[int, int, Layout]]:
        """Yield a layer of each kind, how many are alike, and their layout."""
        if not self.plain:
            yield from ((layer, count, self.layout) for layer, count in self.kinds.items())
            return
        for plain in (False, True):
            layers = [layer for layer in self.layers if (layer in self.plain) == plain]
            for layer, count in self.model.kinds(layers).items():
                yield layer, count, self._layout_of(layer)

    def _host_of_optimizer(self) -> float:
        layout, sizes = self.layout, self.layout.bytes_of
        share = self._on_device(self.parameters, shared=layout.parallel.zero >= 1)
        states = _FLOAT32 + sizes.moments
        # The parameter on its way back; without overlap the gradient uses the buffer before.
        if not layout.training.optimizer_overlap:
            return share * (states + sizes.weights)
        widest = self.vocabulary * self.has_vocabulary
        copies = self.ranks if layout.parallel.zero >= 1 else 1
        bucket = max(widest / copies, min(share, _STEP_BUCKET / sizes.weights))
        return share * (2 * states + sizes.weights) + _STEP_WORKERS * bucket * _FLOAT32

    def _loss(self) -> float:
        """Return the bytes per token of the logits and what is computed of them, at the peak."""
        model, layout = self.model, self.layout
        row, item = model.vocab_size / layout.parallel.tp, layout.bytes_of.activations
        if layout.training.chunked_loss:
            if layout.tokens(model) * _FLOAT32 <= model.hidden_size * item:
                return row * _FLOAT32  # so few tokens that the logits are kept
            wide = model.hidden_size * _FLOAT32 if item < _FLOAT32 else 0
            return min(_CHUNK, row) * _FLOAT32 + wide
        if layout.training.kernels == "fused":
            return 2 * row * item  # the logits and their gradient
        # The log-softmax, its gradient, and that of the logits; BERT's is not made in float32.
        return 3 * row * (layout.bytes_of.stream if model.head == "masked" else _FLOAT32)

    def _arriving(self, gradients: float) -> float:
        """Return gradients that were just made, unless they leave for other ranks."""
        return 0.0 if self.layout.parallel.zero >= 2 and self.ranks > 1 else gradients

    def _communication(self) -> float:
        model, layout, config = self.model, self.layout, self.layout.parallel
        item = layout.bytes_of.activations
        tokens = layout.tokens(model)
        stream = tokens * model.hidden_size * item
        buffers = 0.0
        if config.tp > 1:
            buffers += stream * (2 if config.sp else 1)
        if config.pp > 1:
            buffers += 2 * stream / (config.tp if config.sp else 1)
        if config.cp > 1:
            buffers += 4 * tokens * model.key_width * item / config.tp
        if config.ep > 1:
            buffers += 2 * model.top_k * layout.expert_imbalance * stream / config.tp
        if self.ranks > 1:
            buffers += self._data_parallel_buffers()
        return buffers

    def _data_parallel_buffers(self) -> float:
        config, sizes = self.layout.parallel, self.layout.bytes_of
        vocabulary = self.vocabulary * self.has_vocabulary
        if config.zero == 0 and self.gradient_bytes >= _FLOAT32:
            return 0.0  # gradients are reduced in place
        if config.zero == 0 and config.param_dtype is not None:  # in buckets of float32
            return self._on_device(self.parameters) * _FLOAT32
        if config.zero < 2:
            return min(config.bucket_bytes, self._on_device(self.parameters) * self.gradient_bytes)
        # Gradients of what is being reduced.
        buffers = max(self.largest_layer, vocabulary) * self.layout.reduce_bytes
        if config.zero < 3:
            return buffers
        weights = self._on_device(self.parameters) * sizes.weights
        if not config.parallel_optimizer_comm_recompute:
            return buffers + weights
        if config.pp > 1 and SCHEDULES[config.pipeline_schedule].splits:
            return buffers + weights / config.virtual  # of a stage, for each part of a backward
        # The weights of the layer that runs and of the next one, and those outside of layers.
        return buffers + (2 * self.largest_layer + vocabulary) * sizes.weights
