"""Parallelism on torch.distributed. A process group or device mesh is always an argument."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusedops.parallel.expert.api import expert_parallel, moe_combine, moe_dispatch
from fusedops.parallel.mesh import make_mesh, rank_groups
from fusedops.parallel.pipeline.timeline import timeline
from fusedops.parallel.sizes import Sizes

if TYPE_CHECKING:
    from fusedops.parallel.context import (
        context_causal_conv1d,
        context_core,
        context_gated_delta_rule,
        context_selective_state_space,
        ring_attention,
        shard_sequence,
        ulysses_attention,
        unshard_sequence,
    )
    from fusedops.parallel.data.ddp import BucketedAllReduce
    from fusedops.parallel.data.fsdp import shard

# What needs torch.distributed.tensor, which takes a second to import: its module, by name.
_LATER = {
    "BucketedAllReduce": "data.ddp",
    "context_causal_conv1d": "context",
    "context_core": "context",
    "context_gated_delta_rule": "context",
    "context_selective_state_space": "context",
    "ring_attention": "context",
    "shard": "data.fsdp",
    "shard_sequence": "context",
    "ulysses_attention": "context",
    "unshard_sequence": "context",
}

__all__ = [
    "BucketedAllReduce",
    "Sizes",
    "context_causal_conv1d",
    "context_core",
    "context_gated_delta_rule",
    "context_selective_state_space",
    "expert_parallel",
    "make_mesh",
    "moe_combine",
    "moe_dispatch",
    "rank_groups",
    "ring_attention",
    "shard",
    "shard_sequence",
    "timeline",
    "ulysses_attention",
    "unshard_sequence",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
