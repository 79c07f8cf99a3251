"""What tests of split layers share: a mesh of the pool's first ranks, and comparison by budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from process_pool import World
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedops._core import dtypes


def mesh_of(world: World, ranks: int, name: str = "tp") -> DeviceMesh:
    """Return the pool's group of that size as a mesh; starts nothing."""
    return DeviceMesh.from_group(world.group(ranks), "cpu", mesh_dim_names=(name,))


def part_of(tensor: torch.Tensor, world: World, ranks: int, dim: int) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    return tensor.chunk(ranks, dim)[world.rank]


def parts_of(
    results: dict[str, torch.Tensor], world: World, ranks: int, names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return results with this rank's part of the sequence, of those of the names."""
    names = set(names)
    return {
        name: part_of(result, world, ranks, 1) if name in names else result
        for name, result in results.items()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter or gradient as one process has it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(
    module: nn.Module, input: torch.Tensor, grad: torch.Tensor | float, *more: Any
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the input and of each parameter by name."""
    input = input.detach().clone().requires_grad_()
    module.zero_grad()
    output = module(input, *more)
    output.backward(grad if isinstance(grad, torch.Tensor) else torch.full_like(output, grad))
    grads = {name: whole(parameter.grad) for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input": input.grad, **grads}


def assert_same(
    actual: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    truth: dict[str, torch.Tensor],
    depth: int,
) -> None:
    """Assert that every tensor lies within the error budget of its dtype."""
    assert actual.keys() == truth.keys()
    for name, value in actual.items():
        exact = truth[name].double()
        assert value.shape == exact.shape, f"{name}: {list(value.shape)}"
        error = (value.double() - exact).abs()
        budget = dtypes.error_budget(eager[name], exact, value.dtype, depth=depth)
        assert bool((error <= budget).all()), f"{name}: off by {float(error.max())}"


def one_process(
    make: Callable[[torch.dtype], nn.Module],
    input: torch.Tensor,
    grad: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the plain module gives in ``dtype`` and in float64."""
    given = (make(dtype), input.to(dtype), grad.to(dtype))
    wide = torch.float64
    exact = make(dtype).to(wide), input.to(dtype).to(wide), grad.to(dtype).to(wide)
    return run(*given), run(*exact)
