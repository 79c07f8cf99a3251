"""AdamW against torch's: values, states both ways, scaling, schedules, and what it refuses."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, assert_same_bits
from optim_testing import parameters, run, set_gradients
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
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(each) or "none")
backends = pytest.mark.parametrize("backend", ["cpp", "torch"])


def names(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{i}", param) for i, param in enumerate(params)]


@backends
@each_option
def test_float64_is_torchs(options: dict[str, Any], backend: str) -> None:
    with fusedops.use_backend(backend):
        ours = run(lambda params: AdamW(params, **options), dtype=torch.float64)
    theirs = run(lambda params: STOCK(params, **options), dtype=torch.float64)
    assert_all_close(ours, theirs, theirs, depth=5)


@backends
@each_option
def test_float32_is_as_near_to_float64_as_torchs(options: dict[str, Any], backend: str) -> None:
    with fusedops.use_backend(backend):
        ours = run(lambda params: AdamW(params, **options), steps=20)
    theirs = run(lambda params: STOCK(params, fused=True, **options), steps=20)
    truth = run(lambda params: STOCK(params, **options), steps=20, dtype=torch.float64)
    # The start differs: float64 parameters are not rounded. A step moves all alike.
    start = [
        a.detach().double() - b.detach()
        for a, b in zip(parameters(), parameters(torch.float64), strict=True)
    ]
    truth = [each + moved for each, moved in zip(truth, start, strict=True)]
    assert_all_close(ours, truth, theirs, depth=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_alone_is_torchs(dtype: torch.dtype) -> None:
    ours = run(AdamW, steps=1, dtype=dtype)
    theirs = run(lambda params: STOCK(params, fused=True), steps=1, dtype=dtype)
    wide = [nn.Parameter(param.detach().double()) for param in parameters(dtype)]
    set_gradients(wide, 0)
    STOCK(wide).step()
    assert_all_close(ours, [param.detach() for param in wide], theirs)


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
    decay = 1.7e-6 * 0.01
    start = torch.rand(100_000, dtype=torch.float64).add(1.0).float()

    def mean_decay(make: Callable[..., torch.optim.Optimizer]) -> float:
        param = nn.Parameter(start.clone())
        param.grad = torch.zeros_like(param)
        for _ in range(20):
            make([param], lr=1.7e-4, weight_decay=1e-2).step()
        return float(((start.double() - param.detach().double()) / start.double()).mean()) / 20

    wanted = 1.7e-4 * 1e-2
    assert decay < wanted
    stock = abs(mean_decay(STOCK) - wanted)
    assert abs(mean_decay(AdamW) - wanted) < stock / 2


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_is_stepped_in_float32_and_the_parameter_is_its_rounding(
    dtype: torch.dtype, backend: str
) -> None:
    params = parameters(dtype)
    exact = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = AdamW(params, lr=0.01, master_weights=True)
    stock = AdamW(exact, lr=0.01)
    with fusedops.use_backend(backend):
        for step in range(5):
            set_gradients(params, step)
            for param, wide in zip(params, exact, strict=True):
                assert param.grad is not None
                wide.grad = param.grad.float()
            optimizer.step()
            stock.step()
    for param, wide in zip(params, exact, strict=True):
        state = optimizer.state[param]
        assert_same_bits(state["master"], wide.detach())
        assert_same_bits(param.detach(), wide.detach().to(dtype))
        assert_same_bits(state["exp_avg_sq"], stock.state[wide]["exp_avg_sq"])


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


@pytest.mark.parametrize("cut", [1, 15, 16, 1000, 16384, 30001])
def test_where_a_tensor_is_cut_does_not_show(cut: int) -> None:
    shape = (40000,)
    whole = run(AdamW, shapes=[shape])[0]
    param = parameters(shapes=[shape])[0]
    parts = [nn.Parameter(each.clone()) for each in param.detach().split([cut, 40000 - cut])]
    optimizer = AdamW(parts)
    for step in range(5):
        set_gradients([param], step)
        assert param.grad is not None
        for part, grad in zip(parts, param.grad.split([cut, 40000 - cut]), strict=True):
            part.grad = grad
        optimizer.step()
    assert_same_bits(torch.cat([part.detach() for part in parts]), whole)


def test_any_strides_of_parameters_and_gradients() -> None:
    base = torch.randn(6, 10)
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.clone(),
        lambda t: t.clone().t().contiguous().t(),
        lambda t: torch.cat([t, t], dim=1)[:, :10],
    ]
    results = []
    for of_param in layouts:
        for of_grad in layouts:
            param = nn.Parameter(of_param(base))
            optimizer = AdamW([param], amsgrad=True)
            for step in range(3):
                torch.manual_seed(step)
                param.grad = of_grad(torch.randn(6, 10))
                optimizer.step()
            results.append(param.detach().clone())
    param = nn.Parameter(base.clone())
    param.grad = torch.ones(1, 1).expand(6, 10)
    AdamW([param]).step()
    for result in results[1:]:
        assert_same_bits(result, results[0])
    other = nn.Parameter(base.clone())
    other.grad = torch.ones(6, 10)
    AdamW([other]).step()
    assert_same_bits(param.detach(), other.detach())


def test_states_of_torch_go_on_here_and_back() -> None:
    def steps(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            set_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.step()

    params = parameters()
    stock = STOCK(params, lr=0.02, amsgrad=True)
    steps(stock, 0, 3)
    ours = AdamW(params)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.02
    assert_same_bits(ours.state_dict()["state"], stock.state_dict()["state"])
    steps(ours, 3, 6)
    back = STOCK(params)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_bits(back.state_dict()["state"], ours.state_dict()["state"])
    steps(back, 6, 9)
    got = [param.detach() for param in params]
    theirs = run(lambda params: STOCK(params, lr=0.02, amsgrad=True, fused=True), steps=9)
    truth = run(lambda params: STOCK(params, lr=0.02, amsgrad=True), steps=9)
    assert_all_close(got, truth, theirs, depth=9)


def test_masters_and_moments_keep_their_dtypes_when_loaded() -> None:
    params = parameters(torch.bfloat16)
    ours = AdamW(params, master_weights=True)
    set_gradients(params, 0)
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    again = AdamW(params, master_weights=True)
    again.load_state_dict(saved)
    assert_same_bits(again.state_dict(), saved)
    stock = STOCK(params)
    stock.load_state_dict(copy.deepcopy(saved))
    set_gradients(params, 1)
    stock.step()  # torch's casts the moments to bfloat16 and ignores the masters
    assert stock.state[params[0]]["exp_avg"].dtype == torch.bfloat16
    plain = AdamW(params, master_weights=True)
    plain.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert plain.state[params[0]]["exp_avg"].dtype == torch.float32
    without = {
        "state": {
            i: {k: v for k, v in each.items() if k != "master"}
            for i, each in saved["state"].items()
        },
        "param_groups": saved["param_groups"],
    }
    plain.load_state_dict(without)
    assert_same_bits(plain.state[params[2]]["master"], params[2].detach().float())


def test_copies_of_an_optimizer_go_on_as_it_does() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(names(params), state_dtype=torch.bfloat16, max_norm=1.0, no_decay=("*.1",))
    set_gradients(params, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.policy == optimizer.policy
        theirs = other.param_groups[0]["params"]
        set_gradients(theirs, 1)
        other.step()
        fresh = [their.detach().clone() for their in theirs]
        mine = copy.deepcopy(optimizer)
        set_gradients(mine.param_groups[0]["params"], 1)
        mine.step()
        assert_same_bits(fresh, [each.detach() for each in mine.param_groups[0]["params"]])


def test_names_exclude_from_decay() -> None:
    params = parameters(shapes=[(4,), (4,)])
    before = [param.detach().clone() for param in params]
    optimizer = AdamW(
        [("dense.weight", params[0]), ("dense.bias", params[1])], lr=0.5, no_decay=("*.bias",)
    )
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same_bits(params[1].detach(), before[1])
    assert bool((params[0].detach().abs() < before[0].abs()).all())


@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler_as_with_torchs_fused(unscaled: bool) -> None:
    results = []
    for make in (AdamW, lambda params, **options: STOCK(params, fused=True, **options)):
        params = parameters()
        optimizer = make(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            scaler.scale(torch.zeros(()))
            set_gradients(params, step, scale=float(scaler.get_scale()))
            if step == 3:
                assert params[2].grad is not None
                params[2].grad[5, 5] = float("inf")
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        state = optimizer.state[params[0]]
        results.append(([param.detach() for param in params], state["step"], scaler.get_scale()))
    (ours, count, scale), (theirs, their_count, their_scale) = results
    assert count == their_count == 5 and scale == their_scale
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
    assert_same_bits([each.detach() for each in fused], [each.detach() for each in separate])


def test_clipping_in_the_step_is_by_the_norm_of_unscaled_gradients() -> None:
    plain, scaled = parameters(), parameters()
    first, second = AdamW(plain, max_norm=0.25), AdamW(scaled, max_norm=0.25)
    set_gradients(plain, 0)
    set_gradients(scaled, 0, scale=8.0)
    second.grad_scale, second.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore
    first.step()
    second.step()
    assert first.grad_norm == second.grad_norm
    assert_same_bits([each.detach() for each in scaled], [each.detach() for each in plain])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_step_that_is_not_finite_is_skipped_whole(value: float) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, master_weights=True, skip_non_finite=True)
    set_gradients(params, 0)
    optimizer.step()
    before = copy.deepcopy([optimizer.state_dict(), [parameter.detach() for parameter in params]])
    set_gradients(params, 1)
    assert params[3].grad is not None
    params[3].grad[39999] = value
    optimizer.step()
    assert_same_bits([optimizer.state_dict(), [each.detach() for each in params]], before)
    assert optimizer.grad_norm is not None and not optimizer.grad_norm.isfinite()


def loss_of(params: list[nn.Parameter], step: int) -> float:
    assert torch.is_grad_enabled()
    set_gradients(params, step)
    return float(step)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_and_closures(tensor_lr: bool) -> None:
    results = []
    for make in (AdamW, STOCK):
        params = parameters(torch.float64)
        lr = torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1
        optimizer = make(params, lr=lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=5)
        losses = []
        for step in range(5):
            losses.append(optimizer.step(functools.partial(loss_of, params, step)))
            scheduler.step()
        assert losses == [0.0, 1.0, 2.0, 3.0, 4.0]
        results.append([param.detach() for param in params])
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


def test_trainer_takes_it(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    data = [{"input_ids": (ids := torch.randint(0, 64, (8,))), "labels": ids} for _ in range(8)]
    results = []
    for make in (AdamW, STOCK):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        optimizer = make(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / make.__module__),
            max_steps=4,
            report_to=[],
            per_device_train_batch_size=2,
            use_cpu=True,
            save_steps=2,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, optimizers=(optimizer, schedule)
        )
        trainer.train()
        checkpoint = torch.load(tmp_path / make.__module__ / "checkpoint-4" / "optimizer.pt")
        assert len(checkpoint["state"]) == len(list(model.parameters()))
        results.append([param.detach() for param in model.parameters()])
    assert_all_close(results[0], results[1], results[1], depth=4)


def test_what_it_refuses_is_said_and_nothing_is_written() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    for arguments, error, words in (
        ({"differentiable": True}, fusedops.UnsupportedError, "differentiable"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype"),
        ({"max_norm": 0.0}, ValueError, "max_norm"),
        ({"no_decay": ("*.bias",)}, ValueError, "named"),
        ({"lr": -1.0}, ValueError, "AdamW: lr must be at least 0"),
        ({"foreach": True, "fused": True}, RuntimeError, "fused"),
    ):
        with pytest.raises(error, match=words):
            AdamW([weight], **arguments)
    with pytest.raises(TypeError, match="complex64"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])

    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW([("dense", weight), ("table", embedding.weight)])
    embedding(torch.tensor([1])).sum().backward()
    weight.grad = torch.ones_like(weight)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(fusedops.UnsupportedError, match=r"'table'.*SparseAdam"):
        optimizer.step()
    assert_same_bits(optimizer.state_dict(), before)
    assert_same_bits(weight.detach(), torch.ones(3, 2))


def test_a_parameter_that_changed_is_named() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamW([("dense.weight", weight)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    for changed, words in (
        (torch.ones(3, 2, dtype=torch.bfloat16), "dtype"),
        (torch.ones(2, 2), "shape"),
    ):
        weight.grad = None
        weight.data = changed
        weight.grad = torch.ones_like(weight)
        with pytest.raises(ValueError, match=f"the {words}.*'dense.weight'"):
            optimizer.step()
        assert_same_bits(optimizer.state_dict(), before)
    weight.grad = None
    weight.data = torch.ones(3, 2)
    weight.grad = torch.ones_like(weight)
    optimizer.state[weight]["exp_avg"] = torch.ones(3, 2, device="meta")
    with pytest.raises(ValueError, match="the device must be meta of parameter 'dense.weight'"):
        optimizer.step()
    assert_same_bits(weight.detach(), torch.ones(3, 2))


def test_the_state_of_another_model_changes_nothing() -> None:
    ours, other = parameters(), parameters(shapes=[(7,), (3, 5, 2), (129, 130), (1,), (0, 4), ()])
    optimizer, foreign = AdamW(ours), AdamW(other, lr=0.7)
    for each in (optimizer, foreign):
        set_gradients(each.param_groups[0]["params"], 0)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state_dict.*parameter 2.*\[129, 131\].*\[129, 130\]"):
        optimizer.load_state_dict(foreign.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[6\] parameters, got groups of \[5\]"):
        optimizer.load_state_dict(AdamW(other[:5]).state_dict())
    sgd = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    sgd.step()
    with pytest.raises(ValueError, match="exp_avg.*momentum_buffer"):
        optimizer.load_state_dict(sgd.state_dict())
    assert_same_bits(optimizer.state_dict(), before)
