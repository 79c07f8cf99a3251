"""``parallelize``: shards a plain ``Transformer`` over processes, in the order of its steps.

The model contains no communication: here its linear layers, its embedding and its head are replaced
by parallel ones, and ``ProcessPartition`` says which part of a batch a process computes. Tensors
between layers stay plain tensors of this process; parameters become DTensors.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops import memory
from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.initialize import initialize
from fusedops.models.parallelization.batch_partition import ProcessPartition
from fusedops.models.parallelization.config import (
    ParallelConfig,
    check_split,
    check_stages,
)
from fusedops.models.parallelization.data_parallel import DataParallel
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.memory_policy import apply_memory_policy
from fusedops.models.parallelization.microbatch_overlap import overlap_microbatches
from fusedops.models.parallelization.pipeline import (
    PipelineEngine,
    Stage,
    split_into_stages,
)
from fusedops.models.parallelization.tensor_parallel import apply_plan, tensor_parallel_plan
from fusedops.models.transformer import Transformer
from fusedops.nn import MoE
from fusedops.parallel.collective_errors import gather_objects
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.seeds import agreed_seed
from fusedops.parallel.expert.layer import split_experts
from fusedops.parallel.mesh import Mesh, make_mesh

_OP = "parallelize"
_LOG = logging.getLogger("fusedops")


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    mesh: Mesh | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int | None = None,
    weights: Callable[[nn.Module], None] | None = None,
) -> TrainEngine:
    """Shard a model over the processes of the job; every process calls this.

    Args:
        model: a ``Transformer``, the same on every process: on ``meta``, to be initialised here
            without ever being whole, or with values, of which those of process 0 count. With
            ``mode="manual"`` any module.
        config: how.
        mesh: process groups that exist already; made by default.
        device: where a model on ``meta`` is made; the mesh's by default.
        seed: of the first weights of a model on ``meta``, as of ``initialize``; by default a number
            of the generator of process 0.
        weights: called instead, gives the parameters of a model on ``meta`` their first values, of
            which this process has a part; with a pipeline those of this process's stages alone.
            ``fill_huggingface`` is such a function.

    Returns:
        The engine that trains it: it shards batches, runs steps, reduces losses and norms. Its
        ``model`` is the one that was given, changed in place.

    Raises:
        ValueError: sizes do not fit the model or the number of processes; the message has those
            that would.
        TypeError: an argument has the wrong type.
        UnsupportedError: two modes do not go together.
        RuntimeError: the configuration has several processes, and torch.distributed is not
            initialised.

    Note:
        Without torch.distributed a configuration of one process trains the model alone. Gradients
        are those of one process that sees the whole batch, up to the order of sums. Parameters'
        names and shapes (of the DTensors) stay, so that a checkpoint of any layout loads into any
        other. Optimizers are made afterwards: parameters are new objects.
    """
    config, mesh = _validated(model, config, mesh, device)
    if device is None:
        device = _device_type(model) if mesh is None else mesh.dense.device_type
    _LOG.info("parallelize: %s on %s", config, device)
    if config.sizes.ranks > 1:
        _broadcast(model)
    stages: dict[int, Stage] = {}
    if isinstance(model, Transformer) and config.mode != "manual" and mesh is not None:
        if config.ep > 1:
            _shard_experts(model, config, mesh)
        if config.tp > 1:
            apply_plan(model, tensor_parallel_plan(model.config, config), mesh["tp"])
        model.partition = ProcessPartition.of(config, mesh)
        if config.pp > 1:
            stages = split_into_stages(model, config, mesh)
    parts: list[nn.Module] = [*stages.values()] or [model]
    for part in parts:
        if isinstance(part, Transformer):
            if config.overlap_microbatches:
                overlap_microbatches(part)
            apply_memory_policy(part, config, mesh)
    data_parallel = DataParallel(model, config, mesh)
    data_parallel.store_replicas()
    data = data_parallel.shard(parts)
    if any(parameter.is_meta for parameter in model.parameters()):
        _allocate(parts, device, config)
        if weights is not None:
            weights(model)
        elif seed is None and mesh is not None:
            device_of_mesh = torch.device(mesh.dense.device_type)
            initialize(model, int(agreed_seed(device_of_mesh, dist.group.WORLD)[0]))
        else:
            initialize(model, seed)
    # A stage may have no layer with experts.
    if "experts" in config.offload and any(isinstance(module, MoE) for module in model.modules()):
        memory.store_experts(model, device)
    data_parallel.reduce_gradients(data, parts)
    if not stages or mesh is None or not isinstance(model, Transformer):
        return TrainEngine(model, config, mesh, data[0])
    pipeline = PipelineEngine.of(model, config, mesh, stages, dict(zip(stages, data, strict=True)))
    return TrainEngine(model, config, mesh, pipeline=pipeline)


def _validated(
    model: Any, config: Any, mesh: Any, device: torch.device | str | None
) -> tuple[ParallelConfig, Mesh | None]:
    """Return the configuration for the processes of the job, and their mesh; raise if unfit.

    Without torch.distributed there is one process and no mesh. Raises are those of ``parallelize``.
    """
    checks.module(_OP, model)
    if not isinstance(config, ParallelConfig):
        checks.fail_type(_OP, "config", "a ParallelConfig", config)
    if not isinstance(model, Transformer) and config.mode != "manual":
        expected = "a fusedops.models.Transformer, or any module with mode 'manual'"
        checks.fail_type(_OP, "model", expected, model)
    if dist.is_available() and dist.is_initialized():
        config = config.for_ranks(dist.get_world_size())
    elif config.sizes.ranks > 1 or config.mode == "data" or mesh is not None:
        raise RuntimeError(
            f"{_OP}: torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    kind = _device_type(model) if device is None else torch.device(device).type
    kind = kind if mesh is None else mesh.dense.device_type
    if isinstance(model, Transformer):
        _check_model(model.config, config, kind)
    if config.shard_ranks is not None and config.sizes.data % config.shard_ranks:
        expected = f"a divisor of dp x cp = {config.sizes.data}"
        checks.fail(_OP, "shard_ranks", expected, config.shard_ranks)
    if mesh is not None and mesh.sizes != config.sizes:
        checks.fail(_OP, "mesh", f"one of {config.sizes}", mesh.sizes)
    if mesh is None and dist.is_available() and dist.is_initialized():
        mesh = make_mesh(config.sizes, device_type=kind)
    return config, mesh


def _check_model(model: TransformerConfig, config: ParallelConfig, device: str) -> None:
    check_split(_OP, model, tp=config.tp, ep=config.ep, data=config.sizes.data)
    if config.context == "all_to_all" and config.cp > 1:
        heads = model.num_heads // config.tp
        if heads % config.cp:
            expected = f"a divisor of the {heads} heads of a tp rank, with context 'all_to_all'"
            checks.fail(_OP, "cp", expected, config.cp)
    scaling = model.rope_scaling
    if config.cp > 1 and scaling is not None and scaling.needs_length:
        raise checks.UnsupportedError(
            f"{_OP}: cp must be 1 with rope_scaling of kind {scaling.kind!r}, got {config.cp}: its "
            "rotations depend on the length of the sequence, of which each rank has a part"
        )
    check_stages(_OP, model, config)
    starts = config.bucket_layers or ()
    if any(layer >= model.num_layers for layer in starts):
        checks.fail(_OP, "bucket_layers", f"below the {model.num_layers} layers", starts)
    if "experts" not in config.offload:
        return
    if not model.sparse_layers:
        checks.fail(_OP, "offload", "without 'experts' for a model that has none", config.offload)
    replicas = config.sizes.edp * config.tp
    if replicas > 1 and (config.zero or device != "cpu"):
        raise checks.UnsupportedError(
            f"{_OP}: offload must be without 'experts' where {replicas} processes have the same "
            "experts and zero divides them, or devices add their gradients: with ep = dp x cp and "
            "tp 1 each expert is on one process"
        )


def _device_type(model: nn.Module) -> str:
    """Return the type of the device of a model; ``"cpu"`` for one on ``meta``."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return "cpu" if device == "meta" else device


def _broadcast(model: nn.Module) -> None:
    """Give all processes the values of process 0."""
    world = dist.group.WORLD
    assert world is not None
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                collectives.broadcast(tensor.detach(), world, label="first values").wait()


def _shard_experts(model: Transformer, config: ParallelConfig, mesh: Mesh) -> None:
    """Shard the experts of all layers over the ranks of ``ep``."""
    nodes, count = None, config.ep_nodes
    if count > 1:
        _check_hosts(mesh.group("ep"), count)
        nodes = mesh["ep"]._unflatten(0, (count, config.ep // count), ("ep_nodes", "ep_ranks"))
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            split_experts(
                module,
                mesh["ep"],
                chunks=config.ep_chunks,
                nodes=nodes,
                reduce=config.ep_reduce,
                ordered=config.ep_deterministic,
            )
            _LOG.debug("parallelize: ep %d: %s", config.ep, name)


def _check_hosts(group: dist.ProcessGroup | None, nodes: int) -> None:
    """Raise on all ranks of ``ep`` unless those of each node are on one host."""
    hosts = gather_objects(socket.gethostname(), group)
    ranks = len(hosts) // nodes
    for first in range(0, len(hosts), ranks):
        of_node = sorted(set(hosts[first : first + ranks]))
        if len(of_node) > 1:
            raise ValueError(
                f"{_OP}: ep_nodes must be such that the ranks of each node are on one host, got "
                f"{nodes}: ranks {first} to {first + ranks - 1} of ep are on {', '.join(of_node)}. "
                "Start the processes of a host with consecutive ranks, or set ep_nodes to 1"
            )


def _allocate(parts: list[nn.Module], device: torch.device | str, config: ParallelConfig) -> None:
    """Give parameters and buffers on ``meta`` memory; offloaded experts get theirs on the host."""
    for part in parts:
        experts = {module.experts for module in part.modules() if isinstance(module, MoE)}
        for module in part.modules():
            is_offloaded = "experts" in config.offload and module in experts
            module.to_empty(device="cpu" if is_offloaded else device, recurse=False)
