"""Rules for the families that are Llama with experts in the feed-forward layer's place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import routers, sparse_blocks
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.experts import experts_rule
from fusedops.integrations.hf.rules.residual_norm import ResidualLayer
from fusedops.integrations.hf.rules.routers import Router, router_rule
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.integrations.hf.rules.sparse_blocks import SparseBlock, block_rule
from fusedops.ops._routing_reuse import keep_routing

_CHECKPOINT = "_gradient_checkpointing_func"


class KeepsRouting(ResidualLayer):
    """A decoder layer whose recomputation under gradient checkpointing routes as its first run."""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """What transformers has set, given a function that keeps its routing."""
        checkpoint = self.__dict__.get(_CHECKPOINT)
        if checkpoint is None:
            raise AttributeError(_CHECKPOINT)
        if torch.compiler.is_compiling():  # there routing_contexts keeps it
            return checkpoint
        return lambda function, *args: checkpoint(keep_routing(function), *args)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__[_CHECKPOINT] = checkpoint

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self.__dict__[_CHECKPOINT]


class SparseFamily(NamedTuple):
    """What the sparse layers of a family are.

    Attributes:
        prefix: what its classes' names begin with.
        router: what its router computes.
        block: its sparse layer's name without the prefix.
        block_forward: that layer's forward.
        half_tables: as in ``attention_rule``.
    """

    prefix: str
    router: type[Router]
    block: str = "SparseMoeBlock"
    block_forward: type[SparseBlock] = SparseBlock
    half_tables: bool = False


FAMILIES = {
    "mixtral": SparseFamily(
        "Mixtral", routers.SoftmaxRouter, block_forward=sparse_blocks.NoisyBlock
    ),
    "qwen2_moe": SparseFamily(
        "Qwen2Moe", routers.SoftmaxAsConfigured, block_forward=sparse_blocks.GatedSharedBlock
    ),
    "qwen3_moe": SparseFamily("Qwen3Moe", routers.SoftmaxAsConfigured),
    "olmoe": SparseFamily("Olmoe", routers.SoftmaxAsConfigured),
    "deepseek_v3": SparseFamily(
        "DeepseekV3", routers.GroupedSigmoid, "MoE", sparse_blocks.SharedBlock
    ),
    "gpt_oss": SparseFamily(
        "GptOss", routers.SoftmaxOfChosen, "MLP", sparse_blocks.ScoredBlock, half_tables=True
    ),
}


def rules(name: str) -> tuple[PatchRule, ...]:
    """Return the rules for a family's attention, router, experts, sparse and decoder layer."""
    modeling: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    family = FAMILIES[name]

    def original(kind: str) -> Any:
        return getattr(modeling, f"{family.prefix}{kind}", None)

    module_name = patched.module_of(original("DecoderLayer"))
    tables = {"rotary": True, "half_tables": family.half_tables}
    return (
        attention_rule(original("Attention"), module_name, eager=True, **tables),
        llama_like.layer_rule(original("DecoderLayer"), module_name, base=KeepsRouting),
        router_rule(original("TopKRouter") or original("TopkRouter"), module_name, family.router),
        block_rule(original(family.block), module_name, family.block_forward),
        experts_rule(original("Experts"), module_name),
    )
