"""Weights of which ZeRO-3 keeps a part: patching them, and running where hooks gather them.

The engine here does what DeepSpeed's does to a model, in one process: parameters are empty between
two forwards, hooks on every module gather its own, and reading the parameter of another module
gathers it and leaves it to the hooks of the module that runs.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from patch_testing import assert_same_grads, counted
from torch import nn

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

from causal_families import DENSE, GPT2, SPARSE, loss
from encoder_families import FAMILIES as ENCODERS

HOME = "deepspeed.runtime.zero.parameter_offload"


class _Parameters(OrderedDict):
    """A module's parameters, which gathers one that is read while a module runs."""

    def __init__(self, parameters: dict[str, Any], engine: Engine) -> None:
        super().__init__(parameters)
        self.engine = engine

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if self.engine.running and parameter is not None and not parameter.numel():
            self.engine.borrowed[self.engine.running[-1]].add(parameter)
            self.engine.gather(parameter)
        return parameter


_Parameters.__module__ = HOME


class Engine:
    """Keeps a model's weights away while they are not needed.

    Attributes:
        running: the modules that run, innermost last.
        borrowed: the parameters of others that a module has read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running: list[nn.Module] = []
        self.borrowed: dict[nn.Module, set[Any]] = defaultdict(set)
        self.weights = {parameter: parameter.data for parameter in model.parameters()}
        for weight in self.weights:
            weight.ds_shape = weight.shape
        self.release(*self.weights)

    def gather(self, *parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = self.weights[parameter]

    def release(self, *parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)

    def _needed(self, module: nn.Module) -> list[Any]:
        own = dict.values(module._parameters)
        return [*(each for each in own if each is not None), *self.borrowed[module]]

    def hook(self) -> None:
        """Put the hooks on every module."""

        def enter(module: nn.Module, args: Any) -> None:
            self.running.append(module)
            self.gather(*self._needed(module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            self.release(*self._needed(module))
            for each in output if isinstance(output, tuple) else (output,):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda grad: self.gather(*self._needed(module)))

        for hook in (enter, leave):
            hook.__module__ = HOME
        for module in self.model.modules():
            module._parameters = _Parameters(module._parameters, self)
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


FAMILIES = DENSE | SPARSE | ENCODERS


@pytest.mark.parametrize("name", FAMILIES)
def test_patch_and_describe_know_the_shapes(name: str) -> None:
    whole = FAMILIES[name].model()
    model = copy.deepcopy(whole)
    expected = str(fusedops.patch(whole))
    Engine(model)
    assert str(fusedops.patch(model)) == expected
    assert str(describe(model)).splitlines()[1:] == str(describe(whole)).splitlines()[1:]
    fusedops.unpatch(model)
    assert describe(model).num_replaced == 0


@pytest.mark.parametrize("order", ["patched first", "partitioned first"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "OPT", "Mixtral", "GPT2", "BertForMaskedLM"])
@pytest.mark.usefixtures("own_products")
def test_training_where_hooks_gather(name: str, order: str) -> None:
    stock = (FAMILIES | {"GPT2": GPT2})[name].model()
    total = getattr(FAMILIES.get(name), "loss", loss)
    model = copy.deepcopy(stock)
    total(stock).backward()
    if order == "patched first":
        fusedops.patch(model)
    engine = Engine(model)
    engine.hook()
    if order == "partitioned first":
        fusedops.patch(model)
    for _ in range(2):  # the second time the hooks gather what others read
        model.zero_grad()
        with counted() as calls:
            total(model).backward()
        engine.release(*engine.weights)
    ops = {"layer_norm": 5} if name == "GPT2" else FAMILIES[name].ops
    assert {op: calls[op] for op in ops} == ops
    assert_same_grads(model, stock)


def test_another_hook_beside_them_is_called() -> None:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    Engine(model).hook()
    seen: list[nn.Module] = []
    mlp = model.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(module))
    with counted() as calls:
        loss(model)
    assert seen == [mlp.act_fn] and calls["linear_glu"] == 1
    entry = describe(model)["model.layers.0.mlp"]
    assert entry.reason == "steps aside now: act_fn has hooks"
