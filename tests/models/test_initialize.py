"""First weights: their distribution, and that no layout changes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedops.models import TINY, Transformer, initialize
from fusedops.models.initialize import _fill_normal


def test_weights_are_normal_and_branch_ends_narrower() -> None:
    config = replace(TINY["tiny-gpt2"], hidden_size=256, intermediate_size=1024)
    model = Transformer(config, device="meta").to_empty(device="cpu")
    initialize(model, 7)
    for name, value in model.named_parameters():
        if name.endswith("norm.weight"):
            assert value.eq(1).all()
        elif value.dim() == 1:
            assert value.eq(0).all()
        else:
            narrow = name.endswith(("attention.output.weight", "w2"))
            wanted = 0.02 / 2 if narrow else 0.02  # sqrt(2 * 2 layers)
            scaled = value.detach().double() / wanted
            error = 5 / value.numel() ** 0.5  # five deviations of a mean
            assert abs(scaled.mean()) < error and abs(scaled.square().mean() - 1) < 2 * error
            # Normal, not only of that width: its fourth moment is 3.
            assert abs(scaled.pow(4).mean() - 3) < 10 * error
    # Neighbours in any direction, and parameters among each other, have nothing in common.
    table = model.embedding.tokens.weight.detach() / 0.02
    key = model.layers["0"].attention.key.weight / 0.02
    for other in (table.roll(1, 1), table.roll(1, 0), key):
        product = (table[:256] * other[:256]).mean()
        assert abs(product) < 5 / table.numel() ** 0.5


def test_a_seed_gives_the_same_bits_and_another_gives_others() -> None:
    model = Transformer(TINY["tiny-mixtral"])

    def drawn(seed: int | None) -> dict[str, torch.Tensor]:
        initialize(model, seed)
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    first, again, other = drawn(3), drawn(3), drawn(4)
    weights = [name for name, value in first.items() if value.dim() > 1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in weights)
    torch.manual_seed(5)
    one = drawn(None)
    torch.manual_seed(5)
    assert all(torch.equal(one[name], value) for name, value in drawn(None).items())


@pytest.fixture
def ranks() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Sizes that divide and sizes that do not; two axes on one dimension, in both orders, and on two.
@pytest.mark.parametrize("shape", [(12, 8), (10, 7), (3, 6, 5)], ids=str)
@pytest.mark.parametrize("tensor_dim", [0, 1])
def test_a_shard_is_the_slice_of_the_whole(
    shape: tuple[int, ...], tensor_dim: int, ranks: None
) -> None:
    whole = torch.empty(shape)
    _fill_normal(whole, "layer.weight", 11, 1.0)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        # torch remembers meshes by their names: each needs its own.
        names = [f"{axis}-{rank}-{tensor_dim}-{shape}" for axis in ("dp", "tp")]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(names))
        module = torch.nn.Module()
        place = [Shard(tensor_dim)]
        of_rank = distribute_tensor(whole.clone(), mesh[names[1]], place, src_data_rank=None)
        module.weight = torch.nn.Parameter(of_rank)
        fully_shard(module, mesh=mesh[names[0]])
        weight = module.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.ndim == 2
        wanted = weight.to_local().clone()
        with torch.no_grad():
            weight.to_local().zero_()
            _fill_normal(weight, "layer.weight", 11, 1.0)
        assert wanted.numel() == 0 or wanted.any()
        assert torch.equal(weight.to_local(), wanted)
        dist.destroy_process_group()


def test_a_parameter_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="on a device with memory"):
        initialize(Transformer(TINY["tiny-llama"], device="meta"), 0)
