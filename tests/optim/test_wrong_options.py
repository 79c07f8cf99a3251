"""Wrong options and inputs of optimizers are refused by name, and leave them as they were."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import steps
from torch import nn

from fusedops import UnsupportedError
from fusedops.optim import AdamW, OffloadedAdamW, clip_grad_norm_, global_norm, offloaded

FUNCTIONS = (AdamW, OffloadedAdamW, clip_grad_norm_, global_norm)
TENSORS = ("params", "parameters", "tensors")
NUMBERS = ("lr", "eps", "weight_decay", "max_norm")
WRONG: dict[str, Any] = {
    "a text": "text",
    "an object": object(),
    "2**2000": 2**2000,
    "-2**70": -(2**70),
    "1.5": 1.5,
    "3": 3,
    "NaN": float("nan"),
    "tensors": torch.ones(2),
    "a list": [None],
}
# What is no mistake.
MEANT = {
    *((name, "1.5") for name in NUMBERS),
    *((name, "3") for name in (*NUMBERS, "seed", "bucket_bytes", "threads")),
    *((name, "tensors") for name in TENSORS),
}
CASES = [
    pytest.param(function, option, label, id=f"{function.__name__}-{option}-{label}")
    for function in FUNCTIONS
    for option in inspect.signature(function).parameters
    for label in WRONG
    if option != "options" and (option, label) not in MEANT
]


@pytest.mark.parametrize(("function", "option", "label"), CASES)
def test_wrong_options_are_named(function: Callable[..., Any], option: str, label: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    given: dict[str, Any] = {next(iter(inspect.signature(function).parameters)): [weight]}
    if function is clip_grad_norm_:
        given["max_norm"] = 1.0
    name = function.__name__
    of_torch = "optimizer can only optimize Tensors"  # what it says of elements of params
    with pytest.raises((TypeError, ValueError), match=rf"{name}: .*{option}.* must|{of_torch}"):
        function(**given | {option: WRONG[label]})


def test_large_integers_are_floats() -> None:
    for number in (2**70, 2.0**70):
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        AdamW([weight], eps=number, max_norm=number).step()
        clip_grad_norm_([weight], number)
        assert bool(weight.isfinite().all()) and weight.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("option", ["lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"])
def test_options_of_a_group_are_checked_too(option: str) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match=f"AdamW: {option} must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], option: "text"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"differentiable": True}, UnsupportedError, "differentiable"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype"),
        ({"max_norm": 0.0}, ValueError, "max_norm"),
        ({"no_decay": ("*.bias",)}, ValueError, "named"),
        ({"lr": -1.0}, ValueError, "AdamW: lr must be at least 0"),
        ({"foreach": True, "fused": True}, RuntimeError, "fused"),
        ({"params": [torch.ones(2, dtype=torch.complex64)]}, TypeError, "complex64"),
    ],
)
def test_values_of_options_are_checked(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        AdamW(**{"params": [nn.Parameter(torch.ones(3, 2))], **arguments})


MAKERS: dict[str, Callable[..., AdamW]] = {
    "adamw": AdamW,
    "overlapped": functools.partial(OffloadedAdamW, threads=1),
    "in place": functools.partial(OffloadedAdamW, threads=1, overlap=False),
}


def table_of(optimizer: AdamW) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][1]


def step_sparse(optimizer: AdamW) -> None:
    table_of(optimizer).grad = torch.ones(4, 2, dtype=torch.bfloat16).to_sparse()
    optimizer.step()


def step_with(changed: torch.Tensor) -> Callable[[AdamW], None]:
    """Return what makes a step of other memory."""

    def step(optimizer: AdamW) -> None:
        table = table_of(optimizer)
        table.grad, table.data = None, changed
        table.grad = torch.ones_like(changed)
        optimizer.step()

    return step


def step_elsewhere(optimizer: AdamW) -> None:
    if isinstance(optimizer, OffloadedAdamW):
        optimizer._device = torch.device("meta")  # as if it had been there
    else:
        optimizer.state[table_of(optimizer)]["exp_avg"] = torch.ones(4, 2, device="meta")
    optimizer.step()


def load_of(
    *shapes: tuple[int, ...], make: Callable[..., torch.optim.Optimizer] = AdamW
) -> Callable[[AdamW], None]:
    """Return what loads the state of an optimizer of other parameters."""

    def load(optimizer: AdamW) -> None:
        foreign = make([nn.Parameter(torch.ones(shape)) for shape in shapes])
        steps(foreign, 0, 1)
        optimizer.load_state_dict(foreign.state_dict())

    return load


def add(param: torch.Tensor) -> Callable[[AdamW], None]:
    return lambda optimizer: optimizer.add_param_group({"params": [("new", nn.Parameter(param))]})


SGD = functools.partial(torch.optim.SGD, momentum=0.9)
# What can be wrong with an optimizer of two parameters, the second a table's.
BAD: dict[str, tuple[Callable[[AdamW], None], type[Exception], str]] = {
    "a sparse gradient": (step_sparse, UnsupportedError, "'table' must be dense.*SparseAdam"),
    "another dtype": (step_with(torch.ones(4, 2)), ValueError, "the dtype must be .*'table'"),
    "another shape": (
        *(step_with(torch.ones(2, 2, dtype=torch.bfloat16)), ValueError),
        r"the shape must be \[4, 2\] of parameter 'table'",
    ),
    "another device": (step_elsewhere, ValueError, "the device must be meta of parameter"),
    "another model": (load_of((3,), (5, 2)), ValueError, r"state_dict.*'table' has shape \[4, 2\]"),
    "fewer parameters": (load_of((3,)), ValueError, r"groups of \[2\] parameters, got .*\[1\]"),
    "another kind": (load_of((3,), (4, 2), make=SGD), ValueError, "exp_avg.*momentum_buffer"),
    "meta": (add(torch.ones(2, device="meta")), ValueError, "params must be on one device"),
    "too large": (add(torch.ones(1 << 10)), MemoryError, "GiB are available"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in MAKERS
        for name in BAD
        if kind != "adamw" or name not in ("meta", "too large")
    ],
)
def test_bad_input_is_named_and_leaves_the_optimizer_as_it_was(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nn.Parameter(torch.arange(3.0))
    table = nn.Parameter(torch.arange(8.0).view(4, 2).bfloat16())
    optimizer = MAKERS[kind]([("first", first), ("table", table)], lr=0.1, max_norm=1.0)

    def backward() -> None:
        optimizer.zero_grad()
        (first.square().sum() + table.float().square().sum()).backward()

    backward()
    optimizer.step()
    backward()
    before = copy.deepcopy([optimizer.state_dict(), first.detach(), table.detach()])
    memory, gradient, moment = table.data, table.grad, optimizer.state[table]["exp_avg"]
    bad, error, words = BAD[name]
    monkeypatch.setattr(offloaded, "available_bytes", lambda: 1000)
    with pytest.raises(error, match=words):
        bad(optimizer)
    table.grad = None
    table.data, table.grad = memory, gradient
    optimizer.state[table]["exp_avg"] = moment
    if isinstance(optimizer, OffloadedAdamW):
        optimizer._device = torch.device("cpu")
    assert_same_bits([optimizer.state_dict(), first.detach(), table.detach()], before)
    optimizer.step()
    assert float(optimizer.state[table]["step"]) == 2.0
    assert not torch.equal(table, before[2])
