"""Parts of a batch, a sequence or the heads drop what the whole would: no processes needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close

import fusedops
from fusedops import add_layer_norm, add_rms_norm, attention, attention_varlen, bias_dropout_add
from fusedops._core import philox
from fusedops.models import ParallelConfig, Transformer, preset
from fusedops.models.parallelization.batch_partition import ProcessPartition
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.nn import AddLayerNorm, AddRMSNorm, Dropout
from fusedops.parallel.dropout import ShardOffsets

B, S, H = 4, 6, 16  # parts of 64 elements, which kernels without a bias would take for one row
P = 0.4
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
RESIDUAL: dict[str, Callable[..., Any]] = {
    "bias_dropout_add": lambda x, r, seed: bias_dropout_add(x, None, r, P, seed=seed),
    "add_layer_norm": lambda x, r, seed: add_layer_norm(x, r, (H,), dropout_p=P, seed=seed)[1],
    "add_rms_norm": lambda x, r, seed: add_rms_norm(x, r, (H,), dropout_p=P, seed=seed)[1],
}
SEED = torch.tensor([2**62 + 12345, -(2**40) - 7])  # offsets wrap around, both words have a sign
# A part of the tokens, two pieces of them, and two pieces of unequal size.
PLACES = [
    ShardOffsets(1, sequence_part=1, sequence_parts=3),
    ShardOffsets(1, context_part=1, context_parts=3),
    ShardOffsets(0, context_part=0, context_parts=2),
    ShardOffsets(1, 1, 2, context_part=1, context_parts=3),
]


def _hidden_seed(place: ShardOffsets, part: torch.Tensor) -> torch.Tensor:
    sequences, tokens, features = part.shape
    return philox.placed(SEED, place.rows(place.batch_part * sequences, tokens, features))


def _gradient(call: Callable[..., Any], x: torch.Tensor, *more: Any) -> tuple[Any, Any]:
    x = x.detach().clone().requires_grad_()
    output = call(x, *more)
    output.backward(torch.ones_like(output))
    return output.detach(), x.grad


def _tokens(place: ShardOffsets) -> torch.Tensor:
    count = S // (place.sequence_parts * place.context_parts)
    return torch.cat([torch.arange(*piece) for piece in place.pieces(count)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", RESIDUAL)
def test_parts_of_sequences_drop_what_the_whole_does(op: str, backend: str) -> None:
    x, residual = torch.randn(B, S, H), torch.randn(B, S, H)
    with fusedops.use_backend(backend):
        whole, grad = _gradient(RESIDUAL[op], x, residual, SEED)
        assert 0.2 < float((grad == 0).double().mean()) < 0.6
        for place in PLACES:
            rows, tokens = slice(2 * place.batch_part, 2 * place.batch_part + 2), _tokens(place)
            part = x[rows, tokens]
            placed = _hidden_seed(place, part)
            output, part_grad = _gradient(RESIDUAL[op], part, residual[rows, tokens], placed)
            assert torch.equal(output, whole[rows, tokens])
            assert torch.equal(part_grad, grad[rows, tokens])


@pytest.mark.parametrize("length", [8, 9])  # GPUs draw a counter for four, or for one
@pytest.mark.parametrize("backend", BACKENDS)
def test_some_heads_drop_what_all_do(backend: str, length: int) -> None:
    heads, size = 2, 8
    q, k, v = (torch.randn(B, heads, length, size) for _ in range(3))

    def call(query: torch.Tensor, at: Any, seed: torch.Tensor) -> torch.Tensor:
        return attention(query, k[at], v[at], None, P, is_causal=True, seed=seed)

    with fusedops.use_backend(backend):
        everything = (slice(None), slice(None))
        whole, grad = _gradient(call, q, everything, SEED)
        for part in (0, 1):
            at = (slice(2, 4), slice(part, part + 1))
            place = ShardOffsets(head_part=part, head_parts=2)
            seed = philox.placed(SEED, place.scores(len(q[at]), 1, length))
            expected = [whole[at], grad[at]]
            assert_all_close(_gradient(call, q[at], at, seed), expected, expected, depth=9)


def test_modules_draw_from_what_they_are_given() -> None:
    x, residual = torch.randn(B, S, H), torch.randn(B, S, H)
    norms, drop = (AddRMSNorm(H, dropout_p=P), AddLayerNorm(H, dropout_p=P)), Dropout(P)
    whole = [drop(x, seed=SEED), *(norm(x, residual, seed=SEED)[0] for norm in norms)]
    kept = whole[0] != 0
    assert torch.equal(whole[0][kept], (x * philox.scale(P))[kept])
    at = (slice(2, 4), slice(4, 6))
    seed = _hidden_seed(ShardOffsets(1, 2, 3), x[at])
    part = [drop(x[at], seed=seed), *(norm(x[at], residual[at], seed=seed)[0] for norm in norms)]
    for each, expected in zip(part, whole, strict=True):
        assert torch.equal(each, expected[at])
    assert drop.eval()(x) is x


def _dropping(**more: Any) -> Transformer:
    config = dataclasses.replace(preset("tiny-gpt2"), dropout=0.3, attention_dropout=0.3, **more)
    torch.manual_seed(1)
    return Transformer(config, dtype=torch.float64)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_a_model_drops_by_place(packed: bool) -> None:
    """Embedding, attention and both ends of each layer, for half of a batch."""
    model = _dropping(num_layers=2)
    tokens = torch.randint(model.config.vocab_size, (4, 10))
    ids = torch.randint(2, (4, 10)).cumsum(1) if packed else torch.zeros_like(tokens)
    given = [ids if packed else None, ids[2:] if packed else None]
    whole = model(tokens, document_ids=given[0], seed=SEED).detach()
    assert not torch.allclose(model(tokens, document_ids=given[0]), whole)
    half = model(tokens[2:], document_ids=given[1], seed=SEED, first_sequence=2)
    torch.testing.assert_close(half, whole[2:])
    assert not torch.allclose(model(tokens[2:], document_ids=given[1], seed=SEED), whole[2:])
    model.partition = ProcessPartition(ShardOffsets(batch_part=1))
    torch.testing.assert_close(model(tokens[2:], document_ids=given[1], seed=SEED), whole[2:])
    # One document a sequence is no document: the same scores are dropped.
    alike = model(tokens[2:], document_ids=torch.zeros_like(tokens[2:]), seed=SEED)
    torch.testing.assert_close(alike, model(tokens[2:], seed=SEED))


def test_each_call_of_a_forward_draws_numbers_of_its_own() -> None:
    model = _dropping(num_layers=3)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    drawn = model.make_context(tokens, seed=SEED).dropout_seeds
    assert drawn is not None
    assert len(drawn.rows) == len({tuple(each) for each in drawn.rows.tolist()}) == 10
    assert model.eval().make_context(tokens, seed=SEED).dropout_seeds is None


def test_micro_batches_draw_what_the_whole_step_does() -> None:
    tokens = torch.randint(100, (4, 10))
    found = []
    for parts in (1, 2):
        model = _dropping(num_layers=2)
        run = TrainEngine(model, ParallelConfig(microbatches=parts))
        shards = [run.shard_batch(each, each) for each in tokens.chunk(parts)]
        torch.manual_seed(5)
        run.step(shards, torch.tensor(40))
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_all_close(found[1], found[0], found[0], depth=model.config.hidden_size)


def test_what_is_no_seed_is_refused() -> None:
    x, q, ends = torch.zeros(2, H), torch.zeros(1, 1, 3, 4), torch.tensor([0, 3])
    packed = (*[q[0].transpose(0, 1)] * 3, ends, ends, 3, 3)
    ints = torch.zeros(6, dtype=torch.int64)
    pair, heads = r"bias_dropout_add: seed must be of shape \[2\], or \[6\] and", r"\[5\] or \[11\]"
    with pytest.raises(ValueError, match=pair):
        bias_dropout_add(x, None, x, P, seed=ints[:3])
    with pytest.raises(TypeError, match="bias_dropout_add: seed must be int64, got float32"):
        bias_dropout_add(x, None, x, P, seed=torch.zeros(2))
    with pytest.raises(ValueError, match=rf"attention: seed must be of shape \[2\], or {heads}"):
        attention(q, q, q, dropout_p=P, seed=ints)
    with pytest.raises(ValueError, match=r"attention_varlen: seed .* \[2\], or \[11\]"):
        attention_varlen(*packed, dropout_p=P, seed=ints[:5])
    pieces_of_no_element = torch.tensor([1, 2, 32, 32, 0, 0])
    with fusedops.use_backend("cpp"), pytest.raises(ValueError, match="seed must be {seed, offs"):
        bias_dropout_add(x, None, x, P, seed=pieces_of_no_element)
