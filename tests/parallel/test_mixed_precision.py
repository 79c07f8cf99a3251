"""Mixed precision: bfloat16 weights in forward and backward, float32 masters and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import full_tensor
from torch import nn
from torch.nn.functional import cross_entropy

from fusedops.models import ParallelConfig, Transformer, initialize, parallelize, preset
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.pipeline import EMBEDDING
from fusedops.optim import AdamW
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
HALF, MICROBATCHES, SEQUENCES, TOKENS = torch.bfloat16, 16, 32, 16
MODEL, TIED, EXPERTS = (preset(f"tiny-{name}") for name in ("llama", "gpt2", "mixtral"))
RECIPE = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}


def _model(config: Any = MODEL) -> Transformer:
    """Return a float32 model whose weights bfloat16 can represent."""
    model = Transformer(config, dtype=torch.float32)
    initialize(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(MODEL.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _step(engine: TrainEngine, step: int) -> float:
    """Leave the gradients of a step in the model; return its loss."""
    parts = [tensor.chunk(engine.config.microbatches) for tensor in _batch(step)]
    shards = [
        engine.shard_batch(engine.rows(tokens), engine.rows(labels))
        for tokens, labels in zip(*parts, strict=True)
    ]
    count = torch.tensor(SEQUENCES * TOKENS)
    return float(engine.mean_loss(engine.step(shards, count), count))


def _formula(
    model: Transformer, parts: int, step: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and the float64 sum of the bfloat16 gradients of so many parts."""
    half = _model(model.config).to(HALF)
    half.load_state_dict(model.state_dict())
    sums = {name: torch.zeros(p.shape).double() for name, p in half.named_parameters()}
    loss = 0.0
    tokens, labels = (tensor.chunk(parts) for tensor in _batch(step))
    for part, targets in zip(tokens, labels, strict=True):
        half.zero_grad()
        output = half(part, targets)
        share = output.total / (SEQUENCES * TOKENS) + output.auxiliary / parts
        share.backward()
        loss += float(share.detach())
        for name, parameter in half.named_parameters():
            sums[name] += parameter.grad.double()
    return loss, sums


def _error(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the distance of all gradients, as a share of their norm."""
    pairs = [(grads[name].double(), grad) for name, grad in expected.items()]
    distance = sum(float((grad - other).square().sum()) for grad, other in pairs)
    return (distance / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def _gradients(
    rank: int, model: Any, values: dict[str, Any], steps: int = 1
) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters that this rank has."""
    values = {"microbatches": MICROBATCHES} | values
    engine = parallelize(_model(model), ParallelConfig(**values))
    for _ in range(steps):  # the buckets' memory has gradients of an earlier step
        engine.model.zero_grad()
        _step(engine, 0)
    named = engine.model.named_parameters()
    return {name: full_tensor(parameter.grad) for name, parameter in named}


@pytest.mark.parametrize("zero", range(4))
def test_float32_gradients_are_closer_to_float64_than_bfloat16_ones(zero: int) -> None:
    """Both than sums of the same micro-batches and than a model in float64, which rounds nothing.

    The second error is also that of bfloat16's products.
    """
    layout = {"dp": 2, "zero": zero}
    wide = threads.run(_gradients, 2, MODEL, layout | RECIPE)[0]
    narrow = threads.run(_gradients, 2, MODEL, layout | {"param_dtype": "bfloat16"})[0]
    assert {grad.dtype for grad in wide.values()} == {torch.float32}
    _, sums = _formula(_model(), 2 * MICROBATCHES)
    assert 1000 * _error(wide, sums) < _error(narrow, sums)
    exact = _model().double()
    tokens, labels = _batch(0)
    logits = exact(tokens)
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    reference = {name: parameter.grad for name, parameter in exact.named_parameters()}
    assert _error(wide, reference) < _error(narrow, reference)


def _trained(rank: int, values: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = parallelize(_model(), ParallelConfig(microbatches=MICROBATCHES, **values))
    optimizer = engine.optimizer(**OPTIMIZER)
    losses = []
    for step in range(2):
        losses.append(_step(engine, step))
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state
    named = engine.model.named_parameters()
    return losses, {name: full_tensor(states[p].get("master", p)) for name, p in named}


@pytest.mark.parametrize("values", [{}, *({"dp": 2, "zero": zero} for zero in range(4))], ids=str)
def test_training_is_that_of_the_formula_in_every_layout(values: dict[str, Any]) -> None:
    """Bfloat16 copies of float32 weights, gradients summed in float32."""
    ranks = values.get("dp", 1)
    losses, masters = threads.run(_trained, ranks, values | RECIPE)[0]
    model = _model()
    optimizer = AdamW(model.parameters(), **OPTIMIZER)
    for step, loss in enumerate(losses):
        expected, sums = _formula(model, ranks * MICROBATCHES, step)
        assert abs(loss - expected) < 1e-4 * expected, (step, loss, expected)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].float()
        optimizer.step()
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert _error(masters, weights) < 1e-4


LAYOUTS: list[tuple[Any, dict[str, Any]]] = [
    (MODEL, {"dp": 2, "pp": 2}),
    (MODEL, {"dp": 2, "pp": 2, "pipeline_schedule": "zero_bubble"}),  # backwards in two parts
    (TIED, {"dp": 2, "pp": 2, "zero": 2}),  # both ranks of the pipeline have the embedding
    (MODEL, {"dp": 2, "zero": 3, "shard_threshold": 8000}),
    (MODEL, {"dp": 2, "zero": 1, "not_sharded": ("*norm*",), "overlap": False}),
    (MODEL, {"dp": 2, "tp": 2, "sp": True, "zero": 3}),
    (MODEL, {"dp": 2, "cp": 2, "zero": 3, "recompute": "full"}),
    (EXPERTS, {"dp": 2, "ep": 2, "zero": 1}),  # experts are on one rank each
    (EXPERTS, {"dp": 4, "ep": 2, "zero": 2}),
    (EXPERTS, {"dp": 2, "ep": 2, "offload": "experts"}),
]


@pytest.mark.ci(every=2)
@pytest.mark.parametrize(("model", "values"), LAYOUTS, ids=[str(values) for _, values in LAYOUTS])
def test_gradients_are_those_of_the_formula_in_other_layouts(
    model: Any, values: dict[str, Any]
) -> None:
    values = values | RECIPE | {"microbatches": 4}
    ranks = ParallelConfig(**values).sizes.ranks
    _, sums = _formula(_model(model), 4 * values["dp"])
    found: dict[str, torch.Tensor] = {}
    for part in threads.run(_gradients, ranks, model, values, 2):
        assert {grad.dtype for grad in part.values()} == {torch.float32}
        found |= part
    assert found.keys() == sums.keys()
    # One process adds both gradients of a tied embedding in bfloat16, and a token's experts too;
    # ranks add other parts of a product or of a sequence.
    others = model is EXPERTS or bool({"tp", "cp"} & values.keys())
    rounded = sums if others else {name: sums[name] for name in sums if name == EMBEDDING}
    exact = {name: grad for name, grad in sums.items() if model is not TIED or name != EMBEDDING}
    assert _error(found, rounded) < 2e-2
    assert others or _error(found, exact) < 1e-5


def _tied(rank: int, values: dict[str, Any]) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    torch.manual_seed(rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model[2].weight = model[0].weight
    engine = parallelize(model, ParallelConfig(dp=2, mode="manual", **values))
    weight = engine.model[0].weight
    assert weight is engine.model[2].weight
    engine.begin(last=True)
    engine.model(torch.ones(2, 6, dtype=HALF if values["zero"] == 0 else None)).sum().backward()
    assert weight.grad.dtype == torch.float32
    return [full_tensor(weight).to(HALF), full_tensor(weight.grad)]


def test_modules_of_ones_own_share_a_parameter_in_half_precision() -> None:
    plain, sharded = (threads.run(_tied, 2, RECIPE | {"zero": zero})[1] for zero in (0, 1))
    for one, other in zip(plain, sharded, strict=True):
        torch.testing.assert_close(one.to(HALF), other.to(HALF))
