"""Random convolutions, cut over ranks that are threads, against one process."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import dtypes
from fusedops.parallel import spatial

MODES = ("zeros", "zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class ConvCase:
    """A layer, its input and how that is cut."""

    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    transposed: bool
    mesh: tuple[int, ...]  # data parallel, then one axis for each cut dim
    dims: tuple[int, ...]

    def layer(self) -> nn.Module:
        torch.manual_seed(len(self.shape))
        name = f"Conv{'Transpose' * self.transposed}{len(self.shape) - 2}d"
        return getattr(nn, name)(*self.arguments, **dict(self.options)).double()


def draw(rng: random.Random, ranks: int) -> ConvCase:
    """Return a case that torch computes, for a world of ``ranks``."""
    ndim = rng.choice((1, 2, 2, 3))
    transposed = rng.random() < 0.3
    kernel = [rng.randint(1, 7 if ndim < 3 else 3) for _ in range(ndim)]
    stride = [rng.randint(1, 4) for _ in range(ndim)]
    dilation = [rng.randint(1, 3) for _ in range(ndim)]
    groups = rng.choice((1, 1, 2))
    mode = "zeros" if transposed else rng.choice(MODES)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    longest = 23 if ndim < 3 else 9
    shape = [rng.randint(max(2, r + 1), max(r + 3, longest)) for r in reach]
    padding: Any = [rng.randint(0, min(r, s - 1)) for r, s in zip(reach, shape, strict=True)]
    options = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups}
    if transposed:
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        extra = [rng.randint(0, limit) for limit in most]
        options["output_padding"] = tuple(extra)
        low = [
            min(p, ((n - 1) * s + r + o) // 2)
            for p, n, s, r, o in zip(padding, shape, stride, reach, extra, strict=True)
        ]
        options["padding"] = tuple(low)
    elif rng.random() < 0.15 and all(r < s for r, s in zip(reach, shape, strict=True)):
        options |= {"padding": "same", "stride": 1, "padding_mode": mode}
    else:
        options |= {"padding": tuple(padding), "padding_mode": mode}
    options["bias"] = rng.random() < 0.7
    meshes = [mesh for mesh in MESHES[ranks] if len(mesh) - 1 <= ndim]
    mesh = rng.choice(meshes)
    dims = rng.sample(range(2, 2 + ndim), len(mesh) - 1)
    channels = 2 * groups
    arguments = (channels, 2 * groups, tuple(kernel))
    shape = [rng.randint(1, 2), channels, *shape]
    return ConvCase(arguments, tuple(options.items()), tuple(shape), transposed, mesh, tuple(dims))


MESHES = {
    1: [(1, 1)],
    2: [(1, 2)],
    3: [(1, 3)],
    4: [(1, 4), (2, 2), (1, 2, 2)],
    6: [(1, 2, 3), (2, 3), (1, 6)],
    8: [(1, 8), (2, 2, 2), (1, 2, 4), (1, 2, 2, 2)],
}


def mesh_of(shape: tuple[int, ...]) -> Any:
    """Return a mesh of the first ranks: dp, then y, x, z."""
    size = torch.Size(shape).numel()
    names = ("dp", "y", "x", "z")[: len(shape)]
    return DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=names)


def assert_equal(name: str, actual: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    """Compare in float64."""
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape, what)
    budget = dtypes.exchange_budget(expected)
    error = float((actual - expected).abs().max()) if expected.numel() else 0.0
    assert error <= budget, f"{name}: {error:.2e} > {budget:.2e} in {what}"


def compare(module: nn.Module, x: torch.Tensor, mesh: Any, dims: dict[int, str], what: Any) -> None:
    """Compare output and all gradients of a module on parts with those of one process."""
    single = copy.deepcopy(module)
    x_single = x.clone().requires_grad_()
    expected = single(x_single)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    expected.backward(grad)
    sharded = spatial.shard(module, mesh, dims=dims)
    part = spatial.scatter(x, mesh, dims).requires_grad_()
    out = spatial.gather(sharded(part))
    out.backward(grad)
    assert_equal("output", out.detach(), expected.detach(), what)
    assert part.grad is not None and x_single.grad is not None
    assert_equal("input", spatial.gather(part.grad), x_single.grad, what)
    for (name, mine), theirs in zip(sharded.named_parameters(), single.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
            continue
        assert_equal(name, mine.grad, theirs.grad, what)
    buffers = zip(sharded.named_buffers(), single.buffers(), strict=True)
    for (name, mine), theirs in buffers:
        assert_equal(name, mine.double(), theirs.double(), what)


def run_cases(rank: int, cases: list[ConvCase]) -> None:
    """Compare all cases of one world."""
    meshes: dict[tuple[int, ...], Any] = {}
    for case in cases:
        if case.mesh not in meshes:
            meshes[case.mesh] = mesh_of(case.mesh)
        names = ("y", "x", "z")[: len(case.dims)]
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(5)).double()
        dims = dict(zip(case.dims, names, strict=True))
        compare(case.layer(), x, meshes[case.mesh], dims, case)
    assert dist.is_initialized()
