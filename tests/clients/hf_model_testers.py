"""Test classes for the families, for transformers' own tests that its source archive has.

The archive holds the tests that all models share (``ModelTesterMixin``); ``hf_model_families.py``
has what they ask for. ``hf_model_tests.py`` puts a file per family into the unpacked archive that
takes its classes from here.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
import transformers
from hf_model_families import BATCH, FAMILIES, SEQ_LEN, Group
from tests.generation.test_utils import GenerationTesterMixin

from tests import test_modeling_common


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
