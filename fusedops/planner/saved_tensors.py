"""What a layer keeps for its backward, tensor by tensor: the base of every activation estimate.

Each list follows the forward of what it describes, and holds each tensor that autograd saves once,
whoever else reads it: the input of a norm, the input of a product, the pre-activation of an
activation. A norm's output is listed with the norm, so products list nothing but their results.
``tests/planner`` compares the sums with what is really saved, byte by byte.

* ``fused``: the ops of this package, as patched models call them (``saves=`` in ``fusedops/ops``).
* ``stock``: transformers' modules in eager torch. Root-mean-square norms are five operations, of
  which two keep; a sum of products of ``gelu_new`` keeps five tensors where one would do.
* ``eager``: as ``stock``, and the attention keeps its scores instead of one number per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusedops.models.config import TransformerConfig
from fusedops.planner.layout import Layout

_FLOAT32 = 4


@dataclass(frozen=True)
class SavedActivation:
    """A tensor that is saved from the forward to the backward."""

    name: str  # what it is
    numbers: float  # per token
    itemsize: int  # bytes of each
    # ``"tp"``: divided by tensor parallelism; ``"sp"``: only with sequence parallelism; ``""``:
    # each rank has all
    split: str = ""
    recompute: str = ""  # the word of ``Layout.recompute`` that recomputes it instead

    def bytes_per_token(self, layout: Layout) -> float:
        """Return the bytes per token on one device."""
        shared = self.split == "tp" or (self.split == "sp" and layout.parallel.sp)
        return self.numbers * self.itemsize / (layout.parallel.tp if shared else 1)


def layer(model: TransformerConfig, layout: Layout, index: int) -> list[SavedActivation]:
    """Return what a layer keeps, its input included (it is the first norm's, or the products')."""
    saved = [*_norm(model, layout, "norm 1"), *_attention(model, layout)]
    saved += _norm(model, layout, "norm 2")
    saved += _cast_again(model, layout)
    sparse = model.is_sparse(index)
    saved += _experts(model, layout) if sparse else _feed_forward(model, layout)
    if layout.training.dropout and layout.training.kernels != "fused":
        saved += [SavedActivation("dropout masks", 2 * model.hidden_size, 1, "sp")]
    return saved


def _cast_again(model: TransformerConfig, layout: Layout) -> Iterator[SavedActivation]:
    """Yield autocast's copies of one input for each of several products (it knows weights only)."""
    if not layout.bytes_of.casts:
        return
    h, item = model.hidden_size, layout.bytes_of.activations
    if model.activation != "gelu_new":  # GPT-2 has one product for query, key and value
        yield SavedActivation("inputs of key and value", 2 * h, item, "sp", "norm")
    if model.gated and layout.training.kernels != "fused":
        yield SavedActivation("input of up", h, item, "sp", "norm")


def before(model: TransformerConfig, layout: Layout) -> list[SavedActivation]:
    """Return what the embedding keeps."""
    item = layout.bytes_of.stream
    saved = [SavedActivation("token ids", 1, 8)]
    if model.post_norm:
        saved += _norm(model, layout, "embedding norm")
    if layout.training.dropout:
        saved.append(SavedActivation("dropout mask", model.hidden_size, 1, "sp"))
    if model.rotary:
        # One table of cosines and one of sines for all layers and sequences.
        numbers = 2 * model.size_of_head / layout.training.micro_batch
        saved.append(SavedActivation("rotary tables", numbers, item))
    return saved


def after(model: TransformerConfig, layout: Layout) -> list[SavedActivation]:
    """Return what is kept between the last layer and the logits."""
    item, h = layout.bytes_of.activations, model.hidden_size
    saved = [] if model.post_norm else list(_norm(model, layout, "last norm"))
    if model.head == "masked":
        saved.append(SavedActivation("pre-activation", h, item, "sp"))
        saved += _norm(model, layout, "head norm")
    return [*saved, SavedActivation("labels", 1, 8)]


def _norm(model: TransformerConfig, layout: Layout, name: str) -> Iterator[SavedActivation]:
    h = model.hidden_size
    if model.norm == "layer":
        yield SavedActivation(f"{name} input", h, layout.bytes_of.stream, "sp")
        yield SavedActivation(f"{name} mean, rstd", 2, _FLOAT32, "sp")
    else:
        yield from _rms_norm(layout, name, h, "sp", layout.bytes_of.stream)
    yield SavedActivation(f"{name} output", h, layout.bytes_of.activations, "sp", "norm")


def _rms_norm(
    layout: Layout, name: str, width: int, split: str, item: int, rows: int = 1
) -> Iterator[SavedActivation]:
    if layout.training.kernels == "fused":
        yield SavedActivation(f"{name} input", width, item, split)
    else:
        # The square keeps a float32 copy of the input, the scaling what it scales.
        yield SavedActivation(f"{name} input", width, _FLOAT32, split)
        yield SavedActivation(f"{name} normalised", width, item, split, "norm")
    yield SavedActivation(f"{name} rstd", rows, _FLOAT32, split)


def _attention(model: TransformerConfig, layout: Layout) -> Iterator[SavedActivation]:
    item, heads = layout.bytes_of.activations, model.num_heads
    query, key = model.query_width, model.key_width
    if model.qk_norm:
        yield from _rms_norm(layout, "query norm", query, "tp", item, heads)
        yield from _rms_norm(layout, "key norm", key, "tp", item, model.kv_heads)
    # With more ranks than heads of keys, ranks have copies.
    keys = key * max(1, layout.parallel.tp // model.kv_heads)
    yield SavedActivation("query", query, item, "tp")
    yield SavedActivation("key, value", 2 * keys, item, "tp")
    if layout.training.kernels == "eager":
        scores = heads * layout.length(model)
        yield SavedActivation("softmax", scores, item, "tp", "scores")
        if layout.training.dropout:
            yield SavedActivation("dropped softmax", scores, item, "tp", "scores")
            yield SavedActivation("softmax's mask", scores, 1, "tp", "scores")
    else:
        yield SavedActivation("log-sum-exp", heads, _FLOAT32, "tp")
    yield SavedActivation("attention output", query, item, "tp")
    if layout.training.kernels == "fused" and item < _FLOAT32:
        yield SavedActivation("attention remainder", query, item, "tp")
    elif layout.training.kernels == "fused":
        yield SavedActivation("row maximum and sum", 2 * heads, _FLOAT32, "tp")


def _feed_forward(model: TransformerConfig, layout: Layout) -> Iterator[SavedActivation]:
    item, f = layout.bytes_of.activations, model.intermediate_size
    fused = layout.training.kernels == "fused"
    if model.gated:
        yield SavedActivation("gate, up", 2 * f, item, "tp")
        if not fused:
            yield SavedActivation("activated gate", f, item, "tp", "activation")
        yield SavedActivation("hidden layer", f, item, "tp", "activation")
        return
    yield SavedActivation("pre-activation", f, item, "tp")
    if model.activation == "gelu_new" and not fused:
        # 0.5 x, tanh(...) and 1 + tanh(...)
        yield SavedActivation("gelu_new's operands", 3 * f, item, "tp", "activation")
    # Where the two products are one op, it makes the hidden layer again; BERT's are two modules.
    if not fused or model.post_norm:
        yield SavedActivation("hidden layer", f, item, "tp", "activation")


def _experts(model: TransformerConfig, layout: Layout) -> Iterator[SavedActivation]:
    # With tensor parallelism each rank routes and computes its share of the tokens.
    item, h = layout.bytes_of.activations, model.hidden_size
    k = model.top_k * layout.expert_imbalance
    f = k * model.intermediate_size
    products = 2 if model.gated else 1
    if model.shared_size:
        yield from _feed_forward(replace(model, intermediate_size=model.shared_size), layout)
    if layout.training.kernels == "fused":
        logits = model.num_experts if model.router == "learned" else 0
        yield SavedActivation("router logits", logits, item, "tp")
        # Weight, index, place and position of each slot.
        yield SavedActivation("routing plan", 4 * k, 4, "tp")
        yield SavedActivation("experts' pre-activation", products * f, item, "tp")
        if layout.parallel.ep > 1:
            yield SavedActivation("rows of other ranks' tokens", k * h, item, "tp")
        return
    item = layout.bytes_of_experts
    yield SavedActivation("router softmax", model.num_experts, _FLOAT32, "tp")
    yield SavedActivation("routing indices", 3 * k, 8, "tp")
    yield SavedActivation("routing weights", 3 * k, _FLOAT32, "tp")
    yield SavedActivation("rows by expert", k * h, item, "tp", "norm")
    yield SavedActivation("experts' pre-activation", products * f, item, "tp")
    if model.gated:
        yield SavedActivation("experts' activated gate", f, item, "tp", "activation")
    yield SavedActivation("experts' hidden layer", f, item, "tp", "activation")
    yield SavedActivation("experts' output", k * h, item, "tp")
