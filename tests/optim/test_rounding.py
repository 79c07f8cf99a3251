"""Mixtures of dtypes in one step, and stochastic rounding: its values, means and numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from comparing import assert_same_bits
from reachable import reachable
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.ops.adamw import Draw, TensorLists, adamw
from fusedops.optim import AdamW

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
MIXTURES = [
    *itertools.product(FLOATING, FLOATING, FLOATING, (None, torch.bfloat16)),
    (torch.float32, torch.bfloat16, torch.float32, torch.float16),
]
BACKENDS = ["cpp", pytest.param("triton", marks=pytest.mark.interpreter)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
SIZE = 3000


def batch(
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype,
    copy: torch.dtype | None = None,
    *,
    amsgrad: bool = False,
    sizes: tuple[int, ...] = (SIZE, 5, 0),
) -> TensorLists:
    """Return tensors in the middle of a training."""
    made = torch.Generator().manual_seed(3)

    def new(dtype: torch.dtype, scale: float = 1.0, square: bool = False) -> list[torch.Tensor]:
        drawn = [torch.randn(size, generator=made) * scale for size in sizes]
        return [(each.square() if square else each).to(dtype) for each in drawn]

    params = new(param)
    return TensorLists(
        params=params,
        grads=new(grad, 0.1),
        exp_avgs=new(state, 0.05),
        exp_avg_sqs=new(state, 0.1, square=True),
        max_exp_avg_sqs=new(state, 0.1, square=True) if amsgrad else [],
        copies=[each.to(copy) for each in params] if copy else [],
        steps=[torch.tensor(4.0) for _ in sizes],
        weight_decays=[0.1, 0.0, 0.1],
    )


def results(given: TensorLists) -> list[torch.Tensor]:
    lists = (given.params, given.exp_avgs, given.exp_avg_sqs, given.max_exp_avg_sqs, given.copies)
    return [tensor for tensors in lists for tensor in tensors]


def step(given: TensorLists, backend: str, **options: object) -> list[torch.Tensor]:
    tables = [*results(given), *given.grads, *given.steps]
    with reachable(tables), fusedops.use_backend(backend):
        adamw(given, lr=0.05, betas=(0.8, 0.95), eps=1e-6, **options)  # type: ignore[arg-type]
    return results(given)


@each_backend
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda each: "-".join(str(x)[6:] for x in each))
@pytest.mark.parametrize("amsgrad", [False, True])
def test_any_mixture_of_dtypes(
    mixture: tuple[torch.dtype, ...], amsgrad: bool, backend: str
) -> None:
    options = {
        "maximize": amsgrad,
        "grad_factor": torch.tensor(0.3),
        "bias_correction": not amsgrad,
    }
    got = step(batch(*mixture, amsgrad=amsgrad), backend, **options)
    eager = step(batch(*mixture, amsgrad=amsgrad), "torch", **options)
    wide = batch(*mixture, amsgrad=amsgrad)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"):
        setattr(wide, name, [each.double() for each in getattr(wide, name)])
    truth = step(wide, "torch", **options)
    for mine, theirs, true in zip(got, eager, truth, strict=True):
        budget = dtypes.error_budget(theirs, true, mine.dtype)
        assert mine.dtype == theirs.dtype
        assert bool(((mine.double() - true).abs() <= budget).all())


def drawn(
    param: torch.dtype, *, places: list[tuple[int, int, int, int]], amsgrad: bool
) -> TensorLists:
    """Return a batch whose arithmetic is exact, so that all backends round the same numbers."""
    sizes = [stop - start for start, stop, _, _ in places]
    made = torch.Generator().manual_seed(5)
    whole = torch.randint(1, 2**20, (SIZE,), generator=made).float() / 2**18
    cut = [whole[start:stop].clone() for start, stop, _, _ in places]
    moments = [[torch.zeros(size, dtype=torch.bfloat16) for size in sizes] for _ in range(3)]
    return TensorLists(
        params=[(4 * each).to(param) for each in cut],
        grads=cut,
        exp_avgs=moments[0],
        exp_avg_sqs=moments[1],
        max_exp_avg_sqs=moments[2] if amsgrad else [],
        steps=[torch.tensor(6.0) for _ in sizes],
        draws=[Draw(-77, start, run, pitch) for start, _, run, pitch in places],
        weight_decays=[0.0] * len(sizes),
    )


WHOLE = [(0, SIZE, SIZE, SIZE)]


@each_backend
@pytest.mark.parametrize(
    ("run", "pitch"),
    [(1, 3), (3, 3), (7, 2**40), (16, 64), (1023, 5000), (1024, 1024), (1025, 1026), (2999, 2**33)],
)
@pytest.mark.parametrize(
    ("param", "amsgrad"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_every_backend_draws_the_same_numbers(
    param: torch.dtype, amsgrad: bool, run: int, pitch: int, backend: str
) -> None:
    both = []
    for name in (backend, "torch"):
        given = drawn(param, places=[(0, SIZE, run, pitch)], amsgrad=amsgrad)
        given.draws = [Draw(-77, 2**34 + 5, run, pitch)]
        tables = [*results(given), *given.grads, *given.steps]
        with reachable(tables), fusedops.use_backend(name):
            adamw(given, lr=0.5, betas=(0.5, 0.5), eps=1.0, bias_correction=False)
        both.append(given)
    # The square root leaves exact numbers behind: of params only float32 could differ in a bit.
    for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        assert_same_bits(*(getattr(given, name) for given in both))
    exact = both[0].grads[0].double() * 0.5
    assert not torch.equal(both[0].exp_avgs[0], exact.bfloat16()), "nothing was drawn"


@pytest.mark.parametrize("cuts", [[1000], [1, 2, 3, 1234], [32, 64, 2999]])
def test_a_part_draws_what_it_draws_in_the_whole(cuts: list[int]) -> None:
    edges = [0, *cuts, SIZE]
    places = [(a, b, b - a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    parts, whole = (drawn(torch.bfloat16, places=each, amsgrad=True) for each in (places, WHOLE))
    for each in (parts, whole):
        adamw(each, lr=0.5, betas=(0.5, 0.5), eps=1.0)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        assert_same_bits(torch.cat(getattr(parts, name)), getattr(whole, name)[0])


def test_the_mean_of_many_roundings_is_the_value() -> None:
    count = 1 << 16
    value = 1.0 + 1.0 / 512  # a quarter of the way between two numbers of bfloat16
    param = nn.Parameter(torch.zeros(count))
    param.grad = torch.full((count,), 2 * value)
    optimizer = AdamW([param], betas=(0.5, 0.5), state_dtype=torch.bfloat16)
    optimizer.step()
    moment = optimizer.state[param]["exp_avg"].double()
    assert set(moment.unique().tolist()) == {1.0, 1.0 + 1.0 / 128}
    deviation = (1.0 / 128) * (0.25 * 0.75 / count) ** 0.5
    assert abs(moment.mean().item() - value) < 5 * deviation


def test_infinities_and_nan_survive_stochastic_rounding() -> None:
    for backend in ("cpp", "torch"):
        param = nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
        grad = torch.ones(40)
        grad[3], grad[17], grad[39] = float("inf"), float("nan"), -float("inf")
        param.grad = grad.bfloat16()
        optimizer = AdamW([param], state_dtype=torch.bfloat16)
        with fusedops.use_backend(backend):
            optimizer.step()
        moment = optimizer.state[param]["exp_avg"]
        assert moment[3] == float("inf") and moment[39] == -float("inf") and moment[17].isnan()
        assert moment.isfinite().sum() == 37


def test_names_decide_and_wrappers_do_not() -> None:
    def moment(name: str, seed: int = 0) -> torch.Tensor:
        param = nn.Parameter(torch.ones(64))
        param.grad = torch.linspace(0.1, 1.0, 64)
        optimizer = AdamW([(name, param)], state_dtype=torch.bfloat16, seed=seed)
        optimizer.step()
        return optimizer.state[param]["exp_avg"]

    plain = moment("layers.0.weight")
    assert_same_bits(moment("module._orig_mod.layers.0.weight"), plain)
    assert not torch.equal(moment("layers.1.weight"), plain)
    assert not torch.equal(moment("layers.0.weight", seed=1), plain)


def test_bfloat16_parameters_that_creep_arrive_with_stochastic_rounding_alone() -> None:
    def last(rounding: bool) -> float:
        param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, stochastic_rounding=rounding)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.float().mean().item()

    wanted = 1.0 - 64 * 1e-3
    assert last(False) == 1.0  # each step is less than half of the last place
    assert abs(last(True) - wanted) < (1.0 - wanted) / 10
