"""Convolutions and recurrences over sharded sequences equal one process: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import comparing
import pytest
import torch
from run_ranks import on_threads
from torch import Tensor, nn
from torch import distributed as dist

import fusedops
from fusedops import UnsupportedError
from fusedops.parallel import (
    context_causal_conv1d,
    context_gated_delta_rule,
    context_selective_state_space,
    shard_sequence,
)
from fusedops.parallel.comm import collectives

pytestmark = pytest.mark.distributed
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "convolution": (fusedops.causal_conv1d, context_causal_conv1d),
    "delta_rule": (fusedops.gated_delta_rule, context_gated_delta_rule),
    "delta_rule_by_channel": (fusedops.gated_delta_rule, context_gated_delta_rule),
    "state_space": (fusedops.selective_state_space, context_selective_state_space),
}


class Problem(NamedTuple):
    """A call, of which ``tokens`` are sharded, and the gradients of output and state."""

    tokens: dict[str, Tensor]
    parameters: dict[str, Tensor]
    initial_state: Tensor
    options: dict[str, Any]
    grads: tuple[Tensor, Tensor]
    dim: int = 1


def problem(name: str, length: int, dtype: torch.dtype) -> Problem:
    """Return a problem in which states matter many tokens later."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if name == "convolution":
        tokens = {"input": draw(2, length, 6).mT}
        parameters = {"weight": draw(6, 4), "bias": draw(6)}
        grads = draw(2, 6, length), draw(2, 6, 3)
        return Problem(tokens, parameters, draw(2, 6, 3), {"activation": "silu"}, grads, 2)
    rows = (2, length, 4)
    if name == "state_space":
        tokens = {"input": draw(*rows, 6), "dt": draw(*rows), "z": draw(*rows, 6)}
        tokens |= {"B": draw(2, length, 2, 5), "C": draw(2, length, 2, 5)}
        parameters = {"A": -0.1 * draw(4).abs(), "D": draw(4), "dt_bias": draw(4)}
        grads, options = (draw(*rows, 6), draw(2, 4, 6, 5, dtype=wide)), {"dt_softplus": True}
        return Problem(tokens, parameters, draw(2, 4, 6, 5, dtype=wide), options, grads)
    channels = (8,) if name == "delta_rule_by_channel" else ()
    tokens = {"query": draw(2, length, 2, 8), "key": draw(2, length, 2, 8), "value": draw(*rows, 6)}
    tokens |= {"gate": -0.05 * draw(*rows, *channels).abs(), "beta": draw(*rows).sigmoid()}
    grads = draw(*rows, 6), draw(2, 4, 8, 6, dtype=wide)
    return Problem(tokens, {}, draw(2, 4, 8, 6, dtype=wide), {"qk_norm": True}, grads)


def results(
    function: Callable[..., Any], p: Problem, *, use_state_grad: bool, **options: Any
) -> dict[str, Tensor]:
    """Return output, state and the gradients of all tensors."""
    inputs = {**p.tokens, **p.parameters, "initial_state": p.initial_state}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output, state = function(**leaves, **p.options, **options, return_state=True)
    # The gradient of the state is the sum of those of the ranks.
    grads = p.grads[0], p.grads[1] * int(use_state_grad)
    found = torch.autograd.grad((output, state), leaves.values(), grads, materialize_grads=True)
    return {"output": output, "state": state} | dict(zip(leaves, found, strict=True))


def _as_one_process(rank: int, balance: str, dtype: torch.dtype, length: int, *names: str) -> None:
    group = dist.group.WORLD
    for name in names:
        alone, sharded = FUNCTIONS[name]
        base, truth = problem(name, length, dtype), problem(name, length, torch.float64)

        def shard(tensor: Tensor, dim: int = base.dim) -> Tensor:
            return shard_sequence(tensor, group, dim, balance=balance)

        mine = base._replace(
            tokens={key: shard(tensor) for key, tensor in base.tokens.items()},
            grads=(shard(base.grads[0]), base.grads[1]),
        )
        # Gradients of what all ranks have are parts of a sum.
        is_last = rank == group.size() - 1
        found = results(sharded, mine, use_state_grad=is_last, group=group, balance=balance)
        for key in (*base.parameters, "initial_state"):
            found[key] = collectives.all_reduce(found[key], group).wait()
        with fusedops.use_backend("torch"):
            want, eager = (results(alone, p, use_state_grad=True) for p in (truth, base))
        for key, tensor in found.items():
            pair = want[key], eager[key]
            if key in base.tokens or key == "output":
                pair = shard(pair[0]), shard(pair[1])
            comparing.assert_close(tensor, *pair, f"{name}: {key}", depth=length)


@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("ranks", "dtype", "length"),
    [
        (1, torch.float32, 21),
        (2, torch.float64, 30),  # odd shares: zigzag has parts of 8 and of 7
        (3, torch.float32, 45),
        (4, torch.float64, 40),
        (2, torch.float32, 280),  # several chunks
        (2, torch.bfloat16, 64),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@on_threads("ranks")
def test_shards_equal_one_process(
    rank: int, balance: str, ranks: int, dtype: torch.dtype, length: int
) -> None:
    del ranks
    _as_one_process(rank, balance, dtype, length, *FUNCTIONS)


def test_shards_on_processes_equal_one(on_processes: Callable[..., list[Any]]) -> None:
    on_processes(_as_one_process, 2, "zigzag", torch.float64, 30, *FUNCTIONS)
    on_processes(_as_one_process, 3, "contiguous", torch.float32, 45, *FUNCTIONS)


def _compiled_gradients(rank: int) -> None:
    p, group = problem("delta_rule", 24, torch.float64), dist.group.WORLD
    mine = p._replace(tokens={key: shard_sequence(x, group) for key, x in p.tokens.items()})
    mine = mine._replace(grads=(shard_sequence(p.grads[0], group), p.grads[1]))
    compiled = torch.compile(context_gated_delta_rule, backend="aot_eager", fullgraph=True)
    found, want = (
        results(function, mine, use_state_grad=True, group=group)
        for function in (compiled, context_gated_delta_rule)
    )
    for key, tensor in found.items():
        comparing.assert_close(tensor, want[key], want[key], key)


@pytest.mark.ci
def test_compiled_shards_equal_eager_ones(on_processes: Callable[..., list[Any]]) -> None:
    on_processes(_compiled_gradients, 2)


@on_threads(2)
def test_only_edges_and_states_are_sent(rank: int) -> None:
    for name, size in (("convolution", 2 * 6 * 3), ("delta_rule", 2 * 4 * 8 * (8 + 6))):
        p = problem(name, 24, torch.float32)
        tokens = {key: shard_sequence(x, dist.group.WORLD, p.dim) for key, x in p.tokens.items()}
        with collectives.recorded() as log:
            FUNCTIONS[name][1](**tokens, **p.parameters, group=dist.group.WORLD)
        # Of the two parts of a rank, to the other rank.
        assert [call.bytes for call in log.calls] == [2 * size * 4]


class _Model(nn.Module):
    """A layer of each kind, on complete sequences or on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 48), nn.Linear(16, 4)
        self.weight, self.A = nn.Parameter(torch.randn(48, 4)), nn.Parameter(-torch.rand(2))

    def forward(self, x: Tensor, **shards: Any) -> Tensor:
        place = 1 if shards else 0
        conv, delta, space = (
            FUNCTIONS[name][place] for name in ("convolution", "delta_rule", "state_space")
        )
        mixed = conv(self.enter(x).mT, self.weight, activation="silu", **shards).mT
        query, key, value = mixed.unflatten(2, (6, 8)).split(2, 2)
        gate, beta = -value[..., 0].square(), value[..., 1].sigmoid()
        value = delta(query, key, value, gate, beta, qk_norm=True, **shards)
        value = space(value, gate, self.A, query, key, dt_softplus=True, **shards)
        return self.leave(value.flatten(2)).square()


def _loss(model: nn.Module, batch: dict[str, Tensor], **shards: Any) -> tuple[Tensor, Tensor]:
    return model(batch["x"], **shards).sum(), torch.tensor(float(batch["x"].numel()))


def _parallelize(model: nn.Module, mesh: Any, case: fusedops.testing.Case) -> Any:
    group, balance = mesh["cp"].get_group(), case.options["balance"]

    def forward_backward(batch: dict[str, Tensor]) -> Tensor:
        mine = {"x": shard_sequence(batch["x"], group, balance=balance)}
        total, _ = _loss(model, mine, group=group, balance=balance)
        loss = total / batch["x"].numel()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        return collectives.all_reduce(loss.detach(), group).wait()

    return fusedops.testing.Parallel(model, forward_backward)


def _batch(case: fusedops.testing.Case, generator: torch.Generator) -> dict[str, Tensor]:
    shape = case.batch_size, case.seq_len, 4
    return {"x": torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)}


def test_a_model_trains_as_on_one_process() -> None:
    report = fusedops.verify(
        _Model,
        [{"cp": 2}, {"cp": 3}],
        parallelize=_parallelize,
        options={"balance": ["contiguous", "zigzag"]},
        batch=_batch,
        loss=_loss,
        seq_lens=[24, 36],
        cases=8,
    )
    assert len(report.passed) == 8


@on_threads(2)
def test_bad_input_is_refused_before_anything_is_sent(rank: int) -> None:
    group, p = dist.group.WORLD, problem("delta_rule", 6, torch.float32)
    for name, (_, function) in FUNCTIONS.items():
        p = problem(name, 6, torch.float32)
        tensors = {**p.tokens, **p.parameters}
        with pytest.raises(TypeError, match="group must be a torch.distributed.Pro"):
            function(**tensors, group=None)
        with pytest.raises(ValueError, match="balance must be one of"):
            function(**tensors, group=group, balance="document")
        with pytest.raises(UnsupportedError, match="packed sequences over several ranks"):
            function(**tensors, group=group, cu_seqlens=torch.tensor([0, 6]))
        first = next(iter(tensors))
        with pytest.raises(ValueError, match="must be of"):
            function(**{**tensors, first: tensors[first][0]}, group=group)
    with pytest.raises(ValueError, match="of 3 or more tokens in each part"):
        input, weight = torch.zeros(1, 2, 5), torch.zeros(2, 4)
        context_causal_conv1d(input, weight, group=group)
