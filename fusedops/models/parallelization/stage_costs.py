"""Relative costs of the layers of a transformer, to cut it into even stages.

By the operations that a token needs, which asks for nothing; or measured: forward and backward of
one layer of each kind and of the head, on the device that trains.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.models.config import TransformerConfig
from fusedops.models.initialize import initialize
from fusedops.models.transformer import Transformer

_RUNS = 5


class Costs(NamedTuple):
    """In one unit."""

    layers: list[float]  # of each layer
    first: float  # of what stands before them
    last: float  # of what stands behind them, the loss included


def by_operations(model: TransformerConfig) -> Costs:
    """Return the multiplications and additions of a token's forward; a look-up has none."""
    products = 4 * model.query_width * model.seq_len * (0.5 if model.causal else 1.0)
    layers = [2 * model.used_weights(index) + products for index in range(model.num_layers)]
    return Costs(layers, 0.0, 2.0 * model.output(own_weight=True).total)


def measured(
    model: TransformerConfig,
    *,
    seq_len: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Costs:
    """Return the seconds of forward and backward of a sequence: medians of a few runs.

    A model with one layer of each kind is built for the measurement.
    """
    length = model.seq_len if seq_len is None else seq_len
    kinds = model.kinds(range(model.num_layers))
    network = Transformer(model, device="meta", dtype=dtype)
    for name in [name for name in network.layers if int(name) not in kinds]:
        del network.layers[name]
    network.to_empty(device=device)
    initialize(network, 0)
    tokens = torch.arange(length, device=device)[None] % model.vocab_size
    with torch.random.fork_rng():
        context = network.make_context(tokens)
        x_BSH = network.embedding(tokens, context).detach()
        first = _seconds(lambda _: network.embedding(tokens, context), x_BSH)
        last = _seconds(network.output, x_BSH, tokens, context)
        of_kind = {}
        for index in kinds:
            layer: nn.Module = network.layers[str(index)]
            is_query_layer = index == model.num_layers - 1 and model.query_layer
            query_input_BSH = x_BSH if is_query_layer else None
            seconds = _seconds(layer, x_BSH, context, query_input_BSH)
            of_kind[model.is_sparse(index)] = seconds
    return Costs([of_kind[model.is_sparse(i)] for i in range(model.num_layers)], first, last)


def _seconds(run: Callable[..., Any], x_BSH: torch.Tensor, *args: Any) -> float:
    """Return the median time of a forward and its backward; the first run does not count."""
    times = []
    for _ in range(_RUNS + 1):
        input_BSH = x_BSH.detach().requires_grad_()
        _wait(input_BSH.device)
        began = time.perf_counter()
        output = run(input_BSH, *args)
        output = output[0] if isinstance(output, tuple) else output  # a layer's auxiliary loss
        torch.autograd.backward(output, torch.ones_like(output))
        _wait(input_BSH.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
