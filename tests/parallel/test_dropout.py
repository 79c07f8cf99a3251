"""Parts of a batch, a sequence or the heads drop what the whole would: no processes needed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import assert_same, whole
from torch import nn

import fusedops
from fusedops import add_layer_norm, add_rms_norm, attention, bias_dropout_add
from fusedops._core import philox
from fusedops.models import ParallelConfig, Transformer, parallelize, parallelized, preset
from fusedops.models.parallelized import attach
from fusedops.nn import AddRMSNorm, Dropout
from fusedops.parallel.dropout import Place, place_dropout

B, S, H = 4, 6, 16  # parts of 64 elements, which kernels without a bias would take for one row
P = 0.4
RESIDUAL: dict[str, Callable[..., Any]] = {
    "bias_dropout_add": lambda x, r, seed: bias_dropout_add(x, None, r, P, seed=seed),
    "add_layer_norm": lambda x, r, seed: add_layer_norm(x, r, (H,), dropout_p=P, seed=seed)[1],
    "add_rms_norm": lambda x, r, seed: add_rms_norm(x, r, (H,), dropout_p=P, seed=seed)[1],
}


def _gradient(call: Callable[..., Any], x: torch.Tensor, *more: Any) -> tuple[Any, Any]:
    x = x.detach().clone().requires_grad_()
    output = call(x, *more)
    output.backward(torch.ones_like(output))
    return output.detach(), x.grad


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("op", RESIDUAL)
def test_parts_of_sequences_drop_what_the_whole_does(op: str, backend: str) -> None:
    x, residual = torch.randn(B, S, H), torch.randn(B, S, H)
    with fusedops.use_backend(backend):
        torch.manual_seed(3)
        seed = philox.new_seed(x.device)
        whole, grad = _gradient(RESIDUAL[op], x, residual, seed)
        assert 0.2 < float((grad == 0).double().mean()) < 0.6
        for batch, tokens_part in ((0, 0), (1, 0), (0, 2), (1, 1)):
            sequences = slice(2 * batch, 2 * batch + 2)
            tokens = slice(2 * tokens_part, 2 * tokens_part + 2)
            torch.manual_seed(3)
            part = x[sequences, tokens]
            place = Place(batch_part=batch, sequence_part=tokens_part, sequence_parts=3)
            placed = place.of_rows(part)
            output, part_grad = _gradient(RESIDUAL[op], part, residual[sequences, tokens], placed)
            assert torch.equal(output, whole[sequences, tokens])
            assert torch.equal(part_grad, grad[sequences, tokens])


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_some_heads_drop_what_all_do(backend: str) -> None:
    heads, size = 4, 8
    q, k, v = (torch.randn(B, heads, 9, size) for _ in range(3))

    def call(query: torch.Tensor, at: Any, seed: torch.Tensor) -> torch.Tensor:
        return attention(query, k[at], v[at], None, P, is_causal=True, seed=seed)

    with fusedops.use_backend(backend):
        torch.manual_seed(3)
        everything = (slice(None), slice(None))
        whole, grad = _gradient(call, q, everything, philox.new_seed(q.device))
        for part in (0, 1):
            at = (slice(2, 4), slice(2 * part, 2 * part + 2))
            torch.manual_seed(3)
            place = Place(batch_part=1, head_part=part, head_parts=2)
            seed = place.of_scores(q[at], k[at])
            output, part_grad = _gradient(call, q[at], at, seed)
            found = {"output": output, "query": part_grad}
            expected = {"output": whole[at], "query": grad[at]}
            assert_same(found, expected, expected, depth=9)


def test_modules_inside_draw_by_place() -> None:
    """As those of a model that is split: by their attribute, norms on split sequences too."""
    x, residual = torch.randn(B, S, H), torch.randn(B, S, H)
    norm, drop = AddRMSNorm(H, dropout_p=P), Dropout(P)
    torch.manual_seed(3)
    whole = drop(x), *norm(x, residual)
    kept = whole[0] != 0
    assert torch.equal(whole[0][kept], (x * philox.scale(P))[kept])
    place_dropout(nn.ModuleList([norm, drop]), Place(1, 2, 3))
    at = (slice(2, 4), slice(4, 6))
    torch.manual_seed(3)
    part = drop(x[at]), *norm(x[at], residual[at])
    for each, expected in zip(part, whole, strict=True):
        assert torch.equal(each, expected[at])
    assert drop.eval()(x) is x


def test_a_model_drops_by_place() -> None:
    """Embedding, attention and both ends of each layer, for half of a batch."""
    config = dataclasses.replace(preset("tiny-gpt2"), dropout=0.3, attention_dropout=0.3)
    model = Transformer(config)
    tokens = torch.randint(config.vocab_size, (4, 10))
    torch.manual_seed(3)
    whole = model(tokens).detach()
    torch.manual_seed(4)
    assert not torch.allclose(model(tokens), whole)
    place_dropout(model, Place(batch_part=1))
    torch.manual_seed(3)
    half = {"": model(tokens[2:]).detach()}
    expected = {"": whole[2:]}
    assert_same(half, expected, expected, depth=config.hidden_size)


def _step(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and gradients of a step with dropout, as one process has them."""
    run = parallelized(model)
    shard = run.shard_batch(*(run.rows(each) for each in (tokens, tokens.roll(-1, 1))))
    count = run.count(shard.labels)
    run.begin(last=True)
    torch.manual_seed(11)
    output = model(shard.tokens, shard.labels, positions=shard.positions)
    run.loss(output, count).backward()
    grads = {name: whole(each.grad) for name, each in model.named_parameters()}
    return {"loss": run.mean_loss([output], count).detach(), **grads}


def _on_ranks(world: World) -> None:
    config = dataclasses.replace(
        preset("tiny-gpt2"), dropout=0.2, attention_dropout=0.2, num_layers=2, vocab_size=131
    )
    torch.manual_seed(2)
    model = Transformer(config, dtype=torch.float64)
    tokens = torch.randint(config.vocab_size, (8, 16))
    expected = _step(attach(copy.deepcopy(model), parallelized(model)), tokens)
    found = _step(parallelize(model, ParallelConfig(dp=4, tp=2, sp=True)), tokens)
    assert_same(found, expected, expected, depth=config.hidden_size)


@pytest.mark.distributed
def test_a_model_on_eight_ranks_drops_as_on_one(on_ranks: Callable[..., Any]) -> None:
    """By sequences, heads and parts of sequences."""
    on_ranks(_on_ranks)


def test_what_is_no_place_or_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_part must be below sequence_parts, 2, got 2"):
        Place(sequence_part=2, sequence_parts=2)
    x = torch.zeros(2, H)
    with pytest.raises(ValueError, match=r"Place: input must be \[sequences, tokens, features\]"):
        Place().of_rows(x)
    with pytest.raises(ValueError, match=r"bias_dropout_add: seed must be of shape \[2\], or"):
        bias_dropout_add(x, None, x, P, seed=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="bias_dropout_add: seed must be int64, got float32"):
        bias_dropout_add(x, None, x, P, seed=torch.zeros(2))
