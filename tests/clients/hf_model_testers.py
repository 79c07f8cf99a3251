"""Test classes for the families, for transformers' own tests that its source archive has.

The archive holds the tests that all models share (``ModelTesterMixin``), not the files per family
that give them configurations and inputs. This module gives them: tiny configurations, and the
classes that transformers' auto models know for each. ``hf_model_tests.py`` puts a file per family
into the unpacked archive that takes its classes from here.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import causal_families
import encoder_families
import torch
import transformers
from tests.generation.test_utils import GenerationTesterMixin

from tests import test_modeling_common

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

Inputs = Callable[[Any], dict[str, torch.Tensor]]


def ids(config: Any) -> torch.Tensor:
    """Return tokens without the special ones."""
    vocab_size = config.get_text_config().vocab_size
    return test_modeling_common.ids_tensor([BATCH, SEQ_LEN], vocab_size - 3) + 3


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
    spectrum = test_modeling_common.floats_tensor([BATCH, config.num_mel_bins, length])
    return {"input_features": spectrum, "decoder_input_ids": ids(config)}


def image(config: Any) -> dict[str, torch.Tensor]:
    size = config.image_size
    return {"pixel_values": test_modeling_common.floats_tensor([BATCH, 3, size, size])}


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
        found = [mapping[config] for mapping in mappings if config in mapping]
        found += [getattr(transformers, name) for name in self.models]
        return tuple(dict.fromkeys(found))


class Tester:
    """What the shared tests ask about a family: sizes, a configuration and inputs for it."""

    is_training = True
    batch_size, seq_length = BATCH, SEQ_LEN
    num_choices = 2

    def __init__(self, group: Group) -> None:
        self.group = group
        config = self.get_config()
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id"):
            setattr(self, name, getattr(config, name, None))
        for name in ("image_size", "patch_size"):
            setattr(self, name, group.options.get(name))
        for name, value in group.facts.items():
            setattr(self, name, value)

    def get_config(self) -> Any:
        return getattr(transformers, self.group.config)(**self.group.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        return config, self.group.inputs(config)


def arguments(
    self: Any, inputs: dict[str, torch.Tensor], model_class: type, return_labels: bool = False
) -> dict[str, torch.Tensor]:
    """Return a model's arguments, with the labels that the shared tests do not know."""
    shared = test_modeling_common.ModelTesterMixin._prepare_for_class
    found = shared(self, inputs, model_class, return_labels=return_labels)
    unknown = ("BertForPreTraining", "ElectraForPreTraining", "WhisperForConditionalGeneration")
    if return_labels and model_class.__name__ in unknown:
        found["labels"] = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    if return_labels and model_class.__name__ == "BertForPreTraining":
        found["next_sentence_label"] = torch.zeros(BATCH, dtype=torch.long)
    return found


def shared_tests(group: Group) -> type[unittest.TestCase]:
    """Return the shared tests for one configuration."""
    classes = group.classes()
    mixins: tuple[type, ...] = (test_modeling_common.ModelTesterMixin,)
    if any(each.can_generate() for each in classes):
        mixins += (GenerationTesterMixin,)

    def set_up(self: Any) -> None:
        self.model_tester = Tester(group)

    members = {"all_model_classes": classes, "setUp": set_up, "_prepare_for_class": arguments}
    members |= group.flags
    return type(f"{group.name}ModelTest", (*mixins, unittest.TestCase), members)


def classes_of(family: str) -> dict[str, type[unittest.TestCase]]:
    """Return the test classes of a family by name."""
    made = [shared_tests(group) for group in FAMILIES[family]]
    return {each.__name__: each for each in made}


def causal(name: str) -> tuple[Group, ...]:
    families = causal_families.DENSE | causal_families.SPARSE
    options = causal_families.SIZES | families[name].options | TOKENS
    options.pop("experts_implementation", None)
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


def vit() -> tuple[Group, ...]:
    options = encoder_families.VIT.options | {"encoder_stride": 4}
    facts = {"seq_length": PATCHES, "num_masks": 8, "mask_length": PATCHES - 1}
    return (Group("ViT", "ViTConfig", options, image, IMAGE_TASKS, facts=facts),)


GPT2 = {
    "vocab_size": 97,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PRETRAINING = {"models": ("BertForPreTraining",)}
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
FAMILIES: dict[str, tuple[Group, ...]] = {key: causal(name) for key, name in CAUSAL.items()} | {
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
