"""AdamW against torch's: values, states both ways, scaling, schedules, and what it refuses."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, assert_same_bits
from optim_testing import parameters, run, set_gradients, steps, values
from torch import nn

import fusedops
from fusedops.optim import AdamW

STOCK = torch.optim.AdamW
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
    {"amsgrad": True, "betas": (0.0, 0.5)},
    {"maximize": True, "weight_decay": 0.0},
]
each_option = pytest.mark.parametrize(
    "case", range(len(OPTIONS)), ids=["-".join(each) or "none" for each in OPTIONS]
)
backends = pytest.mark.parametrize("backend", ["cpp", "torch"])


def names(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{i}", param) for i, param in enumerate(params)]


@functools.cache
def stock(case: int, dtype: torch.dtype, steps: int, fused: bool = False) -> list[torch.Tensor]:
    """Return the parameters after steps of torch's optimizer."""
    options = OPTIONS[case] | ({"fused": True} if fused else {})
    return run(lambda params: STOCK(params, **options), dtype=dtype, steps=steps)


@backends
@each_option
def test_float64_is_torchs(case: int, backend: str) -> None:
    with fusedops.use_backend(backend):
        ours = run(lambda params: AdamW(params, **OPTIONS[case]), dtype=torch.float64)
    theirs = stock(case, torch.float64, 5)
    assert_all_close(ours, theirs, theirs, depth=5)


@backends
@each_option
def test_float32_is_as_near_to_float64_as_torchs(case: int, backend: str) -> None:
    with fusedops.use_backend(backend):
        ours = run(lambda params: AdamW(params, **OPTIONS[case]), steps=20)
    theirs = stock(case, torch.float32, 20, fused=True)
    # The start differs: float64 parameters are not rounded. A step moves all alike.
    truth = [
        moved + (narrow.detach().double() - wide.detach())
        for moved, narrow, wide in zip(
            stock(case, torch.float64, 20), parameters(), parameters(torch.float64), strict=True
        )
    ]
    assert_all_close(ours, truth, theirs, depth=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_alone_is_torchs(dtype: torch.dtype) -> None:
    ours = run(AdamW, steps=1, dtype=dtype)
    theirs = run(lambda params: STOCK(params, fused=True), steps=1, dtype=dtype)
    wide = [nn.Parameter(param.detach().double()) for param in parameters(dtype)]
    steps(STOCK(wide), 0, 1)
    assert_all_close(ours, values(wide), theirs)


@pytest.mark.parametrize(("betas", "first"), [((0.9, 0.999), "3.1623"), ((0.9, 0.95), "0.44721")])
def test_without_bias_correction_the_first_step_is_the_source_systems(
    betas: tuple[float, float], first: str
) -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    param.grad = torch.tensor([1e3, -1.0, 1e-3], dtype=torch.float64)
    AdamW([param], lr=1.0, betas=betas, eps=0.0, weight_decay=0.0, bias_correction=False).step()
    assert [f"{abs(each):.5g}" for each in param.tolist()] == [first] * 3
    assert param.sign().tolist() == [-1.0, 1.0, -1.0]


def test_a_small_decay_is_not_lost_in_a_factor_near_one() -> None:
    start = torch.rand(100_000, dtype=torch.float64).add(1.0).float()

    def error(make: Callable[..., torch.optim.Optimizer]) -> float:
        param = nn.Parameter(start.clone())
        param.grad = torch.zeros_like(param)
        for _ in range(20):
            make([param], lr=1.7e-4, weight_decay=1e-2).step()
        decay = (start.double() - param.detach().double()) / start.double()
        return abs(float(decay.mean()) / 20 - 1.7e-4 * 1e-2)

    assert error(AdamW) < error(STOCK) / 2


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_is_stepped_in_float32_and_the_parameter_is_its_rounding(
    dtype: torch.dtype, backend: str
) -> None:
    params = parameters(dtype)
    exact = [nn.Parameter(param.detach().float()) for param in params]
    optimizer, plain = AdamW(params, lr=0.01, master_weights=True), AdamW(exact, lr=0.01)
    with fusedops.use_backend(backend):
        for step in range(5):
            set_gradients(params, step)
            for param, wide in zip(params, exact, strict=True):
                wide.grad = param.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            plain.step()
    for param, wide in zip(params, exact, strict=True):
        state = optimizer.state[param]
        assert_same_bits(state["master"], wide.detach())
        assert_same_bits(param.detach(), wide.detach().to(dtype))
        assert_same_bits(state["exp_avg_sq"], plain.state[wide]["exp_avg_sq"])


def test_threads_do_not_show() -> None:
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(lambda params: AdamW(params, state_dtype=torch.bfloat16, max_norm=0.5)))
    torch.set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_groups_and_their_order_do_not_show(state_dtype: torch.dtype | None) -> None:
    def grouped(params: list[nn.Parameter]) -> AdamW:
        named = names(params)
        groups = [{"params": named[3:]}, {"params": named[1:3][::-1]}, {"params": named[:1]}]
        return AdamW(groups, state_dtype=state_dtype, max_norm=0.1)

    whole = run(lambda params: AdamW(names(params), state_dtype=state_dtype, max_norm=0.1))
    assert_same_bits(run(grouped), whole)


def test_any_strides_of_parameters_and_gradients() -> None:
    base, grads = torch.randn(6, 10), torch.randn(3, 6, 10)
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.clone(),
        lambda t: t.clone().t().contiguous().t(),
        lambda t: torch.cat([t, t], dim=1)[:, :10],
    ]

    def stepped(param: torch.Tensor, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        param = nn.Parameter(param)
        optimizer = AdamW([param], amsgrad=True)
        for gradient in gradients:
            param.grad = gradient
            optimizer.step()
        return param.detach()

    want = stepped(base.clone(), grads)
    for of_param, of_grad in itertools.product(layouts, layouts):
        assert_same_bits(stepped(of_param(base), map(of_grad, grads)), want)
    expanded = torch.ones(1, 1).expand(6, 10)
    assert_same_bits(stepped(base.clone(), [expanded]), stepped(base.clone(), [expanded.clone()]))


def test_states_of_torch_go_on_here_and_back() -> None:
    params = parameters()
    theirs = STOCK(params, lr=0.02, amsgrad=True)
    steps(theirs, 0, 3)
    ours = AdamW(params)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.02
    assert_same_bits(ours.state_dict()["state"], theirs.state_dict()["state"])
    steps(ours, 3, 6)
    back = STOCK(params)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_bits(back.state_dict()["state"], ours.state_dict()["state"])
    steps(back, 6, 9)
    base = run(lambda params: STOCK(params, lr=0.02, amsgrad=True, fused=True), steps=9)
    truth = run(lambda params: STOCK(params, lr=0.02, amsgrad=True), steps=9)
    assert_all_close(values(params), truth, base, depth=9)


def test_masters_and_moments_keep_their_dtypes_when_loaded() -> None:
    params = parameters(torch.bfloat16)
    ours = AdamW(params, master_weights=True)
    steps(ours, 0, 1)
    saved = copy.deepcopy(ours.state_dict())
    again = AdamW(params, master_weights=True)
    again.load_state_dict(saved)
    assert_same_bits(again.state_dict(), saved)
    theirs = STOCK(params)
    theirs.load_state_dict(copy.deepcopy(saved))
    steps(theirs, 1, 2)  # torch's casts the moments to bfloat16 and ignores the masters
    assert theirs.state[params[0]]["exp_avg"].dtype == torch.bfloat16
    plain = AdamW(params, master_weights=True)
    plain.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert plain.state[params[0]]["exp_avg"].dtype == torch.float32
    for state in saved["state"].values():
        state.pop("master")
    plain.load_state_dict(saved)
    assert_same_bits(plain.state[params[2]]["master"], params[2].detach().float())


def test_copies_of_an_optimizer_go_on_as_it_does() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(names(params), state_dtype=torch.bfloat16, max_norm=1.0, no_decay=("*.1",))
    steps(optimizer, 0, 1)
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    steps(optimizer, 1, 2)
    for other in others:
        assert other.policy == optimizer.policy
        steps(other, 1, 2)
        assert_same_bits(values(other.param_groups[0]["params"]), values(params))


def test_names_exclude_from_decay() -> None:
    params = parameters(shapes=[(4,), (4,)])
    before = [param.detach().clone() for param in params]
    named = [("dense.weight", params[0]), ("dense.bias", params[1])]
    optimizer = AdamW(named, lr=0.5, no_decay=("*.bias",))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same_bits(params[1].detach(), before[1])
    assert bool((params[0].detach().abs() < before[0].abs()).all())


@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler_as_with_torchs_fused(unscaled: bool) -> None:
    results = []
    for make in (AdamW, functools.partial(STOCK, fused=True)):
        params = parameters()
        optimizer = make(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            scaler.scale(torch.zeros(()))
            set_gradients(params, step, scale=float(scaler.get_scale()))
            if step == 3:
                params[2].grad[5, 5] = float("inf")  # type: ignore[index]
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[params[0]]["step"] == 5
        results.append((values(params), scaler.get_scale()))
    (ours, scale), (theirs, their_scale) = results
    assert scale == their_scale
    assert_all_close(ours, theirs, theirs, depth=6)


def test_clipping_in_the_step_is_clipping_before_it() -> None:
    separate, fused = parameters(), parameters()
    first, second = AdamW(separate), AdamW(fused, max_norm=0.25)
    for step in range(4):
        for params in (separate, fused):
            set_gradients(params, step, scale=1e-4 if step == 2 else 1.0)
        norm = fusedops.optim.clip_grad_norm_(separate, 0.25)
        first.step()
        second.step()
        assert second.grad_norm == norm
        assert (norm > 0.25) == (step != 2)
    assert_same_bits(values(fused), values(separate))


def test_clipping_in_the_step_is_by_the_norm_of_unscaled_gradients() -> None:
    plain, scaled = parameters(), parameters()
    first, second = AdamW(plain, max_norm=0.25), AdamW(scaled, max_norm=0.25)
    set_gradients(plain, 0)
    set_gradients(scaled, 0, scale=8.0)
    second.grad_scale, second.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore
    first.step()
    second.step()
    assert first.grad_norm == second.grad_norm
    assert_same_bits(values(scaled), values(plain))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_step_that_is_not_finite_is_skipped_whole(value: float) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, master_weights=True, skip_non_finite=True)
    steps(optimizer, 0, 1)
    before = copy.deepcopy([optimizer.state_dict(), values(params)])
    set_gradients(params, 1)
    assert params[3].grad is not None
    params[3].grad[39999] = value
    optimizer.step()
    assert_same_bits([optimizer.state_dict(), values(params)], before)
    assert optimizer.grad_norm is not None and not optimizer.grad_norm.isfinite()


@backends
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_schedulers_and_closures(capturable: bool, tensor_lr: bool, backend: str) -> None:
    results = []
    for make in (functools.partial(AdamW, capturable=capturable), STOCK):
        params = parameters(torch.float64)
        lr = torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1
        optimizer = make(params, lr=lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=5)
        for step in range(5):

            def closure(params: Any = params, step: int = step) -> float:
                assert torch.is_grad_enabled()
                set_gradients(params, step)
                return float(step)

            with fusedops.use_backend(backend):
                assert optimizer.step(closure) == step
            scheduler.step()
        results.append(values(params))
    assert_all_close(results[0], results[1], results[1], depth=5)


def test_parameters_without_gradient_stay() -> None:
    params = parameters()
    set_gradients(params, 0)
    params[2].grad = None
    before = params[2].detach().clone()
    optimizer = AdamW(params)
    optimizer.step()
    assert_same_bits(params[2].detach(), before)
    assert params[2] not in optimizer.state and params[1] in optimizer.state
    for param in params:
        param.grad = None
    optimizer.step()
    assert AdamW(params, max_norm=1.0).step() is None
