"""What each rank of a layout sends in a training step, by kind of parallelism: exact formulae.

Composed of ``parallel/budgets.py``, whose formulae the tests compare with what the stack records.
Two numbers are not known before a step: the rows that a router sends to other ranks (taken to be
even), and the keys that causality lets ring attention skip (all are counted).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from fusedops.models import Transformer
from fusedops.models.config import TransformerConfig
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel import budgets
from fusedops.parallel.budgets import Budget
from fusedops.parallel.pipeline.schedules import table
from fusedops.planner.layout import Layout, check
from fusedops.planner.memory import weights_of_rank

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
        context = _context(model, layout) * len(layers) + _context_recomputation(
            model, layout
        ) * len(again)
        parts["context"] = context * config.microbatches
    if config.ep > 1:
        sparse, repeated = (sum(map(model.is_sparse, some)) for some in (layers, again))
        experts = (
            _experts(model, layout) * sparse + _experts_recomputation(model, layout) * repeated
        )
        parts["experts"] = experts * config.microbatches
    if config.pp > 1:
        parts["pipeline"] = _pipeline(model, layout, rank)
    if config.sizes.data > 1:
        parts["data"] = _data(model, layout, rank)
    return parts


def total(parts: Mapping[str, Budget]) -> Budget:
    """Return the sum of budgets."""
    result = Budget()
    for budget in parts.values():
        result += budget
    return result


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
    """Return what a micro-batch needs of tensor parallelism."""
    config = layout.parallel
    activation, tp = _activation(model, layout), config.tp
    halves = 2 if config.overlap_microbatches else 1
    stages = layout.stages_of(rank)
    ends = (0 in stages) + (layout.stages - 1 in stages)
    of_rank, repeated = _layers(model, layout, rank)
    layers = len(of_rank)
    if config.sp:
        overlap = config.overlap and config.cp == 1 and halves == 1
        # An MLP that recomputes its activation has products that overlap nothing.
        plain_mlp = "activation" in config.recomputed and not model.gated
        layer = budgets.sequence_layer(
            tp, activation, overlap=overlap, overlap_mlp=not plain_mlp, halves=halves
        )
        repeat = budgets.sequence_layer_recomputation(
            tp, activation, overlap=overlap, halves=halves
        )
        part = activation * (tp - 1) // tp
        end = Budget({"all_gather": 1, "reduce_scatter": 1}, 2 * part)
    else:
        layer = budgets.tensor_layer(tp, activation, halves=halves)
        repeat = budgets.tensor_layer_recomputation(tp, activation, halves=halves)
        end = budgets.all_reduces(tp, [activation])
    weight = layout.bytes_of.weights
    if model.kv_heads < tp:  # ranks share heads of keys, and add up their gradients
        shared = model.kv_heads * model.size_of_head * model.hidden_size * weight
        layer += budgets.all_reduces(tp, [shared] * 2)
    if not config.mp_comm_recompute:  # only rings run again
        rings = repeat.calls.get("send_receive", 0)
        repeat = Budget({"send_receive": rings}, rings * activation // tp)
    budget = layer * layers + repeat * len(repeated) + end * ends
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


def _context(model: TransformerConfig, layout: Layout) -> Budget:
    """Return what a layer and micro-batch needs of context parallelism."""
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


def _experts(model: TransformerConfig, layout: Layout) -> Budget:
    """Return what a layer and micro-batch needs of expert parallelism, with even routing."""
    config = layout.parallel
    away, row, result = _routed(model, layout)
    return budgets.expert_layer(
        config.ep,
        away,
        away,
        row=row,
        result=result,
        chunks=config.ep_chunks,
        halves=2 if config.overlap_microbatches else 1,
    )


def _experts_recomputation(model: TransformerConfig, layout: Layout) -> Budget:
    """Return what a second forward needs: all but the two exchanges of gradients."""
    config = layout.parallel
    away, row, result = _routed(model, layout)
    exchanges = 2 * config.ep_chunks * (2 if config.overlap_microbatches else 1)
    budget = _experts(model, layout)
    calls = {kind: count - exchanges for kind, count in budget.calls.items()}
    return Budget(calls, budget.bytes - away * (row + result))


def _routed(model: TransformerConfig, layout: Layout) -> tuple[int, int, int]:
    """Return the rows that leave a rank, and the bytes of such a row and of its result."""
    config, item = layout.parallel, layout.bytes_of.activations
    away = layout.tokens(model) * model.top_k * (config.ep - 1) // config.ep
    row = PayloadLayout(model.hidden_size, _DTYPES[item], torch.float32, pairs=1).stride
    return away, row, model.hidden_size * item


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
    """Return what gradients and weights need of data parallelism."""
    config, sizes = layout.parallel, layout.bytes_of
    ranks = config.sizes.data
    weights = weights_of_rank(model, layout, rank)
    dense = round(weights.split / config.tp + weights.replicated)
    experts, replicas = weights.experts // config.ep, ranks * config.tp // config.ep
    if config.zero == 0:
        marks = _MARK * _tensors(model, layout, rank)
        item = max(sizes.gradients, _STATISTIC)  # half-precision gradients are summed in float32
        budget = _replicas(ranks, dense * item, marks, config.bucket_bytes)
        if experts and replicas > 1:
            budget += _replicas(replicas, experts * item, 0, config.bucket_bytes)
        return budget
    inside = weights_of_rank(model, layout, rank, inside=True)
    again = config.zero == 3 and config.parallel_optimizer_comm_recompute
    budget = _shared(ranks, dense, inside.split / config.tp + inside.replicated, again, layout)
    if experts and replicas > 1:
        budget += _shared(replicas, experts, experts, again, layout)
    return budget


def _replicas(ranks: int, size: int, marks: int, bucket: int) -> Budget:
    return budgets.replicas(ranks, size, marks, buckets=max(1, -(-size // bucket)))


def _shared(ranks: int, numbers: float, inside: float, again: bool, layout: Layout) -> Budget:
    """Return what parameters need that ``ranks`` share, of which some are gathered twice."""
    config, sizes = layout.parallel, layout.bytes_of
    gathers = config.microbatches if config.zero == 3 else 1
    reduces = config.microbatches if config.zero >= 2 else 1
    weights = gathers * (numbers + (inside if again else 0)) * sizes.weights
    sent = (weights + reduces * numbers * sizes.gradients) * (ranks - 1) / ranks
    return Budget({"all_gather": gathers, "reduce_scatter": reduces}, round(sent))


@lru_cache(64)
def _tensors(model: TransformerConfig, layout: Layout, rank: int) -> int:
    """Return how many parameters a rank of the pipeline has; counted on two small models."""
    one, two = (
        len(
            list(
                Transformer(
                    replace(model, num_layers=n, moe_layers=None), device="meta"
                ).parameters()
            )
        )
        for n in (1, 2)
    )
    layers = two - one
    stages = layout.stages_of(rank)
    last = (2 if model.norm == "layer" else 1) + (0 if model.tied else 1)
    count = layers * len(layout.layers_of(model, rank))
    count += (one - layers - last) * (0 in stages) + last * (layout.stages - 1 in stages)
    # The head of a tied model has its own copy where the embedding is elsewhere.
    return count + (model.tied and layout.stages - 1 in stages and 0 not in stages)
