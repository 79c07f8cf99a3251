"""From a plain ``Transformer`` to one that is spread over processes, in the order of its steps.

The model knows nothing of it: here its linear layers, its core of attention and its loss are
replaced by those of ``fusedops.parallel``. Tensors between layers stay plain tensors of this
process; parameters become DTensors.

Letters of shapes: B sequences, S tokens of each on the ranks of ``tp`` together, s a tp rank's of
them (with sequence parallelism), H hidden size.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops import memory, ops
from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.initialize import initialize
from fusedops.models.parallelization.config import (
    ParallelConfig,
    check_split,
    check_stages,
    check_stored,
)
from fusedops.models.parallelization.engine import Parallelized, attach
from fusedops.models.parallelization.microbatch_overlap import overlap_microbatches
from fusedops.models.parallelization.pipeline import WORDS, Pipeline
from fusedops.models.parallelization.stage_costs import Costs, by_operations, measured
from fusedops.models.parallelization.stages import Stage, cut
from fusedops.models.transformer import Transformer
from fusedops.nn import MLP, GatedMLP, MoE
from fusedops.parallel import context
from fusedops.parallel.comm import collectives
from fusedops.parallel.data.ddp import BucketedAllReduce, by_bytes, local_bytes
from fusedops.parallel.data.fsdp import divides, shard
from fusedops.parallel.data.grad_sync import GradientSync
from fusedops.parallel.dropout import Place
from fusedops.parallel.expert.layer import split_experts
from fusedops.parallel.mesh import Mesh, make_mesh
from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.pipeline.split import at, balanced, shortest
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    distribute,
    local,
    to_tensor_parallel,
)
from fusedops.parallel.tensor.replicated import (
    allreduce_gradients,
    gather_tokens,
    local_chunk,
    scatter_tokens,
)
from fusedops.parallel.tensor.sequence import SequenceNorm
from fusedops.parallel.tensor.vocabulary import (
    VocabParallelProjection,
    VocabularyEmbedding,
    vocab_parallel_cross_entropy,
)

_OP = "parallelize"
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    mesh: Mesh | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int | None = None,
) -> Any:
    """Spread a model over the processes of the job; every process calls this.

    Args:
        model: a ``Transformer``, the same on every process: on ``meta``, to be initialised here
            without ever being whole, or with values, of which those of process 0 count. With
            ``mode="manual"`` any module.
        config: how.
        mesh: process groups that exist already; made by default.
        device: where a model on ``meta`` is made; the mesh's by default.
        seed: of the first weights of a model on ``meta``, as of ``initialize``.

    Returns:
        ``model``, changed in place. ``parallelized(model)`` shards batches, makes the loss, clips.

    Raises:
        ValueError: sizes do not fit the model or the number of processes; the message has those
            that would.
        TypeError: an argument has the wrong type.
        UnsupportedError: two modes do not go together.

    Note:
        Gradients are those of one process that sees the whole batch, up to the order of sums.
        Parameters' names and shapes (of the DTensors) stay, so that a checkpoint of any layout
        loads into any other. Optimizers are made afterwards: parameters are new objects.
    """
    config, mesh = _validated(model, config, mesh)
    if config.sizes.ranks > 1:
        _same_everywhere(model)
    if isinstance(model, Transformer) and config.mode != "manual":
        if model.config.sparse_layers:
            _divide_experts(model, config, mesh)
        if config.tp > 1:
            _split_tensors(model, mesh["tp"], config)
        if config.cp > 1:
            _share_sequences(model, mesh.group("cp"), config.context)
        model.place = _place(config, mesh)
    stages: dict[int, Stage] = {}
    if isinstance(model, Transformer) and config.pp > 1:
        stages = _stages(model, config, mesh)
    parts: list[nn.Module] = [*stages.values()] or [model]
    for part in parts:
        if isinstance(part, Transformer):
            if config.overlap_microbatches:
                overlap_microbatches(part)
            _keep_less(part, config, mesh)
    whole = _left_whole(model, config, mesh)
    data, taken = [], set(whole)
    for part in parts:  # of which two can have the same words
        data.append(_divide_parameters(part, taken, config, mesh))
        taken |= {name for name, _ in part.named_parameters()}
    if any(each.is_meta for each in model.parameters()):
        for part in parts:
            _make(part, mesh.dense.device_type if device is None else device, config)
        initialize(model, seed)
    # A stage may have no layer with experts.
    if "experts" in config.offload and any(isinstance(each, MoE) for each in model.modules()):
        memory.store_experts(model, mesh.dense.device_type if device is None else device)
    taken = set()
    for part, each in zip(parts, data, strict=True):
        each.reducers = _replicas(part, whole - taken, config, mesh)
        taken |= {name for name, _ in part.named_parameters()}
    if not isinstance(model, Transformer) or not stages:
        return attach(model, Parallelized(model, config, mesh, data[0]))
    pipeline = Pipeline.of(model, config, mesh, stages, dict(zip(stages, data, strict=True)))
    return attach(model, Parallelized(model, config, mesh, pipeline=pipeline))


def _make(part: nn.Module, device: torch.device | str, config: ParallelConfig) -> None:
    """Give parameters and buffers memory, experts that are stored theirs on the host."""
    stored = [each.experts for each in part.modules() if isinstance(each, MoE)]
    for module in part.modules():
        host = "experts" in config.offload and module in stored
        module.to_empty(device="cpu" if host else device, recurse=False)


def _validated(model: Any, config: Any, mesh: Any) -> tuple[ParallelConfig, Mesh]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model must be a torch.nn.Module, got {checks.type_name(model)}")
    if not isinstance(config, ParallelConfig):
        got = checks.type_name(config)
        raise TypeError(f"{_OP}: config must be a ParallelConfig, got {got}")
    if not isinstance(model, Transformer) and config.mode != "manual":
        wanted = "a fusedops.models.Transformer, or any module with mode 'manual'"
        raise TypeError(f"{_OP}: model must be {wanted}, got {checks.type_name(model)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{_OP}: torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    config = config.for_ranks(dist.get_world_size())
    if isinstance(model, Transformer):
        _check_model(model.config, config)
    if config.shard_ranks is not None and config.sizes.data % config.shard_ranks:
        wanted = f"a divisor of dp x cp = {config.sizes.data}"
        checks.fail(_OP, "shard_ranks", wanted, config.shard_ranks)
    if mesh is None:
        device = next((each.device.type for each in model.parameters()), "cpu")
        mesh = make_mesh(config.sizes, device_type="cpu" if device == "meta" else device)
    elif mesh.sizes != config.sizes:
        checks.fail(_OP, "mesh", f"one of {config.sizes}", mesh.sizes)
    if isinstance(model, Transformer):
        check_stored(_OP, model.config, config, mesh.dense.device_type)
    return config, mesh


def _check_model(model: TransformerConfig, config: ParallelConfig) -> None:
    check_split(_OP, model, tp=config.tp, ep=config.ep, data=config.sizes.data)
    if config.context == "all_to_all" and config.cp > 1:
        heads = model.num_heads // config.tp
        if heads % config.cp:
            wanted = f"a divisor of the {heads} heads of a tp rank, with context 'all_to_all'"
            checks.fail(_OP, "cp", wanted, config.cp)
    check_stages(_OP, model, config)
    starts = config.bucket_layers or ()
    if any(each >= model.num_layers for each in starts):
        checks.fail(_OP, "bucket_layers", f"below the {model.num_layers} layers", starts)


def _same_everywhere(model: nn.Module) -> None:
    """Give all processes the values of process 0."""
    world = dist.group.WORLD
    assert world is not None
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                collectives.broadcast(tensor.detach(), world, label="first values").wait()


def _layers(model: Transformer) -> list[Any]:
    """Return the layers, whose parts are replaced by others of types that they do not know."""
    return list(model.layers.values())


def _stages(model: Transformer, config: ParallelConfig, mesh: Mesh) -> dict[int, Stage]:
    """Cut the model; return this rank's stages by their numbers."""
    layers = model.config.num_layers
    order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
    if config.pipeline_cuts is not None:
        runs = at(config.pipeline_cuts, layers, order.stages)
    elif config.pipeline_balance == "layers":
        runs = balanced([1.0] * layers, order.stages)
    else:
        costs = _costs(model, config, mesh)
        runs = shortest(costs.layers, order, first=costs.first, last=costs.last)
    mine = order.stages_of(mesh.rank("pp"))
    return dict(zip(mine, cut(model, [runs[each] for each in mine]), strict=True))


def _costs(model: Transformer, config: ParallelConfig, mesh: Mesh) -> Costs:
    """Return what makes stages even, the same on all processes."""
    if config.pipeline_balance == "operations":
        return by_operations(model.config)
    device, world = mesh.dense.device_type, dist.group.WORLD
    assert world is not None
    found = torch.zeros(model.config.num_layers + 2, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        dtype = next(model.parameters()).dtype
        layers, first, last = measured(model.config, device=device, dtype=dtype)
        found.copy_(torch.tensor([*layers, first, last]))
    *layers, first, last = collectives.broadcast(found, world, label="costs").wait().tolist()
    return Costs(layers, first, last)


def _divide_experts(model: Transformer, config: ParallelConfig, mesh: Mesh) -> None:
    """Give each rank of ``ep`` its experts, and each rank of ``tp`` its share of the tokens."""
    nodes, count = None, config.ep_nodes
    if count > 1:
        nodes = mesh["ep"]._unflatten(0, (count, config.ep // count), ("ep_nodes", "ep_ranks"))
    for layer in _layers(model):
        moe = layer.feed_forward
        if not isinstance(moe, MoE):
            continue
        layer.router_loss = partial(ops.moe_router_loss, group=mesh.group("stage"))
        if config.ep > 1:
            chunks, ordered = config.ep_chunks, config.ep_deterministic
            split_experts(moe, mesh["ep"], chunks=chunks, nodes=nodes, ordered=ordered)


def _split_tensors(model: Transformer, mesh: Any, config: ParallelConfig) -> None:
    """Divide heads, features and words over the ranks of ``tp``; with ``sp`` tokens too."""
    group, sequence = mesh.get_group(), config.sp
    # Products beside communication: what enters and leaves must be tokens, which come in blocks.
    # With micro-batch overlap the products of the other half overlap it.
    beside = sequence and config.overlap and not config.overlap_microbatches
    _split_ends(model, mesh, sequence=sequence)
    for layer in _layers(model):
        _split_attention(layer.attention, mesh, sequence=sequence, overlap=beside)
        part = layer.feed_forward
        if isinstance(part, MoE):
            _split_tokens(layer, mesh, sequence=sequence)
        elif isinstance(part, GatedMLP):
            plain = part.gate_proj.bias is None
            layer.feed_forward = ParallelGatedMLP.of(
                part, mesh, sequence=sequence, overlap=beside and plain
            )
        else:
            assert isinstance(part, MLP)
            keeps = "activation" not in config.remade
            layer.feed_forward = ParallelMLP.of(
                part, mesh, sequence=sequence, overlap=beside and keeps
            )
        if sequence:
            _split_norms(layer, ("attention_norm", "feed_forward_norm"), mesh)
    if sequence:
        _split_norms(model, ("norm",), mesh)
    if sequence and model.query_positions is not None:
        allreduce_gradients(model.query_positions, mesh)
        model.query_positions.register_forward_pre_hook(partial(_own_places, group))


def _split_ends(model: Transformer, mesh: Any, *, sequence: bool) -> None:
    """Divide the vocabulary."""
    group, words = mesh.get_group(), model.config.vocab_size
    embedding: Any = model.embedding
    head: Any = model.head
    embedding.tokens = VocabularyEmbedding.of(embedding.tokens, mesh, sequence=sequence)
    if sequence:
        for table in (embedding.positions, embedding.token_types):
            if table is not None:
                allreduce_gradients(table, mesh)
                table.register_forward_pre_hook(partial(_own_places, group))
        _split_norms(embedding, ("norm",), mesh)
        _split_norms(head, ("norm",), mesh)
        if head.transform is not None:
            allreduce_gradients(head.transform, mesh)
    for name in ("weight", "bias"):
        parameter = getattr(head, name)
        if parameter is not None:
            setattr(head, name, distribute(_OP, f"head.{name}", parameter, mesh, 0, uneven=True))

    def loss(x_BSH: torch.Tensor, weight: Any, bias: Any, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = to_tensor_parallel(x_BSH, group, sequence=sequence)
        given = local(weight), labels_BS, group, local(bias)
        again = head.recompute
        return vocab_parallel_cross_entropy(
            x_BSH, *given, vocab_size=words, reduction="sum", recompute=again
        )

    head.project, head.loss = VocabParallelProjection(group, words, sequence=sequence), loss


def _split_norms(owner: nn.Module, names: tuple[str, ...], mesh: Any) -> None:
    """Let norms, where there are some, meet this rank's tokens or heads only."""
    for name in names:
        norm = getattr(owner, name)
        if norm is not None and not isinstance(norm, nn.Identity):
            setattr(owner, name, SequenceNorm.of(norm, mesh))


def _own_places(group: dist.ProcessGroup, module: nn.Module, args: Any) -> Any:
    """Take, for a table of positions, those of this rank's tokens: ``[..., S]`` to ``[..., s]``."""
    return (local_chunk(args[0], group, -1),)


def _split_attention(attention: Any, mesh: Any, *, sequence: bool, overlap: bool) -> None:
    """Divide the heads; queries, keys and values enter by one communication."""
    group, ranks = mesh.get_group(), mesh.size()
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    column = partial(ColumnLinear.of, mesh=mesh, sequence=sequence, communicate=False)
    attention.query = column(attention.query)
    attention.key = column(attention.key, heads=kv_heads)
    attention.value = column(attention.value, heads=kv_heads)
    attention.output = RowLinear.of(attention.output, mesh, sequence=sequence, overlap=overlap)
    attention.num_heads = heads // ranks
    attention.num_kv_heads = max(1, kv_heads // ranks)
    attention.first_head = mesh.get_local_rank() * attention.num_heads
    _split_norms(attention, ("query_norm", "key_norm"), mesh)

    def come_in(module: nn.Module, args: Any) -> Any:
        x_BSH, places, asking_BSH = args
        if asking_BSH is not None:
            asking_BSH = to_tensor_parallel(asking_BSH, group, sequence=sequence)
        return to_tensor_parallel(x_BSH, group, sequence=sequence), places, asking_BSH

    attention.register_forward_pre_hook(come_in)


def _split_tokens(layer: Any, mesh: Any, *, sequence: bool) -> None:
    """Let each rank of ``tp`` route and compute its share of the tokens, by whole experts."""
    moe, group = layer.feed_forward, mesh.get_group()
    for module in (moe.gate, moe.shared_experts, moe.shared_expert_gate):
        if module is not None:
            allreduce_gradients(module, mesh)

    if not sequence:
        layer.take_tokens = partial(scatter_tokens, group=group)
        layer.join_tokens = partial(gather_tokens, group=group)
    layer.take_ids = partial(local_chunk, group=group)


def _place(config: ParallelConfig, mesh: Mesh) -> Place:
    """Return where this rank's tokens and heads stand, for dropout as on one process."""
    tp = mesh.rank("tp")
    return Place(
        batch_part=mesh.rank("dp"),
        sequence_part=tp if config.sp else 0,
        sequence_parts=config.tp if config.sp else 1,
        head_part=tp,
        head_parts=config.tp,
        context_part=mesh.rank("cp"),
        context_parts=config.cp,
    )


def _share_sequences(model: Transformer, group: dist.ProcessGroup, kind: str) -> None:
    """Let the ranks of ``cp`` attend to each other's tokens."""
    core = context.context_core(group, kind)
    for layer in _layers(model):
        layer.attention.core = core


def _keep_less(model: Transformer, config: ParallelConfig, mesh: Mesh) -> None:
    """Let layers keep less for their backward."""
    rules = []
    head: Any = model.head  # of the last stage
    if head is not None and ("activations" in config.offload or "layer" in config.remade):
        # Logits would be the most that is kept.
        head.recompute = True
    if "activations" in config.offload:
        rules.append(memory.offload("layers.*"))
    if "layer" in config.remade:
        slices = config.recompute_slice_activation and config.tp > 1
        rules.append(
            memory.recompute(
                "layers.*",
                mp_comm_recompute=config.mp_comm_recompute,
                recompute_slice_activation=slices,
                group=mesh.group("tp") if slices else None,
            )
        )
    if "norm" in config.remade:
        # FSDP2 gathers a layer's weights after the backward of what reads a last norm's output.
        inside = model.config.post_norm and config.zero == 3
        modules = "layers.*.attention_norm" if inside else ()
        rules.append(memory.recompute(modules, ops=_NORMS))
    if "activation" in config.remade:
        rules.append(memory.recompute(ops="linear_glu"))
        for layer in _layers(model):
            part = layer.feed_forward
            if isinstance(part, (MLP, ParallelMLP)):
                part.recompute = True
            elif isinstance(part, MoE):
                part.experts.recompute = True
    if rules:
        memory.apply(model, memory.Policy(*rules))


def _expert_modules(model: nn.Module, config: ParallelConfig) -> list[nn.Module]:
    """Return the experts of layers whose ranks, or sums, are not those of the rest."""
    alike = config.ep == 1 and config.tp == 1 and not config.ep_deterministic
    if config.mode == "manual" or alike:
        return []
    return [each.experts for each in model.modules() if isinstance(each, MoE)]


def _left_whole(model: nn.Module, config: ParallelConfig, mesh: Mesh) -> set[str]:
    """Return the names of parameters that ``zero`` does not divide.

    All with stage 0; those that are small, that cannot be, or whose name has a pattern; experts
    that nobody shares.
    """
    named = dict(model.named_parameters())
    if config.zero == 0 or config.sizes.data == 1:
        return set(named)
    experts = _expert_modules(model, config) if mesh.expert_data.size() == 1 else []
    alone = {each for module in experts for each in module.parameters()}
    # Stages that share it add their gradients, which they must have whole.
    tied = config.pp > 1 and isinstance(model, Transformer) and model.config.tied
    shared = {WORDS} if tied else set()
    return {
        name
        for name, each in named.items()
        if each in alone
        or name in shared
        or local_bytes(each) < config.shard_threshold
        or not divides(each, config.shard_ranks or config.sizes.data)
        or any(fnmatchcase(name, pattern) for pattern in config.not_sharded)
    }


def _divide_parameters(
    model: nn.Module, whole: set[str], config: ParallelConfig, mesh: Mesh
) -> GradientSync:
    """Divide what ``zero`` divides over the ranks that see other tokens."""
    if config.zero == 0 or config.sizes.data == 1:
        return GradientSync()
    left = {each for name, each in model.named_parameters() if name in whole}
    again = config.parallel_optimizer_comm_recompute
    share = partial(shard, stage=config.zero, whole=left, gather_again=again)
    experts = _expert_modules(model, config) if mesh.expert_data.size() > 1 else []
    if experts:
        share(experts, mesh.expert_data)
    share([*_blocks(model, config), model], mesh.shards(config.shard_ranks))
    # Stage 1 would add up micro-batches first, before ranks that hold other experts can.
    stage = 2 if config.ep_deterministic and config.zero == 1 else config.zero
    return GradientSync(sharded=[*experts, model], stage=stage)


def _replicas(
    model: nn.Module, whole: set[str], config: ParallelConfig, mesh: Mesh
) -> list[BucketedAllReduce]:
    """Sum the gradients of whole parameters over the ranks that see other tokens."""
    experts = {e for module in _expert_modules(model, config) for e in module.parameters()}
    members = {each for name, each in model.named_parameters() if name in whole}
    found = []
    for some, name in ((members - experts, "data"), (members & experts, "expert_data")):
        if some and mesh[name].size() > 1:
            buckets = _buckets(model, some, config)
            ordered = config.ep_deterministic and name == "expert_data"
            group = mesh.group(name)
            found.append(BucketedAllReduce(buckets, group, overlap=config.overlap, ordered=ordered))
    return found


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
    """Return the layers in groups whose weights travel together."""
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
        size += sum(local_bytes(each) for each in layer.parameters())
    return [each[0] if len(each) == 1 else each for each in blocks]
