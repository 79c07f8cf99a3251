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


class DataParallel:
    """Data parallelism of a model in a layout; ``parallelize`` calls the methods in their order.

    Attributes:
        unsharded: names of the parameters that ``zero`` does not shard.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, mesh: Mesh | None) -> None:
        self.model, self.config, self.mesh = model, config, mesh
        self.param_dtype: torch.dtype | None = getattr(torch, config.param_dtype or "", None)
        self.reduce_dtype: torch.dtype | None = getattr(torch, config.reduce_dtype or "", None)
        self.unsharded = self._unsharded_names()

    def _unsharded_names(self) -> set[str]:
        # Parameters that are small, cannot be sharded, or match a pattern, and lone experts.
        config, mesh = self.config, self.mesh
        named = dict(self.model.named_parameters())
        if mesh is None or config.zero == 0 or config.sizes.data == 1:
            return set(named)
        experts = self._expert_modules(self.model) if mesh.expert_data.size() == 1 else []
        alone = {parameter for module in experts for parameter in module.parameters()}
        # Stages that share the embedding add its gradients, which must not be sharded.
        model: Any = self.model
        tied = config.pp > 1 and isinstance(model, Transformer) and model.config.tied
        return {
            name
            for name, parameter in named.items()
            if parameter in alone
            or (tied and name == EMBEDDING)
            or local_bytes(parameter) < config.shard_threshold
            or shard_dim(parameter, config.shard_ranks or config.sizes.data) is None
            or any(fnmatchcase(name, pattern) for pattern in config.not_sharded)
        }

    def _expert_modules(self, part: nn.Module) -> list[nn.Module]:
        """Return the experts of layers, if their ranks or sums are not those of the rest."""
        config = self.config
        has_dense_ranks = config.ep == 1 and config.tp == 1 and not config.ep_deterministic
        if config.mode == "manual" or has_dense_ranks:
            return []
        return [module.experts for module in part.modules() if isinstance(module, MoE)]

    def store_replicas(self) -> None:
        """Store the parameters that ``zero`` does not shard in ``param_dtype``."""
        if self.param_dtype is None:
            return
        stored = {
            parameter: nn.Parameter(
                parameter.detach().to(self.param_dtype), parameter.requires_grad
            )
            for name, parameter in self.model.named_parameters()
            if name in self.unsharded
        }
        for module in self.model.modules():  # two of them may share a parameter
            for name, parameter in module._parameters.items():
                if parameter in stored:
                    module._parameters[name] = stored[parameter]

    def shard(self, parts: Sequence[nn.Module]) -> list[GradientSync]:
        """Shard the parameters of each stage, or of the model, but for the unsharded ones."""
        syncs, done = [], set(self.unsharded)
        for part in parts:  # two stages may have the same embedding
            syncs.append(self._shard_part(part, done))
            done |= {name for name, _ in part.named_parameters()}
        return syncs

    def _shard_part(self, part: nn.Module, unsharded: set[str]) -> GradientSync:
        config, mesh = self.config, self.mesh
        if mesh is None or config.zero == 0 or config.sizes.data == 1:
            return GradientSync()
        share = partial(
            shard,
            stage=config.zero,
            ignored_params={p for name, p in part.named_parameters() if name in unsharded},
            gather_again=config.parallel_optimizer_comm_recompute,
            ordered=config.ep_deterministic,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            # A transformer has the dtype of its embedding; rotary tables and routers'
            # probabilities stay in float32.
            cast_inputs=config.mode == "manual",
        )
        experts = self._expert_modules(part) if mesh.expert_data.size() > 1 else []
        if experts:
            share(experts, mesh.expert_data)
        share([*self._blocks(part), part], mesh.shards(config.shard_ranks))
        # Stage 1 would add up micro-batches first, before ranks that hold other experts can.
        stage = 2 if config.ep_deterministic and config.zero == 1 else config.zero
        return GradientSync(sharded=[*experts, part], stage=stage)

    def _blocks(self, part: nn.Module) -> list[Any]:
        """Return the layers in groups whose weights are gathered together."""
        layers = getattr(part, "layers", None)
        if not isinstance(layers, (nn.ModuleDict, nn.ModuleList)):
            return []
        blocks: list[list[nn.Module]] = []
        starts, size = self.config.bucket_layers, 0
        of_part = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        for index, layer in enumerate(of_part):
            is_full = size >= self.config.bucket_bytes if starts is None else index in starts
            if is_full or not blocks:
                blocks.append([])
                size = 0
            blocks[-1].append(layer)
            size += sum(local_bytes(parameter) for parameter in layer.parameters())
        return [block[0] if len(block) == 1 else block for block in blocks]

    def reduce_gradients(self, syncs: Sequence[GradientSync], parts: Sequence[nn.Module]) -> None:
        """Reduce the gradients of the unsharded parameters, in buckets.

        Those of half-precision parameters are accumulated in ``reduce_dtype``, if it is wider.
        """
        left, dtype = set(self.unsharded), self.reduce_dtype
        for part, sync in zip(parts, syncs, strict=True):
            for name, parameter in part.named_parameters():
                is_wider = dtype is not None and dtype.itemsize > parameter.itemsize
                if name in self.unsharded and is_wider:
                    parameter.grad_dtype = dtype
            sync.reducers = self._reducers(part, left)
            left -= {name for name, _ in part.named_parameters()}

    def _reducers(self, part: nn.Module, names: set[str]) -> list[BucketedAllReduce]:
        """Return the buckets of these parameters, over the ranks that see other tokens."""
        if self.mesh is None:
            return []
        experts = {e for module in self._expert_modules(part) for e in module.parameters()}
        members = {p for name, p in part.named_parameters() if name in names}
        reducers = []
        for parameters, name in ((members - experts, "data"), (members & experts, "expert_data")):
            if parameters and self.mesh[name].size() > 1:
                ordered = self.config.ep_deterministic and name == "expert_data"
                buckets, group = self._buckets(part, parameters), self.mesh.group(name)
                options = {"overlap": self.config.overlap, "ordered": ordered}
                reducers.append(BucketedAllReduce(buckets, group, **options))
        return reducers

    def _buckets(self, part: nn.Module, members: set[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return these parameters in buckets, the last first."""
        starts = self.config.bucket_layers
        if starts is None:
            parameters = [p for p in part.parameters() if p in members]
            return by_bytes(parameters, self.config.bucket_bytes)
        groups: list[list[nn.Parameter]] = [[]]
        for name, parameter in part.named_parameters():
            word = name.split(".")
            if word[0] == "layers" and int(word[1]) in starts[len(groups) - 1 :]:
                groups.append([])
            if parameter in members:
                groups[-1].append(parameter)
        return [bucket for group in reversed(groups) for bucket in by_bytes(group, 1 << 62)]
