"""Families without a table: their classes take the rules of those that they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from causal_families import BY_CODE
from torch import nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert

import fusedops
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.rule import FusionPlan


def test_the_report_names_what_is_copied() -> None:
    for name in ("SmolLM3", "Ministral", "Gemma3"):
        report = fusedops.patch(BY_CODE[name].model())
        copies = {entry.cls for entry in report.replaced if entry.reason.startswith("as ")}
        assert f"{name}DecoderLayer" in copies


def test_a_module_of_patched_classes_has_no_others() -> None:
    from fusedops.integrations.hf.patched.transformers.models.granite import (
        modeling_granite as module,
    )

    patched, _ = BY_CODE["Granite"].pair()
    assert type(patched.model.layers[0].mlp) is module.GraniteMLP
    assert module.GraniteMLP.__name__ == "GraniteMLP"
    for name in ("GraniteForCausalLM", "nothing", "torch"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import fusedops.integrations.hf.patched.no_such_package as missing

        missing.Anything  # noqa: B018


class OwnOutput(nn.Module):
    """A copy of the end of BERT's attention in a file of the user's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        first = modeling_bert.BertSelfOutput(config)
        self.dense, self.dropout, self.LayerNorm = first.dense, first.dropout, first.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class OtherOutput(OwnOutput):
    """The same with one token changed."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states - input_tensor)
        return hidden_states


def test_a_home_made_copy_is_taken_and_a_near_copy_is_not() -> None:
    rule = tables.rule_of_class(OwnOutput)
    assert rule is not None and rule.copy_of == "BertSelfOutput"
    other = tables.rule_of_class(OtherOutput)
    assert other is None or not isinstance(other.plan(OtherOutput(BertConfig())), FusionPlan)


def test_a_class_that_cannot_be_imported_is_not_taken() -> None:
    class Local(OwnOutput):
        pass

    assert tables.rule_of_class(Local) is None
