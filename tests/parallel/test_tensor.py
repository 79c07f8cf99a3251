"""Layers split over ranks equal the plain ones, and communicate as often as they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import assert_same, mesh_of, one_process, part_of, run
from torch import nn

from fusedops.nn import MLP, GatedMLP, LinearAct
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    reduce_in_place,
)

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
B, S, H, F = 2, 8, 12, 16


class _Pair(nn.Module):
    """A column-parallel layer and a row-parallel one behind it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = LinearAct(H, F, dtype=dtype, activation="gelu")
        self.second = nn.Linear(F, H, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(input))


def _split_pair(module: Any, mesh: Any, *, sequence: bool) -> nn.Module:
    module.first = ColumnLinear.of(module.first, mesh, sequence=sequence)
    module.second = RowLinear.of(module.second, mesh, sequence=sequence)
    return module


LAYERS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Callable[..., nn.Module]]] = {
    "pair": (_Pair, _split_pair),
    "mlp": (lambda dtype: MLP(H, F, dtype=dtype), ParallelMLP.of),
    "recomputed": (lambda dtype: MLP(H, F, dtype=dtype, recompute=True), ParallelMLP.of),
    "kept": (lambda dtype: MLP(H, F, dtype=dtype, keep_hidden=True), ParallelMLP.of),
    "gated": (lambda dtype: GatedMLP(H, F, dtype=dtype), ParallelGatedMLP.of),
    "gated_bias": (lambda dtype: GatedMLP(H, F, bias=True, dtype=dtype), ParallelGatedMLP.of),
}


def _seeded(make: Callable[[torch.dtype], nn.Module]) -> Callable[[torch.dtype], nn.Module]:
    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(1)
        return make(dtype)

    return made


def _layers(world: World, ranks: int, dtype: torch.dtype) -> None:
    if not world.member(ranks):
        return
    mesh = mesh_of(world, ranks)
    input, grad = torch.randn(B, S, H).to(dtype), torch.randn(B, S, H).to(dtype)
    for name, (make, split) in LAYERS.items():
        make = _seeded(make)
        eager, truth = one_process(make, input, grad, dtype)
        keys = list(make(dtype).state_dict())
        for sequence in (False, True):
            layer = split(make(dtype), mesh, sequence=sequence)
            assert list(layer.state_dict()) == keys, name
            if not sequence:
                assert_same(run(layer, input, grad), eager, truth, F)
                continue
            mine = part_of(input, world, ranks, 1), part_of(grad, world, ranks, 1)
            here = [_parts(each, world, ranks) for each in (eager, truth)]
            assert_same(run(layer, *mine), *here, F)


def _parts(results: dict[str, torch.Tensor], world: World, ranks: int) -> dict[str, torch.Tensor]:
    """Return them with this rank's part of the sequence, of what has one."""
    return {
        name: part_of(result, world, ranks, 1) if name in ("output", "input") else result
        for name, result in results.items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_layers_equal_the_plain_ones(
    on_ranks: OnRanks, ranks: int, dtype: torch.dtype
) -> None:
    on_ranks(_layers, ranks, dtype)


def _counts(world: World) -> Any:
    if not world.member(2):
        return None
    mesh, found = mesh_of(world, 2), {}
    for name, (make, split) in LAYERS.items():
        for sequence in (False, True):
            layer = split(make(torch.float32), mesh, sequence=sequence)
            input = torch.ones(B, S // 2 if sequence else S, H, requires_grad=True)
            with collectives.recorded() as forward:
                output = layer(input)
            with collectives.recorded() as backward:
                output.sum().backward()
            found[name, sequence] = forward, backward
    return found


def test_each_layer_communicates_once_each_way(on_ranks: OnRanks) -> None:
    """With a split sequence, a bias is summed besides: each rank added it to its own tokens."""
    found = on_ranks(_counts)[0]
    whole = B * S * H * 4
    for (name, sequence), (forward, backward) in found.items():
        biases = 0 if name == "gated" else 1
        if sequence:
            assert forward.counts() == {"all_gather": 1, "reduce_scatter": 1}
            reduced = {"all_reduce": biases} if biases else {}
            assert backward.counts() == {"all_gather": 1, "reduce_scatter": 1, **reduced}
            assert forward.bytes() == 2 * (whole // 2)
            assert backward.bytes() == 2 * (whole // 2) + biases * H * 4
        else:
            assert forward.counts() == backward.counts() == {"all_reduce": 1}
            assert forward.bytes() == backward.bytes() == whole


def _in_place(world: World) -> None:
    """A product is reduced where it is; leaves and views, which may be others, elsewhere."""
    if not world.member(2):
        return
    group = world.group(2)
    x = torch.full((2, 4), 1.0 + world.rank, requires_grad=True)
    product = x * 3.0
    memory = product.data_ptr()
    output = reduce_in_place(product, group)
    assert output.data_ptr() == memory and torch.equal(output, torch.full((2, 4), 9.0))
    output.backward(torch.full((2, 4), 2.0))
    assert torch.equal(x.grad, torch.full((2, 4), 6.0))
    # The product is an input of another operation, which reads it before the reduction.
    squared = (product := x * 3.0).square()
    assert torch.equal(reduce_in_place(product, group), torch.full((2, 4), 9.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    for mine in (x, x.detach(), (x * 3.0)[:, :2]):
        before = mine.clone()
        total = reduce_in_place(mine, group)
        assert torch.equal(mine, before) and not torch.equal(total, before)


def test_a_reduction_in_place_corrupts_nothing_that_is_needed(on_ranks: OnRanks) -> None:
    on_ranks(_in_place)


def _memory_of_reduction(world: World) -> list[bool]:
    """Return whether the outputs of row-parallel layers lie in the memory of their products."""
    if not world.member(2):
        return []
    found = []
    for name in ("mlp", "gated"):
        make, split = LAYERS[name]
        layer: Any = split(make(torch.float32), mesh_of(world, 2), sequence=False)
        owner = layer if name == "mlp" else layer.down_proj
        product, memory = type(owner).product, []

        def kept(self: Any, inner: Any, product: Any = product, memory: Any = memory) -> Any:
            memory.append((result := product(self, inner)).data_ptr())
            return result

        reduced: list[int] = []
        reduce = owner.reduce
        owner.reduce = lambda partial, r=reduce, m=reduced: (
            m.append((y := r(partial)).data_ptr()) or y
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(owner), "product", kept)
            layer(torch.ones(B, S, H)).sum().backward()
        found.append(memory == reduced)
    return found


def test_row_parallel_layers_reduce_in_the_memory_of_the_product(on_ranks: OnRanks) -> None:
    assert on_ranks(_memory_of_reduction)[:2] == [[True, True]] * 2
