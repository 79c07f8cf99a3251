"""Where Hugging Face's families keep each parameter: tables of names, one function a family.

A row says which of our parameters are made of which of theirs, and how, both ways. Names of a layer
begin in the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusedops.models.config import TransformerConfig

Tensors = list[torch.Tensor]


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Row:
    """Parameters that correspond."""

    ours: tuple[str, ...]  # names in ``Transformer``
    theirs: tuple[str, ...]  # names in a checkpoint
    read: Callable[[Tensors], Tensors] = _same  # theirs to ours
    write: Callable[[Tensors], Tensors] = _same  # ours to theirs
    # Name of the one parameter, in our layout, that a loaded transformers model has for all of
    # theirs; ``None``: its parameters are named and divided as in checkpoints
    loaded: str | None = None
    # A second name of the one tensor: read instead where a checkpoint has it, and written as well
    twin: str | None = None


@dataclass(frozen=True)
class Family:
    """A family's table."""

    rows: Callable[[TransformerConfig], Iterator[Row]]  # of a configuration
    base: str  # the prefix that checkpoints of the model without its head leave out
    unused: tuple[str, ...] = ()  # ends of names that hold nothing that is computed with here


def _pair(ours: str, theirs: str, *kinds: str) -> Iterator[Row]:
    for kind in kinds or ("weight", "bias"):
        yield Row((f"{ours}.{kind}",), (f"{theirs}.{kind}",))


def _transposed(tensors: Tensors) -> Tensors:
    return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]


def _split(tensors: Tensors) -> Tensors:
    """Return query, key and value of GPT-2's one layer, whose weight lies [in, out]."""
    return _transposed(list(tensors[0].chunk(3, -1)))


def _joined(tensors: Tensors) -> Tensors:
    return [torch.cat(_transposed(tensors), -1)]


def _gpt2(config: TransformerConfig) -> Iterator[Row]:
    yield from _pair("embedding.tokens", "transformer.wte", "weight")
    yield from _pair("embedding.positions", "transformer.wpe", "weight")
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"transformer.h.{index}"
        attention = f"{ours}.attention"
        yield from _pair(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _pair(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
        for kind, number in (("weight", "w"), ("bias", "b")):
            three = tuple(f"{attention}.{name}.{kind}" for name in ("query", "key", "value"))
            yield Row(three, (f"{theirs}.attn.c_attn.{kind}",), _split, _joined)
            for one, other in (
                (f"{attention}.output.{kind}", "attn.c_proj"),
                (f"{ours}.feed_forward.{number}1", "mlp.c_fc"),
                (f"{ours}.feed_forward.{number}2", "mlp.c_proj"),
            ):
                yield Row((one,), (f"{theirs}.{other}.{kind}",), _transposed, _transposed)
    yield from _pair("norm", "transformer.ln_f")
    if not config.tied:
        yield from _pair("head", "lm_head", "weight")


def _bert(config: TransformerConfig) -> Iterator[Row]:
    for one, other in (
        ("tokens", "word_embeddings"),
        ("positions", "position_embeddings"),
        ("token_types", "token_type_embeddings"),
    ):
        yield from _pair(f"embedding.{one}", f"bert.embeddings.{other}", "weight")
    yield from _pair("embedding.norm", "bert.embeddings.LayerNorm")
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            yield from _pair(f"{ours}.attention.{name}", f"{theirs}.attention.self.{name}")
        yield from _pair(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        yield from _pair(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        for kind, number in (("weight", "w"), ("bias", "b")):
            inner = f"{theirs}.intermediate.dense.{kind}"
            yield Row((f"{ours}.feed_forward.{number}1",), (inner,))
            yield Row((f"{ours}.feed_forward.{number}2",), (f"{theirs}.output.dense.{kind}",))
        yield from _pair(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm")
    yield from _pair("head.transform", "cls.predictions.transform.dense")
    yield from _pair("head.norm", "cls.predictions.transform.LayerNorm")
    # The bias is tied with the words. Untied, transformers 5 computes with the decoder's own, and
    # transformers 4 saved the shared one under the first name alone.
    twin = None if config.tied else "cls.predictions.decoder.bias"
    yield Row(("head.bias",), ("cls.predictions.bias",), twin=twin)
    if not config.tied:
        yield from _pair("head", "cls.predictions.decoder", "weight")


def _llama(config: TransformerConfig) -> Iterator[Row]:
    yield from _pair("embedding.tokens", "model.embed_tokens", "weight")
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        yield from _pair(f"{ours}.attention_norm", f"{theirs}.input_layernorm", "weight")
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        if config.qk_norm:
            names |= {"query_norm": "q_norm", "key_norm": "k_norm"}
        for one, other in names.items():
            yield from _pair(f"{ours}.attention.{one}", f"{theirs}.self_attn.{other}", "weight")
        yield from _pair(
            f"{ours}.feed_forward_norm", f"{theirs}.post_attention_layernorm", "weight"
        )
        ours = f"{ours}.feed_forward"
        if config.is_sparse(index):
            yield from _experts(ours, theirs, config)
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from _pair(f"{ours}.{name}", f"{theirs}.mlp.{name}", "weight")
    yield from _pair("norm", "model.norm", "weight")
    if not config.tied:
        yield from _pair("head", "lm_head", "weight")


def _experts(ours: str, theirs: str, config: TransformerConfig) -> Iterator[Row]:
    """Yield router and experts; a checkpoint has three matrices for each, two families' names."""
    module = f"{theirs}.mlp"
    part, gate, up, down = (
        ("mlp", "gate_proj", "up_proj", "down_proj")
        if config.qk_norm
        else ("block_sparse_moe", "w1", "w3", "w2")
    )
    theirs = f"{theirs}.{part}"
    yield Row((f"{ours}.gate.weight",), (f"{theirs}.gate.weight",), loaded=f"{module}.gate.weight")
    experts = [f"{theirs}.experts.{index}" for index in range(config.num_experts)]
    yield Row(
        (f"{ours}.experts.gate_up_proj",),
        tuple(f"{expert}.{name}.weight" for expert in experts for name in (gate, up)),
        lambda tensors: [torch.cat(tensors).unflatten(0, (len(experts), -1))],
        lambda tensors: list(tensors[0].flatten(0, 1).chunk(2 * len(experts))),
        loaded=f"{module}.experts.gate_up_proj",
    )
    yield Row(
        (f"{ours}.experts.down_proj",),
        tuple(f"{expert}.{down}.weight" for expert in experts),
        lambda tensors: [torch.stack(tensors)],
        lambda tensors: list(tensors[0].unbind()),
        loaded=f"{module}.experts.down_proj",
    )


_ROTATIONS = ("rotary_emb.inv_freq",)
FAMILIES = {
    "gpt2": Family(_gpt2, "transformer.", (".attn.bias", ".attn.masked_bias")),
    "bert": Family(
        _bert,
        "bert.",
        (
            "embeddings.position_ids",
            "pooler.dense.weight",
            "pooler.dense.bias",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
            # Of the bias that has two names, the one that is not computed with.
            "cls.predictions.bias",
            "cls.predictions.decoder.bias",
        ),
    ),
    **dict.fromkeys(
        ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe"),
        Family(_llama, "model.", _ROTATIONS),
    ),
}
# What a tied head is called where a checkpoint has it all the same.
TIED_HEADS = ("lm_head.weight", "cls.predictions.decoder.weight")
# Names of one tensor where the head is tied.
TIED = (
    ("transformer.wte.weight", "lm_head.weight"),
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
