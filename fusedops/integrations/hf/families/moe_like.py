"""Rules for the families that are Llama with experts in the feed-forward layer's place."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.families import llama_like
from fusedops.integrations.hf.rules import rms_norms
from fusedops.integrations.hf.rules.attention import attention_rule
from fusedops.integrations.hf.rules.experts import experts_rule
from fusedops.integrations.hf.rules.gated_mlp import gated_mlp_rule
from fusedops.integrations.hf.rules.rms_norms import rms_norm_rule
from fusedops.integrations.hf.rules.routers import Router, router_rule
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.integrations.hf.rules.sparse_blocks import SparseBlock, block_rule
from fusedops.ops._routing_reuse import keep_routing

_CHECKPOINT = "_gradient_checkpointing_func"


class KeepsRouting(nn.Module):
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


def rules(
    family: ModuleType,
    prefix: str,
    module_name: str,
    router: type[Router],
    block: tuple[str, type[SparseBlock]],
    *,
    norm: rms_norms.NormKind = rms_norms.LLAMA,
    layer: type[llama_like.DecoderLayer | llama_like.PositionsFirst] = llama_like.DecoderLayer,
    dense_mlp: bool = True,
    half_tables: bool = False,
) -> tuple[PatchRule, ...]:
    """Return the rules for a family's norm, attention, router, experts and decoder layer.

    Args:
        family: the modeling file.
        prefix: what the classes' names begin with there, as ``"Mixtral"``.
        module_name: name of the module that will hold the patched classes.
        router: what its router computes: a class of ``routers``.
        block: its sparse layer's name without the prefix, and a class of ``sparse_blocks``.
        norm: what its norms compute.
        layer: its decoder layer's forward: a class of ``llama_like``.
        dense_mlp: whether it has gated layers too: without experts, or shared by all tokens.
        half_tables: as in ``attention_rule``.
    """
    originals = (getattr(family, f"{prefix}{name}", None) for name in ("TopKRouter", "TopkRouter"))
    (router_class,) = filter(None, originals)
    attention = getattr(family, f"{prefix}Attention")
    sparse = type(layer.__name__, (KeepsRouting, layer), {"__module__": __name__})
    return (
        rms_norm_rule(getattr(family, f"{prefix}RMSNorm"), module_name, norm),
        attention_rule(attention, module_name, eager=True, rotary=True, half_tables=half_tables),
        llama_like.layer_rule(getattr(family, f"{prefix}DecoderLayer"), module_name, sparse),
        router_rule(router_class, module_name, router),
        block_rule(getattr(family, f"{prefix}{block[0]}"), module_name, block[1]),
        experts_rule(getattr(family, f"{prefix}Experts"), module_name),
        *([gated_mlp_rule(getattr(family, f"{prefix}MLP"), module_name)] if dense_mlp else []),
    )
