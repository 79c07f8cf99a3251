"""Parameters that are changed outside of the optimizer: its master weights follow them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import TinyModel, masters, parameters, set_gradients, train, values
from reachable import reachable
from torch import nn

import fusedops
from fusedops.optim import AdamW, OffloadedAdamW

Change = Callable[[nn.Module], None]
HALF = (torch.bfloat16, torch.float16)


def offloaded(**fixed: Any) -> Callable[..., AdamW]:
    return lambda params, **options: OffloadedAdamW(
        params, bucket_bytes=300, threads=2, **fixed, **options
    )


KINDS: dict[str, tuple[Callable[..., AdamW], tuple[torch.dtype, ...]]] = {
    "masters": (masters, HALF),
    "overlapped": (offloaded(), (*HALF, torch.float32, torch.float64)),
    "in place": (offloaded(overlap=False), (*HALF, torch.float32, torch.float64)),
    "half on the device": (offloaded(device_fraction=0.5), HALF),
}


def load(model: nn.Module) -> None:
    made = torch.Generator().manual_seed(7)
    model.load_state_dict(
        {name: torch.randn(each.shape, generator=made) for name, each in model.state_dict().items()}
    )


def everywhere(change: Callable[[torch.Tensor], object]) -> Change:
    """Return what changes each parameter of a model."""

    def changed(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                change(param)

    return changed


def replace_data(param: torch.Tensor) -> None:
    for factor in (2.0, 0.5, 0.5):  # memory is used again
        param.data = param.data * factor


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def from_vector(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() / 2, model.parameters())


def swap_and_back(model: nn.Module) -> None:
    """Evaluate other weights, as those of a moving average."""
    kept = copy.deepcopy(model.state_dict())
    load(model)
    model.load_state_dict(kept)


CHANGES: dict[str, Change] = {
    "load": load,
    "clamp": everywhere(lambda param: param.clamp_(-0.1, 0.1)),
    "reset row": everywhere(lambda param: param[3].zero_()),
    "replace data": everywhere(replace_data),
    "foreach": foreach,
    "from vector": from_vector,
    "through data": everywhere(lambda param: param.data.clamp_(-0.1, 0.1)),
    "swap and back": swap_and_back,
}


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Let the masters of the expected run follow, by the rule written out."""
    for param, state in optimizer.state.items():
        if "master" in state:
            master = state["master"]
            rounds = master.to(param.dtype) == param
            master.copy_(torch.where(rounds, master, param.detach().to(master.dtype)))


@functools.cache
def followed(dtype: torch.dtype, change: str, step: int, when: str) -> list[Any]:
    """Return what the rule written out gives; without a change where there is none."""

    def expected(now: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if now == step and change in CHANGES:
            CHANGES[change](model)
            follow(optimizer)

    return train(masters, steps=4, dtype=dtype, **{when: expected})


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind, (_, all) in KINDS.items() for dtype in all], ids=str
)
def test_masters_follow(kind: str, dtype: torch.dtype, change: str, step: int, when: str) -> None:
    """The other elements keep the bits that their parameters do not have."""

    def changed(now: int, model: nn.Module, optimizer: Any) -> None:
        if now == step:
            CHANGES[change](model)
            if change == "through data" and isinstance(optimizer, OffloadedAdamW):
                optimizer.reload_model_params()

    want = followed(dtype, change, step, when)
    assert_same_bits(train(KINDS[kind][0], steps=4, dtype=dtype, **{when: changed}), want)
    if change == "swap and back":
        assert_same_bits(want, followed(dtype, "none", 0, when))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_masters_follow_in_triton(dtype: torch.dtype) -> None:
    results = []
    for backend in ("torch", "triton"):
        params = parameters(dtype)
        optimizer = masters(params)
        for step in range(3):
            set_gradients(params, step)
            if step == 0:  # which makes the states: where, only a kernel's table tells
                optimizer.step()
                continue
            with torch.no_grad():
                params[3][100:2000].clamp_(-0.1, 0.1)
                params[2][3] = float("nan")
            if backend == "torch":
                follow(optimizer)
            tensors = [each for state in optimizer.state.values() for each in state.values()]
            tables = [*params, *(param.grad for param in params), *tensors]
            with reachable(tables), fusedops.use_backend("triton"):
                optimizer.step()
        results.append([values(params), optimizer.state_dict()["state"]])
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("first", ["weights", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_resumed_in_either_order(kind: str, first: str) -> None:
    make, _ = KINDS[kind]
    model, fresh = TinyModel(), TinyModel()
    optimizer, resumed = (make(each.parameters(), lr=0.01) for each in (model, fresh))
    model.train(optimizer, 0, 1)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model.train(optimizer, 2, 3)
    loads = [(fresh, saved[0]), (resumed, saved[1])]
    for owner, state in loads if first == "weights" else reversed(loads):
        owner.load_state_dict(state)
    fresh.train(resumed, 2, 3)
    assert_same_bits(list(fresh.parameters()), list(model.parameters()))
    assert_same_bits(resumed.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_sees_a_step_between_forward_and_backward(kind: str, steps: int) -> None:
    model = TinyModel()
    optimizer = KINDS[kind][0](model.parameters())
    model.train(optimizer, *range(steps))
    model.loss(7).backward()
    loss = model.loss(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
