"""Layers split over ranks equal the plain ones, and communicate as often as they should."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import assert_same, mesh_of, one_process, part_of, parts_of, run, whole
from torch import nn

from fusedops.nn import MLP, AddLayerNorm, AddRMSNorm, GatedMLP, LayerNorm, LinearAct, RMSNorm
from fusedops.ops import linear_act
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    from_tensor_parallel,
    local,
    reduce_in_place,
    replicated,
    to_tensor_parallel,
)
from fusedops.parallel.tensor.replicated import allreduce_gradients

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
B, S, H, F = 2, 12, 20, 24


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
            here = [parts_of(each, world, ranks, ("output", "input")) for each in (eager, truth)]
            assert_same(run(layer, *mine), *here, F)


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


BLOCKS: dict[str, tuple[Any, Callable[..., Any], int, int]] = {
    "column": (lambda: LinearAct(H, F, activation="gelu"), ColumnLinear.of, H, F),
    "column_linear": (lambda: LinearAct(H, F, False, activation="identity"), ColumnLinear.of, H, F),
    "row": (lambda: LinearAct(F, H, activation="identity"), RowLinear.of, F, H),
    "mlp": (lambda: MLP(H, F), ParallelMLP.of, H, H),
    "gated": (lambda: GatedMLP(H, F), ParallelGatedMLP.of, H, H),
}


class _TwoProducts(nn.Module):
    """An MLP as two products: ``fusedops.mlp`` rounds and adds up in other places."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self.layer = [layer]  # not a child

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layer
        w1, b1, w2 = (local(each) for each in (layer.w1, layer.b1, layer.w2))
        hidden = linear_act(
            to_tensor_parallel(input, layer.group, sequence=True),
            w1,
            b1,
            activation=layer.activation,
        )
        output = from_tensor_parallel(
            linear_act(hidden, w2, activation="identity"), layer.group, sequence=True
        )
        return output + replicated(layer.b2, layer.group, partial_grad=True)


def _block_results(world: World, ranks: int, dtype: torch.dtype) -> Any:
    if not world.member(ranks):
        return None
    mesh, found = mesh_of(world, ranks), {}
    for name, (make, split, inputs, outputs) in BLOCKS.items():
        module = make().to(dtype)
        x, grad = torch.randn(B, S, inputs).to(dtype), torch.randn(B, S, outputs).to(dtype)
        # Of a column the input is a part of the sequence, of a row the output; features the rest.
        mine = part_of(x, world, ranks, 2 if name == "row" else 1)
        incoming = part_of(grad, world, ranks, 2 if name.startswith("column") else 1)
        plain, cut = (split(module, mesh, sequence=True, overlap=each) for each in (False, True))
        if name == "mlp":
            plain = _TwoProducts(plain)
        with collectives.recorded() as log:
            expected = run(plain, mine, incoming)
        with collectives.recorded() as blocks:
            results = run(cut, mine, incoming)
        assert results.keys() == expected.keys()
        for key, value in results.items():
            assert torch.equal(value, expected[key]), f"{name}: {key} has other bits"
        again = (ranks - 1) * mine.numel() * mine.element_size() if name != "row" else 0
        assert blocks.bytes() == log.bytes() + again, name
        found[name] = blocks.overlapped()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_give_the_same_bits_beside_communication(
    on_ranks: OnRanks, ranks: int, dtype: torch.dtype
) -> None:
    """The input is gathered once more in the backward, where a whole product keeps it."""
    for rank, answer in enumerate(on_ranks(_block_results, ranks, dtype)[:ranks]):
        ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
        for name in ("column", "column_linear", "mlp", "gated"):
            assert (f"block {behind} comes", f"block {rank}") in answer[name]
            after = f"gradient of block {(ahead + 1) % ranks}"
            assert (f"block {ahead} leaves", after) in answer[name]
            assert ("input comes again", f"gradient of block {ahead}") in answer[name]
        for name in ("row", "mlp", "gated"):
            assert (f"block {ahead} leaves", f"block {(ahead + 1) % ranks}") in answer[name]
            assert (f"block {behind} comes", f"gradient of block {rank}") in answer[name]


def _bad_input(world: World) -> None:
    if not world.member(2):
        return
    mesh = mesh_of(world, 2)
    with pytest.raises(ValueError, match="ParallelMLP: overlap must be False without sequence"):
        ParallelMLP.of(MLP(H, F), mesh, overlap=True)
    with pytest.raises(ValueError, match="overlap must be False where the module recomputes"):
        ParallelMLP.of(MLP(H, F, recompute=True), mesh, sequence=True, overlap=True)
    layer = RowLinear.of(LinearAct(F, H, activation="identity"), mesh, sequence=True, overlap=True)
    with pytest.raises(ValueError, match="size of dim -2 must be a multiple of the 2 ranks"):
        layer(torch.zeros(3, F // 2))


def test_bad_input_names_what_is_wrong(on_ranks: OnRanks) -> None:
    on_ranks(_bad_input)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: LayerNorm(H),
    "layer_without_bias": lambda: LayerNorm(H, bias=False),
    "plain": lambda: LayerNorm(H, elementwise_affine=False),
    "rms": lambda: RMSNorm(H, 1e-5, weight_offset=1.0, rounding="hf"),
    "add_layer": lambda: AddLayerNorm(H),
    "add_rms": lambda: AddRMSNorm(H),
}


def _norm_results(
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
        allreduce_gradients(split := deepcopy(plain), mesh)
        assert list(split.state_dict()) == list(plain.state_dict())
        eager = _norm_results(plain, inputs, grad)
        plain.zero_grad()
        wide = (each.double() for each in inputs)
        truth = _norm_results(plain.double(), tuple(wide), grad.double())
        mine = tuple(part_of(each, world, ranks, 1) for each in inputs)
        with collectives.recorded() as log:
            found = _norm_results(split, mine, part_of(grad, world, ranks, 1))
        counts[name] = log.counts()
        names = [key for key in found if key[-1].isdigit()]
        assert_same(found, *(parts_of(each, world, ranks, names) for each in (eager, truth)), B * S)
    return counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_norms_of_parts_equal_those_of_the_whole(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    """One all-reduce adds up the gradients of weight and bias."""
    counts = on_ranks(_norms, 2, dtype)[0]
    for name, count in counts.items():
        assert count == ({} if name == "plain" else {"all_reduce": 1}), name
