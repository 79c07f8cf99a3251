"""Data parallelism of a model: what ZeRO shards, and gradient buckets of what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.pipeline import EMBEDDING
from fusedops.models.transformer import Transformer
from fusedops.nn import MoE
from fusedops.parallel.data.ddp import BucketedAllReduce, by_bytes, local_bytes
from fusedops.parallel.data.fsdp import shard, shard_dim
from fusedops.parallel.data.grad_sync import GradientSync
from fusedops.parallel.mesh import Mesh


def shard_parameters(
    parts: Sequence[nn.Module], unsharded: set[str], config: ParallelConfig, mesh: Mesh | None
) -> list[GradientSync]:
    """Shard the parameters of each stage, or of the model, except ``unsharded`` ones."""
    data, done = [], set(unsharded)
    for part in parts:  # two stages may have the same embedding
        data.append(_shard_part(part, done, config, mesh))
        done |= {name for name, _ in part.named_parameters()}
    return data


def store_replicas(model: nn.Module, unsharded: set[str], config: ParallelConfig) -> None:
    """Store the parameters that ``zero`` does not shard in ``param_dtype``."""
    dtype = _dtype(config.param_dtype)
    if dtype is None:
        return
    stored = {
        parameter: nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if name in unsharded
    }
    for module in model.modules():  # two of them may share a parameter
        for name, parameter in module._parameters.items():
            if parameter in stored:
                module._parameters[name] = stored[parameter]


def reduce_gradients(
    data: Sequence[GradientSync],
    parts: Sequence[nn.Module],
    unsharded: set[str],
    config: ParallelConfig,
    mesh: Mesh | None,
) -> None:
    """Reduce the gradients of the parameters of the ``unsharded`` names, in buckets.

    Those of half-precision parameters are accumulated in ``reduce_dtype``, if it is wider.
    """
    done: set[str] = set()
    dtype = _dtype(config.reduce_dtype)
    for part, part_data in zip(parts, data, strict=True):
        for name, parameter in part.named_parameters():
            if name in unsharded and dtype is not None and dtype.itemsize > parameter.itemsize:
                parameter.grad_dtype = dtype
        part_data.reducers = _reducers(part, unsharded - done, config, mesh)
        done |= {name for name, _ in part.named_parameters()}


def _expert_modules(model: nn.Module, config: ParallelConfig) -> list[nn.Module]:
    """Return the experts of layers, if their ranks or sums are not those of the rest."""
    has_dense_ranks = config.ep == 1 and config.tp == 1 and not config.ep_deterministic
    if config.mode == "manual" or has_dense_ranks:
        return []
    return [module.experts for module in model.modules() if isinstance(module, MoE)]


def unsharded_names(model: nn.Module, config: ParallelConfig, mesh: Mesh | None) -> set[str]:
    """Return the names of parameters that ``zero`` does not shard.

    All with stage 0; those that are small, that cannot be sharded, or whose name matches a pattern;
    experts that are on one rank only.
    """
    named = dict(model.named_parameters())
    if mesh is None or config.zero == 0 or config.sizes.data == 1:
        return set(named)
    experts = _expert_modules(model, config) if mesh.expert_data.size() == 1 else []
    alone = {parameter for module in experts for parameter in module.parameters()}
    # Stages that share the embedding add its gradients, which must not be sharded.
    tied = config.pp > 1 and isinstance(model, Transformer) and model.config.tied
    shared = {EMBEDDING} if tied else set()
    return {
        name
        for name, parameter in named.items()
        if parameter in alone
        or name in shared
        or local_bytes(parameter) < config.shard_threshold
        or shard_dim(parameter, config.shard_ranks or config.sizes.data) is None
        or any(fnmatchcase(name, pattern) for pattern in config.not_sharded)
    }


def _shard_part(
    model: nn.Module, unsharded: set[str], config: ParallelConfig, mesh: Mesh | None
) -> GradientSync:
    """Shard what ``zero`` shards of one stage."""
    if mesh is None or config.zero == 0 or config.sizes.data == 1:
        return GradientSync()
    ignored = {parameter for name, parameter in model.named_parameters() if name in unsharded}
    again = config.parallel_optimizer_comm_recompute
    share = partial(
        shard,
        stage=config.zero,
        ignored_params=ignored,
        gather_again=again,
        ordered=config.ep_deterministic,
        param_dtype=_dtype(config.param_dtype),
        reduce_dtype=_dtype(config.reduce_dtype),
        # A transformer has the dtype of its embedding; rotary tables and routers' probabilities
        # stay in float32.
        cast_inputs=config.mode == "manual",
    )
    experts = _expert_modules(model, config) if mesh.expert_data.size() > 1 else []
    if experts:
        share(experts, mesh.expert_data)
    share([*_blocks(model, config), model], mesh.shards(config.shard_ranks))
    # Stage 1 would add up micro-batches first, before ranks that hold other experts can.
    stage = 2 if config.ep_deterministic and config.zero == 1 else config.zero
    return GradientSync(sharded=[*experts, model], stage=stage)


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def _reducers(
    model: nn.Module, unsharded: set[str], config: ParallelConfig, mesh: Mesh | None
) -> list[BucketedAllReduce]:
    """Return the buckets of unsharded parameters, over the ranks that see other tokens."""
    if mesh is None:
        return []
    experts = {e for module in _expert_modules(model, config) for e in module.parameters()}
    members = {p for name, p in model.named_parameters() if name in unsharded}
    reducers = []
    for parameters, name in ((members - experts, "data"), (members & experts, "expert_data")):
        if parameters and mesh[name].size() > 1:
            buckets = _buckets(model, parameters, config)
            ordered = config.ep_deterministic and name == "expert_data"
            group = mesh.group(name)
            reducers.append(
                BucketedAllReduce(buckets, group, overlap=config.overlap, ordered=ordered)
            )
    return reducers


def _buckets(
    model: nn.Module, members: set[nn.Parameter], config: ParallelConfig
) -> list[list[nn.Parameter]]:
    """Return these parameters in buckets, the last first."""
    if config.bucket_layers is None:
        return by_bytes([p for p in model.parameters() if p in members], config.bucket_bytes)
    parts: list[list[nn.Parameter]] = [[]]
    for name, parameter in model.named_parameters():
        word = name.split(".")
        if word[0] == "layers" and int(word[1]) in config.bucket_layers[len(parts) - 1 :]:
            parts.append([])
        if parameter in members:
            parts[-1].append(parameter)
    return [bucket for part in reversed(parts) for bucket in by_bytes(part, 1 << 62)]


def _blocks(model: nn.Module, config: ParallelConfig) -> list[Any]:
    """Return the layers in groups whose weights are gathered together."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, (nn.ModuleDict, nn.ModuleList)):
        return []
    blocks: list[list[nn.Module]] = []
    size = 0
    for index, layer in enumerate(layers.values() if isinstance(layers, nn.ModuleDict) else layers):
        if config.bucket_layers is None:
            begins = not blocks or size >= config.bucket_bytes
        else:
            begins = not blocks or index in config.bucket_layers
        if begins:
            blocks.append([])
            size = 0
        blocks[-1].append(layer)
        size += sum(local_bytes(parameter) for parameter in layer.parameters())
    return [block[0] if len(block) == 1 else block for block in blocks]
