"""What differs between Hugging Face's families: tables of entries and of names of parameters.

A family is one table for its configurations and one for its checkpoints. The code that reads and
writes both is in ``configs.py`` and ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusedops.models.config import TransformerConfig
from fusedops.models.transformer import Transformer

# By our field: the name of an entry that is required, or of another, with its default.
Entries = dict[str, str | tuple[str, Any]]
Tensors = list[torch.Tensor]
ROUTER_BIAS = ".gate.e_score_correction_bias"  # the end of the name of a buffer


@dataclass(frozen=True)
class Row:
    """Parameters that correspond."""

    ours: tuple[str, ...]  # names in ``Transformer``
    theirs: tuple[str, ...]  # names in a checkpoint
    read: Callable[[Tensors], Tensors] = list  # theirs to ours
    write: Callable[[Tensors], Tensors] = list  # ours to theirs
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
    base: str  # the prefix that checkpoints of the model without its head leave out
    names: dict[str, str]  # of modules, or of single parameters, by ours; in a layer without prefix
    layers: str  # the prefix of layers, before their index
    # Makes a row of our parameters and the name of theirs
    row: Callable[[tuple[str, ...], str, TransformerConfig], Row]
    unused: tuple[str, ...] = ()  # ends of names that hold nothing that is computed with here
    # Whether a checkpoint may have a layer after the last one, which predicts later tokens and is
    # left out
    has_extra_layer: bool = False
    # Our fields of those that are read from the entries, and the entries of those that are written
    read_fields: Callable[[dict[str, Any]], dict[str, Any]] = dict
    write_entries: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def tied(self) -> tuple[str, str]:
        """Names of the embedding's and of the head's weight."""
        return self._name("embedding.tokens.weight"), self._name("head.weight")

    def rows(self, config: TransformerConfig) -> Iterator[Row]:
        """Yield the parameters of a configuration, and the biases of its routers."""
        ours_of: dict[str, list[str]] = {}
        model = Transformer(config, device="meta")
        buffers = [name for name, _ in model.named_buffers() if name.endswith(ROUTER_BIAS)]
        for ours in (*dict(model.named_parameters()), *buffers):
            ours_of.setdefault(self._name(ours), []).append(ours)
        for theirs, several in ours_of.items():
            yield self.row(tuple(several), theirs, config)

    def _name(self, ours: str) -> str:
        """Return the name of a parameter of ours."""
        prefix = ""
        if ours.startswith("layers."):
            _, index, ours = ours.split(".", 2)
            prefix = f"{self.layers}{index}."
        module, _, kind = ours.rpartition(".")
        return prefix + (self.names.get(ours) or f"{self.names[module]}.{kind}")


def _transposed(tensors: Iterable[torch.Tensor]) -> Tensors:
    return [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]


def _gpt2_row(ours: tuple[str, ...], theirs: str, config: TransformerConfig) -> Row:
    """Return a row; weights lie [in, out], and query, key and value are one layer."""
    if ".c_" not in theirs:
        return Row(ours, (theirs,))
    return Row(
        ours,
        (theirs,),
        lambda tensors: _transposed(tensors[0].chunk(len(ours), -1)),
        lambda tensors: [torch.cat(_transposed(tensors), -1)],
    )


_GPT2_NAMES = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "attention_norm": "ln_1",
    **{f"attention.{name}": "attn.c_attn" for name in ("query", "key", "value")},
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.w1": "mlp.c_fc.weight",
    "feed_forward.b1": "mlp.c_fc.bias",
    "feed_forward.w2": "mlp.c_proj.weight",
    "feed_forward.b2": "mlp.c_proj.bias",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


def _bert_row(ours: tuple[str, ...], theirs: str, config: TransformerConfig) -> Row:
    """Return a row; the bias of an untied head has two names.

    The bias is tied with the words. Untied, transformers 5 computes with the decoder's own, and
    transformers 4 saved the shared one under the first name alone.
    """
    has_twin = ours == ("head.bias",) and not config.tied
    return Row(ours, (theirs,), twin="cls.predictions.decoder.bias" if has_twin else None)


_BERT_NAMES = {
    "embedding.tokens": "bert.embeddings.word_embeddings",
    "embedding.positions": "bert.embeddings.position_embeddings",
    "embedding.token_types": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "attention_norm": "attention.output.LayerNorm",
    **{f"attention.{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attention.output": "attention.output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "feed_forward.w1": "intermediate.dense.weight",
    "feed_forward.b1": "intermediate.dense.bias",
    "feed_forward.w2": "output.dense.weight",
    "feed_forward.b2": "output.dense.bias",
    "head": "cls.predictions.decoder",
    "head.bias": "cls.predictions.bias",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}


def _llama_row(ours: tuple[str, ...], theirs: str, config: TransformerConfig) -> Row:
    """Return a row; a checkpoint has three matrices of each expert, a loaded model two of all."""
    if not ours[0].endswith((".gate.weight", ".experts.gate_up_proj", ".experts.down_proj")):
        return Row(ours, (theirs,))
    block, *matrices = (
        ("mlp", "gate_proj", "up_proj", "down_proj")
        if config.qk_norm or config.is_latent
        else ("block_sparse_moe", "w1", "w3", "w2")
    )
    experts, _, kind = theirs.replace(".mlp.", f".{block}.").rpartition(".")
    if kind == "weight":
        return Row(ours, (f"{experts}.weight",), loaded=theirs)
    chosen, count = matrices[2:] if kind == "down_proj" else matrices[:2], config.num_experts
    names = [f"{experts}.{i}.{matrix}.weight" for i in range(count) for matrix in chosen]
    return Row(
        ours,
        tuple(names),
        lambda tensors: [torch.cat(tensors).unflatten(0, (count, -1))],
        lambda tensors: list(tensors[0].flatten(0, 1).chunk(len(names))),
        loaded=theirs,
    )


_LLAMA_NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    **{f"attention.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_down_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "feed_forward_norm": "post_attention_layernorm",
    **{
        f"feed_forward.{part}{name}": f"mlp.{part}{name}"
        for part in ("", "shared_experts.")
        for name in ("gate_proj", "up_proj", "down_proj")
    },
    "feed_forward.gate": "mlp.gate",
    "feed_forward.experts": "mlp.experts",
    "norm": "model.norm",
    "head": "lm_head",
}


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
_DEEPSEEK_SPARSE: Entries = {
    "num_experts": ("n_routed_experts", 256),
    "top_k": ("num_experts_per_tok", 8),
    "dense_layers": ("first_k_dense_replace", 3),
    "expert_size": ("moe_intermediate_size", 2048),
    "shared_size": ("n_shared_experts", 1),  # how many of the width of an expert
    "num_groups": ("n_group", 8),
    "topk_groups": ("topk_group", 4),
    "router_normalize": ("norm_topk_prob", True),
    "router_scaling": ("routed_scaling_factor", 2.5),
}
# The rate is that of the training of DeepSeek-V3; configurations of transformers have none.
_DEEPSEEK_ROUTER = {"router_score": "sigmoid", "group_score": "top2_sum", "balance_rate": 0.001}
_DEEPSEEK_ENTRIES = _DEEPSEEK_SPARSE | {
    "q_lora_rank": ("q_lora_rank", 1536),
    "kv_lora_rank": ("kv_lora_rank", 512),
    "qk_nope_head_dim": ("qk_nope_head_dim", 128),
    "qk_rope_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}


def _deepseek_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with the width of all shared experts, or those of a model without experts."""
    if fields["dense_layers"] < fields["num_layers"]:
        return fields | {"shared_size": fields["shared_size"] * fields["expert_size"]}
    sparse = _DEEPSEEK_SPARSE | _DEEPSEEK_ROUTER
    return {name: value for name, value in fields.items() if name not in sparse}


def _deepseek_entries(values: dict[str, Any]) -> dict[str, Any]:
    """Return entries with the number of shared experts, or without experts for a dense model."""
    if values["n_routed_experts"]:
        shared = values["n_shared_experts"] // values["moe_intermediate_size"]
        return values | {"n_shared_experts": shared}
    sparse = [entry[0] for entry in _DEEPSEEK_SPARSE.values()]
    dense = {name: value for name, value in values.items() if name not in sparse}
    return dense | {"first_k_dense_replace": values["num_hidden_layers"]}


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
        base="model.",
        names=_LLAMA_NAMES,
        layers="model.layers.",
        row=_llama_row,
        unused=("rotary_emb.inv_freq",),
    )


def _deepseek() -> Family:
    """Return the family of DeepSeek-V3, whose ``head_dim`` is that of the rotated part."""
    family = _like_llama(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_ENTRIES,
        rope_interleave=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
    )
    entries = {ours: entry for ours, entry in family.entries.items() if ours != "head_dim"}
    return replace(
        family,
        entries=entries,
        shared=family.shared | _DEEPSEEK_ROUTER,
        has_extra_layer=True,
        read_fields=_deepseek_fields,
        write_entries=_deepseek_entries,
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
        base="transformer.",
        names=_GPT2_NAMES,
        layers="transformer.h.",
        row=_gpt2_row,
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
        base="bert.",
        names=_BERT_NAMES,
        layers="bert.encoder.layer.",
        row=_bert_row,
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
    "deepseek_v3": _deepseek(),
}
