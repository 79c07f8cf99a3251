"""Norms on parts of a sequence, and of split heads, equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import assert_same, mesh_of, part_of, whole
from torch import nn

from fusedops.nn import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.replicated import allreduce_gradients

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
B, S, H = 2, 8, 12
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: LayerNorm(H),
    "layer_without_bias": lambda: LayerNorm(H, bias=False),
    "plain": lambda: LayerNorm(H, elementwise_affine=False),
    "rms": lambda: RMSNorm(H, 1e-5, weight_offset=1.0, rounding="hf"),
    "add_layer": lambda: AddLayerNorm(H),
    "add_rms": lambda: AddRMSNorm(H),
}


def _results(
    norm: nn.Module, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    inputs = tuple(each.detach().clone().requires_grad_() for each in inputs)
    outputs = norm(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [grad] * len(outputs))
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    found |= {f"input {i}": each.grad for i, each in enumerate(inputs)}
    return found | {name: whole(parameter.grad) for name, parameter in norm.named_parameters()}


def _norms(world: World, ranks: int, dtype: torch.dtype) -> Any:
    if not world.member(ranks):
        return None
    mesh, counts = mesh_of(world, ranks), {}
    x, residual, grad = (torch.randn(B, S, H).to(dtype) for _ in range(3))
    for name, make in NORMS.items():
        plain = make().to(dtype)
        inputs = (x, residual) if name.startswith("add") else (x,)
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
        wide = torch.float64
        allreduce_gradients(split := deepcopy(plain), mesh)
        assert list(split.state_dict()) == list(plain.state_dict())
        eager = _results(plain, inputs, grad)
        plain.zero_grad()
        truth = _results(plain.to(wide), tuple(each.to(wide) for each in inputs), grad.to(wide))
        mine = tuple(part_of(each, world, ranks, 1) for each in inputs)
        with collectives.recorded() as log:
            found = _results(split, mine, part_of(grad, world, ranks, 1))
        counts[name] = log.counts()
        parts = [
            {
                key: part_of(result, world, ranks, 1) if key[-1].isdigit() else result
                for key, result in results.items()
            }
            for results in (eager, truth)
        ]
        assert_same(found, *parts, B * S)
    return counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_norms_of_parts_equal_those_of_the_whole(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    """One all-reduce adds up the gradients of weight and bias."""
    counts = on_ranks(_norms, 2, dtype)[0]
    for name, count in counts.items():
        assert count == ({} if name == "plain" else {"all_reduce": 1}), name
