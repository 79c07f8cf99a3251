"""The families for transformers' own model tests: tiny configurations, inputs, and the models.

The source archive of transformers has the tests that all models share, not the files per family
that give them configurations and inputs. This module gives them; the models are those that
transformers' auto classes know for a configuration. ``hf_model_testers.py`` makes tests of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import causal_families
import encoder_families
import torch
import transformers
from causal_families import GROUPED

BATCH, SEQ_LEN = 3, 7
PATCHES = (16 // 4) ** 2 + 1  # of encoder_families.VISION, with the class token
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT_TASKS = (
    "MODEL",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_TOKEN_CLASSIFICATION",
    "MODEL_FOR_QUESTION_ANSWERING",
    "MODEL_FOR_MULTIPLE_CHOICE",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
)
IMAGE_TASKS = ("MODEL", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_MASKED_IMAGE_MODELING")
SPEECH_TASKS = ("MODEL", "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION")

Inputs = Callable[[Any], dict[str, torch.Tensor]]


def ids(config: Any) -> torch.Tensor:
    """Return tokens without the special ones."""
    vocab_size = config.get_text_config().vocab_size
    return torch.randint(3, vocab_size, (BATCH, SEQ_LEN))


def text(config: Any) -> dict[str, torch.Tensor]:
    """Return tokens, the last of one row padding."""
    mask = torch.ones(BATCH, SEQ_LEN, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids(config), "attention_mask": mask}


def text_to_text(config: Any) -> dict[str, torch.Tensor]:
    return text(config) | {
        "decoder_input_ids": ids(config),
        "decoder_attention_mask": torch.ones(BATCH, SEQ_LEN, dtype=torch.long),
    }


def speech_to_text(config: Any) -> dict[str, torch.Tensor]:
    length = 2 * config.max_source_positions
    spectrum = torch.rand(BATCH, config.num_mel_bins, length)
    return {"input_features": spectrum, "decoder_input_ids": ids(config)}


def speech(config: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(BATCH, 512)}


def image(config: Any) -> dict[str, torch.Tensor]:
    size = config.image_size
    return {"pixel_values": torch.rand(BATCH, 3, size, size)}


def image_of_two_towers(config: Any) -> dict[str, torch.Tensor]:
    return image(config.vision_config)


def text_and_image(config: Any) -> dict[str, torch.Tensor]:
    return text(config) | image(config.vision_config)


@dataclass(frozen=True)
class Group:
    """Models of one configuration.

    Attributes:
        name: of the test class.
        config: of the configuration's class.
        options: of the configuration.
        inputs: the arguments of its models.
        tasks: of transformers' auto classes, which name the models.
        models: further classes.
        facts: attributes of the tester that differ from the configuration's.
        flags: attributes of the test class.
    """

    name: str
    config: str
    options: dict[str, Any]
    inputs: Inputs = text
    tasks: tuple[str, ...] = TEXT_TASKS
    models: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def classes(self) -> tuple[type, ...]:
        """Return the models' classes, each once."""
        config = getattr(transformers, self.config)
        mappings = [getattr(transformers, f"{task}_MAPPING") for task in self.tasks]
        known = [mapping[config] for mapping in mappings if config in mapping]
        known += [getattr(transformers, name) for name in self.models]
        some = [entry if isinstance(entry, tuple) else (entry,) for entry in known]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(some)))


def causal(name: str) -> tuple[Group, ...]:
    families = causal_families.DENSE | causal_families.SPARSE
    options = causal_families.SIZES | families[name].options | TOKENS
    options.pop("experts_implementation", None)
    return (Group(name, f"{name}Config", options),)


def decoder(name: str, **options: Any) -> tuple[Group, ...]:
    """Return a family like Llama."""
    options = causal_families.SIZES | TOKENS | options
    return (Group(name, f"{name}Config", options),)


def encoder(name: str, model: str, **changes: Any) -> tuple[Group, ...]:
    return (Group(name, f"{name}Config", encoder_families.FAMILIES[model].options, **changes),)


def t5() -> tuple[Group, ...]:
    options = encoder_families.T5.options
    tasks = ("MODEL", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_QUESTION_ANSWERING")
    encoder_alone = options | {"is_encoder_decoder": False}
    encoders = ("T5EncoderModel", "T5ForTokenClassification")
    return (
        Group("T5", "T5Config", options, text_to_text, tasks, flags={"is_encoder_decoder": True}),
        Group("T5EncoderOnly", "T5Config", encoder_alone, tasks=(), models=encoders),
    )


def clip() -> tuple[Group, ...]:
    options = encoder_families.CLIP.options
    both = {"_is_composite": True, "has_attentions": False}
    return (
        Group(
            "CLIPText",
            "CLIPTextConfig",
            options["text_config"],
            tasks=(),
            models=("CLIPTextModel", "CLIPTextModelWithProjection"),
            facts={"is_training": False},  # they have no loss
        ),
        Group(
            "CLIPVision",
            "CLIPVisionConfig",
            options["vision_config"],
            image,
            tasks=(),
            models=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
            facts={"is_training": False, "seq_length": PATCHES},
        ),
        Group("CLIP", "CLIPConfig", options, text_and_image, ("MODEL",), flags=both),
        Group(
            "CLIPForImageClassification",
            "CLIPConfig",
            options,
            image_of_two_towers,
            tasks=(),
            models=("CLIPForImageClassification",),
            facts={"seq_length": PATCHES},
            flags=both,
        ),
    )


def siglip() -> tuple[Group, ...]:
    alone = {"is_training": False}
    options = {
        "text_config": encoder_families.TEXT | {"max_position_embeddings": 40} | TOKENS,
        "vision_config": encoder_families.VISION,
    }
    both = {"_is_composite": True, "has_attentions": False}
    return (
        Group(
            "SiglipText",
            "SiglipTextConfig",
            options["text_config"],
            tasks=(),
            models=("SiglipTextModel",),
            facts=alone,
        ),
        Group(
            "SiglipVision",
            "SiglipVisionConfig",
            options["vision_config"],
            image,
            tasks=(),
            models=("SiglipVisionModel",),
            facts=alone | {"seq_length": PATCHES - 1},
        ),
        Group("Siglip", "SiglipConfig", options, text_and_image, ("MODEL",), flags=both),
    )


def vit() -> tuple[Group, ...]:
    options = encoder_families.VIT.options | {"encoder_stride": 4}
    facts = {"seq_length": PATCHES, "num_masks": 8, "mask_length": PATCHES - 1}
    return (Group("ViT", "ViTConfig", options, image, IMAGE_TASKS, facts=facts),)


def masked(name: str, *models: str, **options: Any) -> tuple[Group, ...]:
    """Return a family like BERT."""
    options = encoder_families.BERT_SIZES | {"pad_token_id": 0} | options
    return (Group(name, f"{name}Config", options, models=models),)


def to_text(name: str, **options: Any) -> tuple[Group, ...]:
    """Return a family like BART."""
    tasks = ("MODEL", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_QUESTION_ANSWERING")
    options = encoder_families.BART_SIZES | TOKENS | options
    flags = {"is_encoder_decoder": True}
    return (Group(name, f"{name}Config", options, text_to_text, tasks, flags=flags),)


def images(name: str, tokens: int, **options: Any) -> tuple[Group, ...]:
    """Return a family like ViT, of layers that see ``tokens``."""
    options = encoder_families.VISION | {"encoder_stride": 4} | options
    facts = {"seq_length": tokens, "num_masks": 8, "mask_length": PATCHES - 1}
    return (Group(name, f"{name}Config", options, image, IMAGE_TASKS, facts=facts),)


def recordings(name: str) -> tuple[Group, ...]:
    """Return a family like Wav2Vec2."""
    facts = {"seq_length": 63, "encoder_seq_length": 63, "key_length": 63}
    return (Group(name, f"{name}Config", SPEECH, speech, SPEECH_TASKS, facts=facts),)


GPT2 = causal_families.GPT | {"vocab_size": 97} | TOKENS
SPEECH = encoder_families.LAYERS | {
    "vocab_size": 97,
    "conv_dim": (32, 32),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
PRETRAINING = {"models": ("BertForPreTraining",)}
MPT = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32} | TOKENS
QWEN3_NEXT = GROUPED | {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
SWIN = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_attention_heads": [2, 4],
    "window_size": 2,
    "encoder_stride": 8,
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4],
    "sr_ratios": [2, 1],
    "mlp_ratios": [2, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
}
CAUSAL = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gpt_neox": "GPTNeoX",
    "llama": "Llama",
    "mistral": "Mistral",
    "opt": "OPT",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
COPIED: dict[str, tuple[Group, ...]] = {key: causal(name) for key, name in CAUSAL.items()} | {
    "gpt2": (Group("GPT2", "GPT2Config", GPT2),),
    "bert": encoder("Bert", "BertForMaskedLM", **PRETRAINING),
    "roberta": encoder("Roberta", "RobertaForMaskedLM"),
    "xlm_roberta": encoder("XLMRoberta", "XLMRobertaForMaskedLM"),
    "camembert": encoder("Camembert", "CamembertForMaskedLM"),
    "electra": encoder("Electra", "ElectraForMaskedLM", models=("ElectraForPreTraining",)),
    "distilbert": encoder("DistilBert", "DistilBertForMaskedLM"),
    "vit": vit(),
    "clip": clip(),
    "t5": t5(),
    "whisper": encoder(
        "Whisper",
        "WhisperForConditionalGeneration",
        inputs=speech_to_text,
        tasks=("MODEL", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
        facts={"encoder_seq_length": 16, "key_length": 16},
        flags={"is_encoder_decoder": True},
    ),
}
WRITTEN: dict[str, tuple[Group, ...]] = {
    "gemma3": decoder("Gemma3Text", **GROUPED, head_dim=8, sliding_window=5),
    "granite": decoder("Granite", **GROUPED),
    "granitemoe": decoder("GraniteMoe", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "olmo": decoder("Olmo", **GROUPED),
    "olmo2": decoder("Olmo2", **GROUPED),
    "olmo3": decoder("Olmo3", **GROUPED, sliding_window=5),
    "glm": decoder("Glm", **GROUPED, head_dim=8),
    "glm4": decoder("Glm4", **GROUPED, head_dim=8),
    "smollm3": decoder("SmolLM3", **GROUPED),
    "cohere": decoder("Cohere", **GROUPED),
    "cohere2": decoder("Cohere2", **GROUPED, sliding_window=5),
    "ministral": decoder("Ministral", **GROUPED, head_dim=8, sliding_window=5),
    "falcon": decoder("Falcon"),
    "bloom": decoder("Bloom"),
    "mpt": (Group("Mpt", "MptConfig", MPT),),
    "gpt_bigcode": (Group("GPTBigCode", "GPTBigCodeConfig", GPT2),),
    "gptj": (Group("GPTJ", "GPTJConfig", GPT2 | {"rotary_dim": 4}),),
    "codegen": (Group("CodeGen", "CodeGenConfig", GPT2 | {"rotary_dim": 4}),),
    "stablelm": decoder("StableLm", **GROUPED),
    "starcoder2": decoder("Starcoder2", **GROUPED),
    "persimmon": decoder("Persimmon"),
    "nemotron": decoder("Nemotron", **GROUPED),
    "helium": decoder("Helium", **GROUPED, head_dim=8),
    "exaone4": decoder("Exaone4", **GROUPED, sliding_window=5),
    "qwen3_next": decoder("Qwen3Next", **QWEN3_NEXT),
    "modernbert": masked("ModernBert"),
    "albert": masked("Albert", embedding_size=16),
    "mpnet": masked("MPNet"),
    "roformer": masked("RoFormer", embedding_size=16),
    "deberta": masked("Deberta", **DEBERTA),
    "deberta_v2": masked("DebertaV2", **DEBERTA),
    "bart": to_text("Bart"),
    "mbart": to_text("MBart"),
    "marian": to_text("Marian"),
    "pegasus": to_text("Pegasus"),
    "m2m_100": to_text("M2M100"),
    "blenderbot": to_text("Blenderbot"),
    "deit": images("DeiT", PATCHES + 1),
    "beit": images("Beit", PATCHES),
    "dinov2": images("Dinov2", PATCHES),
    "swin": images("Swin", 16, **SWIN),
    "segformer": images("Segformer", 64, **SEGFORMER),
    "siglip": siglip(),
    "wav2vec2": recordings("Wav2Vec2"),
    "hubert": recordings("Hubert"),
}
FAMILIES = COPIED | WRITTEN
