"""The models of ``fusedops bench models``: families of transformers in one size, weights random.

Configurations are built here, nothing is downloaded. Dropout is 0, as in today's pre-training: a
fused dropout draws other numbers than torch's, and values could not be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

VOCABULARY = 8192
CLASSES = 1000
_PATCH = 16
_SEED = 5

Inputs = dict[str, Any]


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, and what it reads."""

    hidden: int = 512  # width of the residual stream
    layers: int = 4  # an encoder-decoder has as many in each half
    batch: int = 4  # sequences, or images
    seq_len: int = 256  # tokens of each, or patches of an image (the nearest square)
    steps: int = 32  # tokens that are generated in decoding

    @property
    def heads(self) -> int:
        """Heads of 64, at least two."""
        return max(2, self.hidden // 64)

    @property
    def label(self) -> str:
        """What a row is called by."""
        return f"{self.hidden}x{self.layers}, {self.batch}x{self.seq_len}"


@dataclass(frozen=True)
class ModelFamily:
    """A family of transformers."""

    name: str  # as ``--family`` has it
    prefix: str  # of the names of its classes
    head: str  # the rest of the name of the class that has a loss
    options: dict[str, Any]  # of the configuration; those that are functions get the size
    inputs: Callable[[ModelSize], Inputs]  # what the model reads, labels included
    kind: str  # ``"causal"``, ``"encoder"``, ``"seq2seq"`` or ``"image"``

    @property
    def decodes(self) -> bool:
        """Whether it generates token by token with a cache."""
        return self.kind in ("causal", "seq2seq")

    def build(self, size: ModelSize) -> nn.Module:
        """Return the model in float32, the same at every call."""
        torch.manual_seed(_SEED)
        return self.draw(size)

    def draw(self, size: ModelSize, **changes: Any) -> nn.Module:
        """Return the model in float32 with random weights; ``changes`` are of its configuration."""
        import transformers

        transformers.logging.set_verbosity_error()
        options = {
            name: value(size) if callable(value) else value for name, value in self.options.items()
        }
        config = getattr(transformers, f"{self.prefix}Config")(**options | changes)
        return getattr(transformers, self.prefix + self.head)(config)

    def batch(
        self, size: ModelSize, device: torch.device, dtype: torch.dtype, *, labels: bool
    ) -> Inputs:
        """Return what the model reads, on ``device``; pixels in ``dtype``.

        Without ``labels`` an encoder-decoder reads what it would make of them.
        """
        given: Inputs = {
            name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for name, value in self.inputs(size).items()
        }
        if not labels:
            del given["labels"]
            if self.kind == "seq2seq":
                given["decoder_input_ids"] = given["input_ids"]
        return given | ({"use_cache": False} if self.decodes else {})


class GivenTokenDecoder:
    """Generates given tokens with a cache, and keeps no state between two runs.

    The tokens are fixed: two models that round differently would else soon read different texts.
    The choice of the next token is made all the same, as ``generate`` would.
    """

    def __init__(
        self, family: ModelFamily, model: Any, size: ModelSize, device: torch.device
    ) -> None:
        """Run the prompt (the encoder of an encoder-decoder) once."""
        self.model = model
        tokens = _tokens(size.batch, size.seq_len + size.steps, seed=11).to(device)
        prompt, self.next = tokens[:, : size.seq_len], tokens[:, size.seq_len :]
        self.fixed: Inputs = {}
        self.name = "input_ids"
        with torch.no_grad():
            if family.kind == "seq2seq":
                self.name = "decoder_input_ids"
                self.fixed["encoder_outputs"] = model.get_encoder()(prompt)
                prompt = prompt[:, :1]
            output = self.model(**{self.name: prompt}, **self.fixed, use_cache=True)
        # From 5.24 on it is "cache"; that of Mamba is "cache_params".
        names = ("cache", "past_key_values", "cache_params")
        self._cache_name = next(name for name in names if name in output)
        self.cache = output[self._cache_name]

    def prepare(self) -> Any:
        """Return a cache of the prompt, to write on."""
        return copy.deepcopy(self.cache)

    @torch.no_grad()
    def run(self, cache: Any) -> torch.Tensor:
        """Return the logits ``[batch, steps, vocabulary]`` of all steps."""
        logits = []
        for step in range(self.next.shape[1]):
            token = self.next[:, step : step + 1]
            given = {self.name: token, **self.fixed}
            output = self.model(**given, **{self._cache_name: cache}, use_cache=True)
            cache = output[self._cache_name]
            output.logits[:, -1].argmax(-1)
            logits.append(output.logits)
        return torch.cat(logits, 1)


def _tokens(batch: int, seq_len: int, *, seed: int) -> torch.Tensor:
    # Not 0 and 1: families pad with the one or the other, and make masks of that.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, seq_len), generator=generator)


def _causal_inputs(size: ModelSize) -> Inputs:
    ids = _tokens(size.batch, size.seq_len, seed=7)
    return {"input_ids": ids, "labels": ids}


def _masked_inputs(size: ModelSize) -> Inputs:
    """Return tokens of which a sequence in two is padded by an eighth."""
    ids = _tokens(size.batch, size.seq_len, seed=7)
    mask = torch.ones_like(ids)
    mask[1::2, size.seq_len - size.seq_len // 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _image_inputs(size: ModelSize) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(size.batch, 3, _side(size), _side(size), generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(size.batch) % CLASSES}


def _side(size: ModelSize) -> int:
    return _PATCH * max(1, round(size.seq_len**0.5))


def _inner(size: ModelSize) -> int:
    """Return the width of a gated layer, with as many weights as a plain one of four times."""
    return 64 * -(-8 * size.hidden // (3 * 64))


def _four_times(size: ModelSize) -> int:
    return 4 * size.hidden


def _head_dim(size: ModelSize) -> int:
    return size.hidden // size.heads


def _twice_the_heads(size: ModelSize) -> int:
    return 2 * size.heads


def _attention_layers(size: ModelSize) -> list[int]:
    """Return which layers of a hybrid model have attention: the last one and every fourth."""
    return [*range(3, size.layers - 1, 4), size.layers - 1]


def _layer_types(size: ModelSize, mixer: str) -> list[str]:
    attention = _attention_layers(size)
    return ["full_attention" if i in attention else mixer for i in range(size.layers)]


def _all_layers(size: ModelSize) -> list[int]:
    return list(range(size.layers))


_HIDDEN, _LAYERS, _HEADS = attrgetter("hidden"), attrgetter("layers"), attrgetter("heads")
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    # RoBERTa counts its positions from the padding's index on.
    "max_position_embeddings": lambda size: size.seq_len + size.steps + 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": _HIDDEN,
    "hidden_dim": _four_times,
    "n_layers": _LAYERS,
    "n_heads": _HEADS,
    "max_position_embeddings": attrgetter("seq_len"),
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": _HIDDEN,
    "d_kv": _head_dim,
    "d_ff": _four_times,
    "num_layers": _LAYERS,
    "num_heads": _HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VIT: dict[str, Any] = _NO_DROPOUT | {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": _four_times,
    "image_size": _side,
    "patch_size": _PATCH,
    "num_labels": CLASSES,
}


def _causal(name: str, prefix: str, head: str = "ForCausalLM", **changes: Any) -> ModelFamily:
    return ModelFamily(name, prefix, head, _TEXT | changes, _causal_inputs, kind="causal")


def _gated(name: str, prefix: str, **changes: Any) -> ModelFamily:
    key_heads = {"num_key_value_heads": lambda size: size.heads // 2}
    given = {"intermediate_size": _inner, "head_dim": _head_dim, **key_heads}
    return _causal(name, prefix, **(given | changes))


def _sparse(name: str, prefix: str, **changes: Any) -> ModelFamily:
    return _gated(name, prefix, num_experts_per_tok=2, **changes)


def _encoder(name: str, prefix: str, options: dict[str, Any] | None = None) -> ModelFamily:
    options = options or _TEXT | _NO_DROPOUT | {"intermediate_size": _four_times}
    return ModelFamily(name, prefix, "ForMaskedLM", options, _masked_inputs, kind="encoder")


_NO_GPT2_DROPOUT: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_OPT: dict[str, Any] = {"ffn_dim": _four_times, "word_embed_proj_dim": _HIDDEN, "dropout": 0.0}
_EXPERTS_OF_HALF = {"num_experts": 8, "moe_intermediate_size": lambda size: _inner(size) // 2}
_GEMMA2 = {"query_pre_attn_scalar": 64, "sliding_window": lambda size: size.seq_len // 2}

# Hybrid models.
_MIXED: dict[str, Any] = {"layer_types": partial(_layer_types, mixer="linear_attention")}
_DELTA: dict[str, Any] = _MIXED | {
    "linear_num_key_heads": lambda size: size.heads // 2,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_KIMI: dict[str, Any] = _MIXED | {
    "linear_num_heads": _HEADS,
    "linear_head_dim": 64,
    "num_key_value_heads": _HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "mlp_layer_types": lambda size: ["dense"] * size.layers,
}
_LFM2: dict[str, Any] = {
    "layer_types": partial(_layer_types, mixer="conv"),
    "block_auto_adjust_ff_dim": False,
}
_MAMBA2: dict[str, Any] = {
    "num_heads": _twice_the_heads,
    "head_dim": _head_dim,
    "state_size": 64,
    "n_groups": 1,
}
_BAMBA: dict[str, Any] = {
    "mamba_n_heads": _twice_the_heads,
    "mamba_d_head": _head_dim,
    "mamba_d_state": 64,
}
_BAMBA |= {"attn_layer_indices": _attention_layers}

FAMILIES = {
    entry.name: entry
    for entry in (
        _causal("gpt2", "GPT2", "LMHeadModel", **_NO_GPT2_DROPOUT),
        _encoder("bert", "Bert"),
        _gated("llama", "Llama"),
        _gated("qwen3", "Qwen3"),
        _sparse("mixtral", "Mixtral", num_local_experts=8),
        ModelFamily("t5", "T5", "ForConditionalGeneration", _T5, _masked_inputs, kind="seq2seq"),
        ModelFamily("vit", "ViT", "ForImageClassification", _VIT, _image_inputs, kind="image"),
        _gated("mistral", "Mistral"),
        _gated("qwen2", "Qwen2"),
        _gated("gemma", "Gemma"),
        _gated("gemma2", "Gemma2", **_GEMMA2),
        _gated("phi3", "Phi3"),
        _causal("opt", "OPT", **_OPT),
        _causal("gpt_neox", "GPTNeoX", intermediate_size=_four_times),
        _sparse("qwen3_moe", "Qwen3Moe", **_EXPERTS_OF_HALF),
        _encoder("roberta", "Roberta"),
        _encoder("distilbert", "DistilBert", _DISTILBERT),
        _gated("qwen3_next", "Qwen3Next", **_DELTA, mlp_only_layers=_all_layers),
        _gated("kimi_linear", "KimiLinear", **_KIMI),
        _gated("bamba", "Bamba", **_BAMBA),
        _causal("mamba2", "Mamba2", **_MAMBA2),
        _causal("falcon_mamba", "FalconMamba"),
        _gated("lfm2", "Lfm2", **_LFM2),
    )
}
# What is measured unless families are named.
HEADLINE = ("gpt2", "bert", "llama", "qwen3", "mixtral", "t5", "vit")
