"""Families for transformers' own model tests: tiny configurations, inputs, models, and tests.

The source archive of transformers has the tests that all models share (``ModelTesterMixin``), not
the files per family that give them configurations and inputs. This module gives them; the models
are those that transformers' auto classes know for a configuration. ``hf_model_tests.py`` puts a
file per family into the unpacked archive that takes its classes from here.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import families as small
import torch
import transformers
from families import GROUPED

BATCH, SEQ_LEN = 3, 7
PATCHES = (16 // 4) ** 2 + 1  # of small.VISION, with the class token
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS_OF_TEXT = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION"),
    *("TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION"),
)
TEXT_TASKS = ("MODEL", *(f"MODEL_FOR_{name}" for name in HEADS_OF_TEXT))
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


Groups = tuple[Group, ...]


def families(make: Callable[..., Groups], *names: str, **options: Any) -> dict[str, Groups]:
    """Return families of the same options, by the names of their folders in transformers."""
    found = {name: make(name, **options) for name in names}
    return {_folder(groups[0].config): groups for groups in found.values()}


def _folder(config: str) -> str:
    return getattr(transformers, config).__module__.split(".")[-2]


def plain(name: str, **options: Any) -> Groups:
    return (Group(name, f"{name}Config", options | TOKENS),)


def causal(name: str) -> Groups:
    options = dict((small.DENSE | small.SPARSE)[name].options)
    options.pop("experts_implementation", None)
    return plain(name, **options)


def decoder(name: str, **options: Any) -> Groups:
    """Return a family like Llama."""
    return plain(name, **small.SIZES | options)


def encoder(name: str, **changes: Any) -> Groups:
    """Return a family of ``tests/integrations/families.py``."""
    model = next(model for model in small.ENCODERS if model.startswith(f"{name}For"))
    return (Group(name, f"{name}Config", small.ENCODERS[model].options, **changes),)


def masked(name: str, **options: Any) -> Groups:
    """Return a family like BERT."""
    return (Group(name, f"{name}Config", small.BERT_SIZES | {"pad_token_id": 0} | options),)


def to_text(name: str, config: dict[str, Any] | None = None) -> Groups:
    """Return a family like BART."""
    tasks = ("MODEL", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_QUESTION_ANSWERING")
    options = small.BART_SIZES | TOKENS if config is None else config
    flags = {"is_encoder_decoder": True}
    return (Group(name, f"{name}Config", options, text_to_text, tasks, flags=flags),)


def t5(name: str) -> Groups:
    options = small.T5.options
    models = ("T5EncoderModel", "T5ForTokenClassification")
    alone = options | {"is_encoder_decoder": False}
    return (
        *to_text(name, options),
        Group("T5EncoderOnly", "T5Config", alone, tasks=(), models=models),
    )


def tower(name: str, options: Any, inputs: Inputs, models: tuple[str, ...], **facts: Any) -> Group:
    """Return the text or the vision of two towers, which has no loss."""
    facts = {"is_training": False} | facts
    return Group(name, f"{name}Config", options, inputs, (), models, facts)


def towers(name: str, options: dict[str, Any], ends: tuple[str, ...], seq_length: int) -> Groups:
    """Return a family like CLIP, whose towers are models of these ends of names."""
    both = {"_is_composite": True, "has_attentions": False}
    text_models, vision_models = (
        tuple(f"{name}{kind}Model{end}" for end in ends) for kind in ("Text", "Vision")
    )
    vision = options["vision_config"]
    return (
        tower(f"{name}Text", options["text_config"], text, text_models),
        tower(f"{name}Vision", vision, image, vision_models, seq_length=seq_length),
        Group(name, f"{name}Config", options, text_and_image, ("MODEL",), flags=both),
    )


def clip(name: str) -> Groups:
    options = small.CLIP.options
    classifier = Group(
        "CLIPForImageClassification",
        "CLIPConfig",
        options,
        image_of_two_towers,
        tasks=(),
        models=("CLIPForImageClassification",),
        facts={"seq_length": PATCHES},
        flags={"_is_composite": True, "has_attentions": False},
    )
    return (*towers(name, options, ("", "WithProjection"), PATCHES), classifier)


def siglip(name: str) -> Groups:
    texts = small.TEXT | {"max_position_embeddings": 40} | TOKENS
    options = {"text_config": texts, "vision_config": small.VISION}
    return towers(name, options, ("",), PATCHES - 1)


def images(name: str, tokens: int, **options: Any) -> Groups:
    """Return a family like ViT, of layers that see ``tokens``."""
    options = small.VISION | {"encoder_stride": 4} | options
    facts = {"seq_length": tokens, "num_masks": 8, "mask_length": PATCHES - 1}
    return (Group(name, f"{name}Config", options, image, IMAGE_TASKS, facts=facts),)


def recordings(name: str) -> Groups:
    """Return a family like Wav2Vec2."""
    facts = {"seq_length": 63, "encoder_seq_length": 63, "key_length": 63}
    return (Group(name, f"{name}Config", SPEECH, speech, SPEECH_TASKS, facts=facts),)


GPT2 = small.GPT | {"vocab_size": 97}
SPEECH = small.TEXT | {"conv_dim": (32, 32), "conv_stride": (4, 2)}
SPEECH |= {"conv_kernel": (8, 2), "num_feat_extract_layers": 2, "mask_time_prob": 0.0}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
MPT = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}
QWEN3_NEXT = GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
QWEN3_NEXT |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 28}
QWEN3_NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
QWEN3_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN3_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
STAGES = {"depths": [1, 1], "num_attention_heads": [2, 4]}
SWIN = STAGES | {"embed_dim": 16, "window_size": 2, "encoder_stride": 8}
SEGFORMER = STAGES | {
    "num_encoder_blocks": 2,
    "hidden_sizes": [16, 32],
    "sr_ratios": [2, 1],
    "mlp_ratios": [2, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
}
HEADS, SLIDING = GROUPED | {"head_dim": 8}, GROUPED | {"sliding_window": 5}
WHISPER = {
    "inputs": speech_to_text,
    "tasks": ("MODEL", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
    "facts": {"encoder_seq_length": 16, "key_length": 16},
    "flags": {"is_encoder_decoder": True},
}
FAMILIES: dict[str, Groups] = {
    **families(causal, *small.DENSE, *small.SPARSE),
    **families(plain, "GPT2", **GPT2),
    **families(encoder, "Bert", models=("BertForPreTraining",)),
    **families(encoder, "Electra", models=("ElectraForPreTraining",)),
    **families(encoder, "Roberta", "XLMRoberta", "Camembert", "DistilBert"),
    **families(images, "ViT", tokens=PATCHES, **small.VIT.options),
    **families(clip, "CLIP"),
    **families(t5, "T5"),
    **families(encoder, "Whisper", **WHISPER),
    **families(decoder, "Granite", "Olmo", "Olmo2", "SmolLM3", "Cohere", **GROUPED),
    **families(decoder, "StableLm", "Starcoder2", "Nemotron", **GROUPED),
    **families(decoder, "Olmo3", "Cohere2", "Exaone4", **SLIDING),
    **families(decoder, "Glm", "Glm4", "Helium", **HEADS),
    **families(decoder, "Gemma3Text", "Ministral", **HEADS, sliding_window=5),
    **families(decoder, "GraniteMoe", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    **families(decoder, "Falcon", "Bloom", "Persimmon"),
    **families(decoder, "Qwen3Next", **QWEN3_NEXT),
    **families(plain, "Mpt", **MPT),
    **families(plain, "GPTBigCode", **GPT2),
    **families(plain, "GPTJ", "CodeGen", **GPT2, rotary_dim=4),
    **families(masked, "ModernBert", "MPNet"),
    **families(masked, "Albert", "RoFormer", embedding_size=16),
    **families(masked, "Deberta", "DebertaV2", **DEBERTA),
    **families(to_text, "Bart", "MBart", "Marian", "Pegasus", "M2M100", "Blenderbot"),
    **families(images, "DeiT", tokens=PATCHES + 1),
    **families(images, "Beit", "Dinov2", tokens=PATCHES),
    **families(images, "Swin", tokens=16, **SWIN),
    **families(images, "Segformer", tokens=64, **SEGFORMER),
    **families(siglip, "Siglip"),
    **families(recordings, "Wav2Vec2", "Hubert"),
}


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
    from tests import test_modeling_common

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
    from tests.generation.test_utils import GenerationTesterMixin

    from tests import test_modeling_common

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
