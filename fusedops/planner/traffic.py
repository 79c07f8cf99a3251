"""What each rank of a layout sends in a training step, by kind of parallelism: exact formulae.

Composed of ``parallel/budgets.py``, whose formulae the tests compare with what the stack records.
Two numbers are not known before a step: the rows that a router sends to other ranks (experts are
taken to be chosen evenly and independently), and the keys that causality lets ring attention skip
(all are counted).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import comb

import torch

from fusedops.models import Transformer
from fusedops.models.config import TransformerConfig
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel import budgets
from fusedops.parallel.budgets import Budget
from fusedops.parallel.expert.metadata import METADATA_BYTES
from fusedops.parallel.pipeline.schedules import table
from fusedops.planner.layout import Layout, check
from fusedops.planner.memory import weights_of_rank

_COUNT = 8  # bytes of a number of tokens
_STATISTIC = 4  # bytes of a number that ranks of the vocabulary exchange for the loss
_MARK = 4  # bytes that tell whether a parameter has a gradient
_DTYPES = {4: torch.float32, 2: torch.bfloat16}


def step_traffic(model: TransformerConfig, layout: Layout, *, rank: int = 0) -> dict[str, Budget]:
    """Return the communications of a step, without the first one's headers, by parallelism.

    Args:
        model: what is trained.
        layout: how; fused micro-batches of ``overlap_microbatches`` count as halves.
        rank: of the pipeline.

    Returns:
        Calls and bytes of ``"tensor"``, ``"context"``, ``"experts"``, ``"pipeline"`` and
        ``"data"``, of those that there are; gradients and weights over ``dp`` and ``cp`` are
        ``"data"``.

    Raises:
        ValueError: the layout does not fit the model.

    Example:
        >>> from fusedops.planner import Layout, preset, step_traffic
        >>> sent = step_traffic(preset("gpt2"), Layout.of(dp=2, precision="float32"))
        >>> sent["data"].calls
        {'all_reduce': 19}
    """
    check(model, layout)
    config = layout.parallel
    parts: dict[str, Budget] = {}
    if config.tp > 1:
        parts["tensor"] = _tensor(model, layout, rank) * config.microbatches
    layers, again = _layers(model, layout, rank)
    if config.cp > 1:
        once, second = _context(model, layout), _context_recomputation(model, layout)
        context = once * len(layers) + second * len(again)
        parts["context"] = context * config.microbatches
    sparse, repeated = (sum(map(model.is_sparse, some)) for some in (layers, again))
    if sparse:
        experts = _router_loss(model, layout) * sparse
        if config.ep > 1:
            experts += _experts(model, layout) * sparse
            experts += _experts(model, layout, backward=False) * repeated
        if experts.bytes:
            parts["experts"] = experts * config.microbatches
    if config.pp > 1:
        parts["pipeline"] = _pipeline(model, layout, rank)
    data = _data(model, layout, rank)
    if data.bytes:
        parts["data"] = data
    return parts


def _layers(model: TransformerConfig, layout: Layout, rank: int) -> tuple[list[int], list[int]]:
    """Return the layers of a rank, and those whose forward the backward runs again."""
    layers, count = layout.layers_of(model, rank), layout.parallel.recompute_layers
    if layout.recompute != "full":
        return layers, []
    runs = [layout.runs(model)[stage] for stage in layout.stages_of(rank)]
    return layers, [layer for run in runs for layer in (run if count is None else run[:count])]


def _activation(model: TransformerConfig, layout: Layout) -> int:
    """Return the bytes of the hidden states of a micro-batch, before ``sp``."""
    return layout.tokens(model) * model.hidden_size * layout.bytes_of.activations


def _tensor(model: TransformerConfig, layout: Layout, rank: int) -> Budget:
    config = layout.parallel
    activation, tp = _activation(model, layout), config.tp
    halves = 2 if config.overlap_microbatches else 1
    stages = layout.stages_of(rank)
    ends = (0 in stages) + (layout.stages - 1 in stages)
    of_rank, repeated = _layers(model, layout, rank)
    layers = len(of_rank)
    sparse, repeated_sparse = (sum(map(model.is_sparse, some)) for some in (of_rank, repeated))
    overlaps = config.sp and config.overlap
    sparse_layer, sparse_repeat = (
        budgets.sparse_layer(
            tp, activation, sequence=config.sp, overlap=overlaps, halves=halves, again=again
        )
        for again in (False, True)
    )
    sparse_layer += budgets.all_reduces(tp, _replicated_in_experts(model))
    if halves == 2 and not config.sp and (model.balance_loss or model.z_loss):
        # The router's loss reads both halves: nothing is left out of a second forward.
        sparse_repeat += Budget({"all_gather": 1}, activation * (tp - 1) // tp // halves)
    if config.sp:
        overlap = overlaps and halves == 1
        # An MLP that recomputes its activation has products that overlap nothing.
        plain_mlp = "activation" in config.recomputed and not model.gated
        layer = budgets.sequence_layer(
            tp, activation, overlap=overlap, overlap_mlp=not plain_mlp, halves=halves
        )
        repeat = budgets.sequence_layer(tp, activation, overlap=overlap, halves=halves, again=True)
        part = activation * (tp - 1) // tp
        end = Budget({"all_gather": 1, "reduce_scatter": 1}, 2 * part)
    else:
        layer = budgets.tensor_layer(tp, activation, halves=halves)
        repeat = budgets.tensor_layer(tp, activation, halves=halves, again=True)
        end = budgets.all_reduces(tp, [activation])
    weight = layout.bytes_of.weights
    if model.kv_heads < tp:  # ranks share heads of keys, and add up their gradients
        shared = model.kv_heads * model.size_of_head * model.hidden_size * weight
        layer += budgets.all_reduces(tp, [shared] * 2)
        sparse_layer += budgets.all_reduces(tp, [shared] * 2)
    if not config.mp_comm_recompute:  # only rings run again
        repeat, sparse_repeat = (
            Budget({"send_receive": rings}, rings * activation // tp)
            for rings in (budget.calls.get("send_receive", 0) for budget in (repeat, sparse_repeat))
        )
    budget = layer * (layers - sparse) + repeat * (len(repeated) - repeated_sparse) + end * ends
    budget += sparse_layer * sparse + sparse_repeat * repeated_sparse
    if config.sp:
        budget += budgets.all_reduces(tp, _replicated(model, layers, stages, layout.stages))
    if layout.stages - 1 in stages:
        statistics = layout.tokens(model) * 4 * _STATISTIC
        budget += Budget({"all_gather": 1}, statistics * (tp - 1))
    return budget


def _replicated(model: TransformerConfig, layers: int, stages: list[int], count: int) -> list[int]:
    """Return the bytes of gradients that ``sp`` sums: of norms, and of biases after a sum."""
    vector = model.hidden_size * _STATISTIC
    norm = vector * (2 if model.norm == "layer" else 1)
    sizes = [norm] * (2 * layers) + [vector] * (2 * layers if model.bias else 0)
    if 0 in stages and model.position_tables:
        sizes.append(model.position_tables * model.seq_len * vector)
    if count - 1 in stages:
        sizes.append(norm)
    return sizes


def _replicated_in_experts(model: TransformerConfig) -> list[int]:
    """Return the bytes of gradients that ranks of ``tp`` sum in a sparse layer."""
    hidden, width = model.hidden_size, model.shared_size
    router = 0 if model.router == "hash" else hidden * model.num_experts
    products = 3 if model.gated else 2
    sizes = [router, products * hidden * width, hidden if model.shared_gate else 0]
    return [_STATISTIC * size for size in sizes if size]


def _context(model: TransformerConfig, layout: Layout) -> Budget:
    queries, keys = _attended(model, layout)
    if layout.parallel.context == "all_to_all":
        return budgets.all_to_all_layer(layout.parallel.cp, queries, keys)
    return budgets.ring_layer(layout.parallel.cp, keys)


def _context_recomputation(model: TransformerConfig, layout: Layout) -> Budget:
    """Return what a second forward needs: half of the all-to-alls, a third of the ring."""
    budget = _context(model, layout)
    parts = 2 if layout.parallel.context == "all_to_all" else 3
    calls = {kind: count // parts for kind, count in budget.calls.items()}
    return Budget(calls, budget.bytes // parts)


def _attended(model: TransformerConfig, layout: Layout) -> tuple[int, int]:
    """Return the bytes of queries, and of keys and values, of all tokens of a micro-batch."""
    config, item = layout.parallel, layout.bytes_of.activations
    tokens = layout.tokens(model) * config.cp
    queries = tokens * model.num_heads * model.size_of_head * item // config.tp
    return queries, 2 * tokens * model.key_width * item // config.tp


def _experts(model: TransformerConfig, layout: Layout, *, backward: bool = True) -> Budget:
    """Return what a layer and micro-batch needs of expert parallelism, or a second forward of it.

    Over nodes a token goes to each node once, if one of its experts is there.
    """
    config, item, k = layout.parallel, layout.bytes_of.activations, model.top_k
    nodes, halves = config.ep_nodes, 2 if config.overlap_microbatches else 1
    tokens, passes = layout.tokens(model) / config.tp, 2 if backward else 1
    result, slots = model.hidden_size * item, k * tokens

    def row(pairs: int) -> int:
        return PayloadLayout(model.hidden_size, _DTYPES[item], torch.float32, pairs=pairs).stride

    # Ranks of a group, bytes to and from a rank if all rows left it, exchanges of metadata.
    levels = [(config.ep, slots * row(1), slots * result, halves)]
    if nodes > 1:
        elsewhere = comb(model.num_experts * (nodes - 1) // nodes, k) / comb(model.num_experts, k)
        rows = nodes * (1 - elsewhere) * tokens
        results = rows if config.ep_reduce == "node" else slots
        metadata = halves * config.ep_chunks
        levels = [
            (nodes, rows * row(k), results * result, halves),
            (config.ep // nodes, slots * row(1), slots * result, metadata),
        ]
    budget = Budget()
    for ranks, there, back, metadata in levels:
        calls = metadata + 2 * passes * config.ep_chunks * halves
        sent = passes * (there + back) / ranks + metadata * METADATA_BYTES
        budget += Budget({"all_to_all": calls}, round(sent * (ranks - 1)))
    return budget


def _router_loss(model: TransformerConfig, layout: Layout) -> Budget:
    """Return what the router's loss of a layer and micro-batch needs: choices are added up."""
    config = layout.parallel
    ranks = config.sizes.data * config.tp
    if config.router_loss == "local" or ranks == 1 or not (model.balance_loss or model.z_loss):
        return Budget()
    counts = model.num_experts if model.balance_loss else 0
    return budgets.all_reduces(ranks, [_COUNT * (counts + 1)])


def _pipeline(model: TransformerConfig, layout: Layout, rank: int) -> Budget:
    config = layout.parallel
    order = table(config.pipeline_schedule, config.pp, config.microbatches, config.virtual)
    sent = _activation(model, layout) // (config.tp if config.sp else 1)
    words = 0
    stages = layout.stages_of(rank)
    ends = (0 in stages) + (layout.stages - 1 in stages)
    if model.tied and ends == 1:  # the embedding's two copies are on two ranks
        words = model.vocab_size * model.hidden_size * layout.bytes_of.gradients // config.tp
    return budgets.pipeline(order.boundaries(rank), config.microbatches, sent, words=words)


def _data(model: TransformerConfig, layout: Layout, rank: int) -> Budget:
    config, ranks = layout.parallel, layout.parallel.sizes.data
    weights = weights_of_rank(model, layout, rank)
    dense = round(weights.split / config.tp + weights.replicated)
    experts, replicas = weights.experts // config.ep, ranks * config.tp // config.ep
    is_alike = config.ep == 1 and config.tp == 1  # experts are reduced with all others
    has_replicas = experts > 0 and replicas > 1 and not is_alike
    dense += experts if is_alike else 0
    budget = Budget()
    if config.zero == 0:
        item = layout.reduce_bytes
        dense_marks, expert_marks = (_MARK * n for n in _tensors(model, layout, rank))
        dense_marks += expert_marks if is_alike else 0
        if ranks > 1:
            budget += _replicas(ranks, dense * item, dense_marks, config.bucket_bytes)
        if has_replicas:
            budget += _replicas(replicas, experts * item, expert_marks, config.bucket_bytes)
        return budget
    inside = weights_of_rank(model, layout, rank, inside=True)
    again = config.zero == 3 and config.parallel_optimizer_comm_recompute
    if ranks > 1:
        split = inside.split / config.tp + inside.replicated
        split += inside.experts if is_alike else 0
        budget += _shared(ranks, dense, split, again, layout)
    if has_replicas:
        budget += _shared(replicas, experts, experts, again, layout)
    return budget


def _replicas(ranks: int, size: int, marks: int, bucket: int) -> Budget:
    return budgets.replicas(ranks, size, marks, buckets=max(1, -(-size // bucket)))


def _shared(ranks: int, numbers: float, inside: float, again: bool, layout: Layout) -> Budget:
    """Return what parameters need that ``ranks`` share, of which some are gathered twice."""
    config = layout.parallel
    gathers = config.microbatches if config.zero == 3 else 1
    reduces = config.microbatches if config.zero >= 2 else 1
    weights = gathers * (numbers + (inside if again else 0)) * layout.bytes_of.weights
    sent = (weights + reduces * numbers * layout.reduce_bytes) * (ranks - 1) / ranks
    return Budget({"all_gather": gathers, "reduce_scatter": reduces}, round(sent))


@lru_cache(64)
def _tensors(model: TransformerConfig, layout: Layout, rank: int) -> tuple[int, int]:
    """Return how many parameters a rank of the pipeline has, without experts and of experts.

    Counted on two small models.
    """

    def is_of_experts(layers: int) -> list[bool]:
        small = Transformer(replace(model, num_layers=layers, moe_layers=None), device="meta")
        return [".experts." in name for name, _ in small.named_parameters()]

    one, two = is_of_experts(1), is_of_experts(2)
    experts = sum(two) - sum(one)
    layers = len(two) - len(one) - experts
    stages = layout.stages_of(rank)
    of_rank = layout.layers_of(model, rank)
    last = (2 if model.norm == "layer" else 1) + (0 if model.tied else 1)
    count = layers * len(of_rank)
    first = len(one) - experts - layers - last
    count += first * (0 in stages) + last * (layout.stages - 1 in stages)
    # The head of a tied model has its own copy where the embedding is elsewhere.
    count += model.tied and layout.stages - 1 in stages and 0 not in stages
    return count, experts * sum(map(model.is_sparse, of_rank))
