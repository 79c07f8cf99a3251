"""Products cut into blocks: the bits and bytes of whole ones, and communication beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_pool import World
from split_layers import mesh_of, part_of, run
from torch import nn

from fusedops.nn import MLP, GatedMLP, LinearAct
from fusedops.ops import linear_act
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    from_tensor_parallel,
    local,
    replicated,
    to_tensor_parallel,
)

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
B, S, H, F = 2, 12, 20, 24

LAYERS: dict[str, tuple[Any, Callable[..., Any], int, int]] = {
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


def _results(world: World, ranks: int, dtype: torch.dtype) -> Any:
    if not world.member(ranks):
        return None
    mesh, found = mesh_of(world, ranks), {}
    for name, (make, split, inputs, outputs) in LAYERS.items():
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
    for rank, answer in enumerate(on_ranks(_results, ranks, dtype)[:ranks]):
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
