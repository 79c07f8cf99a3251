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
class Saved:
    """A tensor that is kept from the forward to the backward.

    Attributes:
        name: what it is.
        numbers: per token.
        itemsize: bytes of each.
        split: ``"tp"``: divided by tensor parallelism; ``"sp"``: only with sequence parallelism;
            ``""``: each rank has all.
        remade: the word of ``Layout.recompute`` that makes it again instead.
    """

    name: str
    numbers: float
    itemsize: int
    split: str = ""
    remade: str = ""

    def bytes_per_token(self, layout: Layout) -> float:
        """Return the bytes per token on one device."""
        shared = self.split == "tp" or (self.split == "sp" and layout.sp)
        return self.numbers * self.itemsize / (layout.tp if shared else 1)


def layer(model: TransformerConfig, layout: Layout, index: int) -> list[Saved]:
    """Return what a layer keeps, its input included (it is the first norm's, or the products')."""
    found = [*_norm(model, layout, "norm 1"), *_attention(model, layout)]
    found += _norm(model, layout, "norm 2")
    found += _cast_again(model, layout)
    if model.has_cross_attention(index):
        found += [*_attention(model, layout), *_norm(model, layout, "norm 3")]
    sparse = model.is_sparse(index)
    found += _experts(model, layout) if sparse else _feed_forward(model, layout)
    if layout.dropout and layout.kernels != "fused":
        found += [Saved("dropout masks", 2 * model.hidden_size, 1, "sp")]
    return found


def _cast_again(model: TransformerConfig, layout: Layout) -> Iterator[Saved]:
    """Yield autocast's copies of one input for each of several products (it knows weights only)."""
    if not layout.bytes_of.casts:
        return
    h, item = model.hidden_size, layout.bytes_of.activations
    if model.activation != "gelu_new":  # GPT-2 has one product for query, key and value
        yield Saved("inputs of key and value", 2 * h, item, "sp", "norm")
    if model.gated and layout.kernels != "fused":
        yield Saved("input of up", h, item, "sp", "norm")


def before(model: TransformerConfig, layout: Layout) -> list[Saved]:
    """Return what the embedding keeps."""
    item = layout.bytes_of.stream
    found = [Saved("token ids", 1, 8)]
    if model.post_norm:
        found += _norm(model, layout, "embedding norm")
    if layout.dropout:
        found.append(Saved("dropout mask", model.hidden_size, 1, "sp"))
    if model.rotary:
        # One table of cosines and one of sines for all layers and sequences.
        found.append(Saved("rotary tables", 2 * model.size_of_head / layout.micro_batch, item))
    return found


def after(model: TransformerConfig, layout: Layout) -> list[Saved]:
    """Return what is kept between the last layer and the logits."""
    item, h = layout.bytes_of.activations, model.hidden_size
    found = [] if model.post_norm else list(_norm(model, layout, "last norm"))
    if model.head == "masked":
        found += [Saved("pre-activation", h, item, "sp"), *_norm(model, layout, "head norm")]
    return [*found, Saved("labels", 1, 8)]


def _norm(model: TransformerConfig, layout: Layout, name: str) -> Iterator[Saved]:
    h = model.hidden_size
    if model.norm == "layer":
        yield Saved(f"{name} input", h, layout.bytes_of.stream, "sp")
        yield Saved(f"{name} mean, rstd", 2, _FLOAT32, "sp")
        yield Saved(f"{name} output", h, layout.bytes_of.activations, "sp", "norm")
        return
    yield from _rms_norm(layout, name, h, "sp", layout.bytes_of.stream)
    yield Saved(f"{name} output", h, layout.bytes_of.activations, "sp", "norm")


def _rms_norm(
    layout: Layout, name: str, width: int, split: str, item: int, rows: int = 1
) -> Iterator[Saved]:
    if layout.kernels == "fused":
        yield Saved(f"{name} input", width, item, split)
    else:
        # The square keeps a float32 copy of the input, the scaling what it scales.
        yield Saved(f"{name} input", width, _FLOAT32, split)
        yield Saved(f"{name} normalised", width, item, split, "norm")
    yield Saved(f"{name} rstd", rows, _FLOAT32, split)


def _attention(model: TransformerConfig, layout: Layout) -> Iterator[Saved]:
    item, heads = layout.bytes_of.activations, model.num_heads
    query, key = model.query_width, model.key_width
    if model.qk_norm:
        yield from _rms_norm(layout, "query norm", query, "tp", item, heads)
        yield from _rms_norm(layout, "key norm", key, "tp", item, model.kv_heads)
    # With more ranks than heads of keys, ranks have copies.
    keys = key * max(1, layout.tp // model.kv_heads)
    yield Saved("query", query, item, "tp")
    yield Saved("key, value", 2 * keys, item, "tp")
    if layout.kernels == "eager":
        scores = heads * layout.length(model)
        yield Saved("softmax", scores, item, "tp", "scores")
        if layout.dropout:
            yield Saved("dropped softmax", scores, item, "tp", "scores")
            yield Saved("softmax's mask", scores, 1, "tp", "scores")
    else:
        yield Saved("log-sum-exp", heads, _FLOAT32, "tp")
    yield Saved("attention output", query, item, "tp")
    if layout.kernels == "fused" and item < _FLOAT32:
        yield Saved("attention remainder", query, item, "tp")
    elif layout.kernels == "fused":
        yield Saved("row maximum and sum", 2 * heads, _FLOAT32, "tp")


def _feed_forward(model: TransformerConfig, layout: Layout) -> Iterator[Saved]:
    item, f = layout.bytes_of.activations, model.intermediate_size
    fused = layout.kernels == "fused"
    if model.gated:
        yield Saved("gate, up", 2 * f, item, "tp")
        if not fused:
            yield Saved("activated gate", f, item, "tp", "activation")
        yield Saved("hidden layer", f, item, "tp", "activation")
        return
    yield Saved("pre-activation", f, item, "tp")
    if model.activation == "gelu_new" and not fused:
        # 0.5 x, tanh(...) and 1 + tanh(...)
        yield Saved("gelu_new's operands", 3 * f, item, "tp", "activation")
    # Where the two products are one op, it makes the hidden layer again; BERT's are two modules.
    if not fused or model.post_norm:
        yield Saved("hidden layer", f, item, "tp", "activation")


def _experts(model: TransformerConfig, layout: Layout) -> Iterator[Saved]:
    # With tensor parallelism each rank routes and computes its share of the tokens.
    item, k, h = layout.bytes_of.activations, model.top_k, model.hidden_size
    f = k * model.intermediate_size
    products = 2 if model.gated else 1
    if model.shared_size:
        yield from _feed_forward(replace(model, intermediate_size=model.shared_size), layout)
    if layout.kernels == "fused":
        yield Saved(
            "router logits", model.num_experts if model.router == "learned" else 0, item, "tp"
        )
        # Weight, index, place and position of each slot.
        yield Saved("routing plan", 4 * k, 4, "tp")
        yield Saved("experts' pre-activation", products * f, item, "tp")
        if layout.ep > 1:
            yield Saved("rows of other ranks' tokens", k * h, item, "tp")
        return
    item = layout.bytes_of_experts
    yield Saved("router softmax", model.num_experts, _FLOAT32, "tp")
    yield Saved("routing indices", 3 * k, 8, "tp")
    yield Saved("routing weights", 3 * k, _FLOAT32, "tp")
    yield Saved("rows by expert", k * h, item, "tp", "norm")
    yield Saved("experts' pre-activation", products * f, item, "tp")
    if model.gated:
        yield Saved("experts' activated gate", f, item, "tp", "activation")
    yield Saved("experts' hidden layer", f, item, "tp", "activation")
    yield Saved("experts' output", k * h, item, "tp")
