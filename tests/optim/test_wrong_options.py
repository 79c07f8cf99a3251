"""Wrong options of optimizers are refused by name; large integers are the floats that they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusedops.optim import AdamW, OffloadedAdamW, clip_grad_norm_, global_norm

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
