"""What differs between Hugging Face's families: tables of entries and of names of parameters.

A family is one table for its configurations and one for its checkpoints. The code that reads and
writes both is in ``configs.py`` and ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops.models.config import TransformerConfig

# By our field: the name of an entry that is required, or of another, with its default.
Entries = dict[str, str | tuple[str, Any]]
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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of transformers."""

    architecture: str  # the class of its models with a head
    entries: Entries  # fields that are entries of a configuration
    shared: dict[str, Any]  # fields with the same value in all models of the family
    # Entries of which ``Transformer`` computes one value, with that value
    computed: dict[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0  # where a configuration has none
    rows: Callable[[TransformerConfig], Iterator[Row]]  # the parameters of a configuration
    base: str  # the prefix that checkpoints of the model without its head leave out
    unused: tuple[str, ...] = ()  # ends of names that hold nothing that is computed with here


def _pairs(ours: str, theirs: str, names: Mapping[str, str], *kinds: str) -> Iterator[Row]:
    """Yield rows of modules that correspond: our name in a part of the model, and theirs."""
    for one, other in names.items():
        for kind in kinds or ("weight", "bias"):
            yield Row((f"{ours}{one}.{kind}",), (f"{theirs}{other}.{kind}",))


def _transposed(tensors: Tensors) -> Tensors:
    return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]


def _split(tensors: Tensors) -> Tensors:
    """Return query, key and value of GPT-2's one layer, whose weight lies [in, out]."""
    return _transposed(list(tensors[0].chunk(3, -1)))


def _joined(tensors: Tensors) -> Tensors:
    return [torch.cat(_transposed(tensors), -1)]


def _gpt2(config: TransformerConfig) -> Iterator[Row]:
    tables = {"embedding.tokens": "wte", "embedding.positions": "wpe"}
    yield from _pairs("", "transformer.", tables, "weight")
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"transformer.h.{index}."
        yield from _pairs(ours, theirs, {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"})
        for kind, letter in (("weight", "w"), ("bias", "b")):
            three = tuple(f"{ours}attention.{name}.{kind}" for name in ("query", "key", "value"))
            yield Row(three, (f"{theirs}attn.c_attn.{kind}",), _split, _joined)
            for one, other in (
                (f"attention.output.{kind}", "attn.c_proj"),
                (f"feed_forward.{letter}1", "mlp.c_fc"),
                (f"feed_forward.{letter}2", "mlp.c_proj"),
            ):
                names = (f"{ours}{one}",), (f"{theirs}{other}.{kind}",)
                yield Row(*names, _transposed, _transposed)
    yield from _pairs("", "transformer.", {"norm": "ln_f"})
    if not config.tied:
        yield from _pairs("", "", {"head": "lm_head"}, "weight")


_BERT_TABLES = {
    "tokens": "word_embeddings",
    "positions": "position_embeddings",
    "token_types": "token_type_embeddings",
}
_BERT_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward_norm": "output.LayerNorm",
}
_BERT_HEAD = {"transform": "transform.dense", "norm": "transform.LayerNorm"}


def _bert(config: TransformerConfig) -> Iterator[Row]:
    yield from _pairs("embedding.", "bert.embeddings.", _BERT_TABLES, "weight")
    yield from _pairs("embedding.", "bert.embeddings.", {"norm": "LayerNorm"})
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"bert.encoder.layer.{index}."
        yield from _pairs(ours, theirs, _BERT_LAYER)
        for kind, letter in (("weight", "w"), ("bias", "b")):
            for number, module in (("1", "intermediate.dense"), ("2", "output.dense")):
                name = f"{ours}feed_forward.{letter}{number}"
                yield Row((name,), (f"{theirs}{module}.{kind}",))
    yield from _pairs("head.", "cls.predictions.", _BERT_HEAD)
    # The bias is tied with the words. Untied, transformers 5 computes with the decoder's own, and
    # transformers 4 saved the shared one under the first name alone.
    twin = None if config.tied else "cls.predictions.decoder.bias"
    yield Row(("head.bias",), ("cls.predictions.bias",), twin=twin)
    if not config.tied:
        yield from _pairs("", "cls.predictions.", {"head": "decoder"}, "weight")


_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
}
_QK_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_GATED_MLP = {
    f"feed_forward.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
}


def _llama(config: TransformerConfig) -> Iterator[Row]:
    yield from _pairs("", "model.", {"embedding.tokens": "embed_tokens"}, "weight")
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        is_sparse = config.is_sparse(index)
        names = _LLAMA_LAYER | (_QK_NORMS if config.qk_norm else {})
        yield from _pairs(ours, theirs, names if is_sparse else names | _GATED_MLP, "weight")
        if is_sparse:
            yield from _experts(f"{ours}feed_forward.", theirs, config)
    yield from _pairs("", "model.", {"norm": "norm"}, "weight")
    if not config.tied:
        yield from _pairs("", "", {"head": "lm_head"}, "weight")


def _experts(ours: str, theirs: str, config: TransformerConfig) -> Iterator[Row]:
    """Yield router and experts; a checkpoint has three matrices for each, two families' names."""
    part, gate, up, down = (
        ("mlp", "gate_proj", "up_proj", "down_proj")
        if config.qk_norm
        else ("block_sparse_moe", "w1", "w3", "w2")
    )
    router, count = f"{theirs}mlp.gate.weight", config.num_experts
    yield Row((f"{ours}gate.weight",), (f"{theirs}{part}.gate.weight",), loaded=router)
    experts = [f"{theirs}{part}.experts.{index}" for index in range(count)]
    yield Row(
        (f"{ours}experts.gate_up_proj",),
        tuple(f"{expert}.{name}.weight" for expert in experts for name in (gate, up)),
        lambda tensors: [torch.cat(tensors).unflatten(0, (count, -1))],
        lambda tensors: list(tensors[0].flatten(0, 1).chunk(2 * count)),
        loaded=f"{theirs}mlp.experts.gate_up_proj",
    )
    yield Row(
        (f"{ours}experts.down_proj",),
        tuple(f"{expert}.{down}.weight" for expert in experts),
        lambda tensors: [torch.stack(tensors)],
        lambda tensors: list(tensors[0].unbind()),
        loaded=f"{theirs}mlp.experts.down_proj",
    )


_GPT2_ENTRIES: Entries = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "seq_len": "n_positions",
    "intermediate_size": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
    "tied": ("tie_word_embeddings", True),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}
_COMMON_ENTRIES: Entries = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "seq_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "initializer_range": ("initializer_range", 0.02),
}
_BERT_ENTRIES = _COMMON_ENTRIES | {
    "token_types": ("type_vocab_size", 2),
    "activation": ("hidden_act", "gelu"),
    "tied": ("tie_word_embeddings", True),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "pad_token_id": ("pad_token_id", 0),
}
_LLAMA_ENTRIES = _COMMON_ENTRIES | {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "activation": ("hidden_act", "silu"),
    "tied": ("tie_word_embeddings", False),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "pad_token_id": ("pad_token_id", None),
}
_MIXTRAL_ENTRIES: Entries = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "num_kv_heads": ("num_key_value_heads", 8),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "sliding_window": ("sliding_window", None),
    "balance_loss": ("router_aux_loss_coef", 0.001),
}
_QWEN3_MOE_ENTRIES: Entries = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "num_kv_heads": ("num_key_value_heads", 4),
    "balance_loss": ("router_aux_loss_coef", 0.001),
    "router_normalize": ("norm_topk_prob", False),
}


def _like_llama(
    architecture: str,
    entries: Entries | None = None,
    *,
    qk_norm: bool = False,
    rope_theta: float = 10000.0,
    **computed: Any,
) -> Family:
    """Return a family whose models are those of Llama but for these entries."""
    return Family(
        architecture=architecture,
        entries=_LLAMA_ENTRIES | (entries or {}),
        shared={"rotary": True, "norm": "rms", "gated": True, "bias": False, "qk_norm": qk_norm},
        computed={"attention_bias": False, "mlp_bias": False, **computed},
        rope_theta=rope_theta,
        rows=_llama,
        base="model.",
        unused=("rotary_emb.inv_freq",),
    )


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        entries=_GPT2_ENTRIES,
        shared={"position_tables": 1},
        computed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        rows=_gpt2,
        base="transformer.",
        unused=(".attn.bias", ".attn.masked_bias"),
    ),
    "bert": Family(
        architecture="BertForMaskedLM",
        entries=_BERT_ENTRIES,
        shared={"position_tables": 1, "post_norm": True, "head": "masked", "causal": False},
        computed={
            "is_decoder": False,
            "add_cross_attention": False,
            "position_embedding_type": "absolute",
        },
        rows=_bert,
        base="bert.",
        unused=(
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
    "llama": _like_llama("LlamaForCausalLM"),
    "mistral": _like_llama(
        "MistralForCausalLM",
        {"num_kv_heads": ("num_key_value_heads", 8), "sliding_window": ("sliding_window", 4096)},
    ),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM",
        {"num_kv_heads": ("num_key_value_heads", 32), "head_dim": ("head_dim", 128)},
        qk_norm=True,
        use_sliding_window=False,
    ),
    "mixtral": _like_llama(
        "MixtralForCausalLM", _MIXTRAL_ENTRIES, rope_theta=1e6, router_jitter_noise=0.0
    ),
    "qwen3_moe": _like_llama(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE_ENTRIES,
        qk_norm=True,
        use_sliding_window=False,
        mlp_only_layers=[],
        decoder_sparse_step=1,
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
