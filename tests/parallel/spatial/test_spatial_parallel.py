"""What is sent, other parallelism around a cut module, compilation, recomputation, bad input."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import on_threads
from spatial_cases import assert_equal, compare, mesh_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops import UnsupportedError
from fusedops.parallel import shard, spatial
from fusedops.parallel.comm import collectives

ROOT = Path(__file__).resolve().parents[3]
DIMS = {2: "y", 3: "x"}
OnProcesses = Callable[..., list[Any]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 5, padding=4, dilation=2, padding_mode="circular"),
        nn.ConvTranspose2d(4, 3, 4, 2, 1),
    )


def image(seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 19, 23, generator=generator, dtype=torch.float64)


@on_threads(4)
def test_only_the_halo_is_sent_and_it_overlaps_the_interior(rank: int) -> None:
    """Each rank has 8 x 10 of 16 x 20 pixels: it sends one row of 10, then one column of 9."""
    mesh = mesh_of((1, 2, 2))
    conv = spatial.shard(nn.Conv2d(3, 5, 3, padding=1, bias=False).double(), mesh, dims=DIMS)
    x = spatial.scatter(torch.randn(2, 3, 16, 20).double(), mesh, DIMS).requires_grad_()
    with collectives.recorded() as forward:
        out = conv(x)
    with collectives.recorded() as backward:
        out.backward(torch.ones_like(out))
    halo = 2 * 3 * (10 + 9) * 8
    assert (forward.bytes(), backward.bytes("send_receive")) == (halo, halo)
    assert ("halo y", "conv interior") in forward.overlapped()


def _on_processes(rank: int) -> None:
    mesh = mesh_of((2, 2, 2))
    compare(network().double(), image(), mesh, DIMS, "processes")


@pytest.mark.distributed
def test_processes_equal_one(on_processes: OnProcesses) -> None:
    on_processes(_on_processes, 8)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero 1", "zero 3"])
@on_threads(8)
def test_data_parallel_around_a_cut_module(rank: int, kind: str) -> None:
    """Compare ranks that have different images with one process that averages over them."""
    mesh = mesh_of((2, 2, 2))
    images = [image(seed) for seed in (1, 2)]
    single = [network().double() for _ in images]
    for module, x in zip(single, images, strict=True):
        module(x).square().mean().backward()
    module = spatial.shard(network().double(), mesh, dims=DIMS)
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        wrapped: nn.Module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in (module[0], module[4]):
            fully_shard(layer, mesh=mesh["dp"])
        wrapped = fully_shard(module, mesh=mesh["dp"])
    else:  # adds the gradients of the ranks
        wrapped = module
        shard([module[0], module[4], module], mesh["dp"], stage=int(kind[-1]))
    x = spatial.scatter(images[mesh.get_local_rank("dp")], mesh, DIMS)
    F.mse_loss(
        wrapped(x), spatial.scatter(torch.zeros(2, 3, 20, 24).double(), mesh, DIMS)
    ).backward()
    for mine, *others in zip(
        wrapped.parameters(), *(module.parameters() for module in single), strict=True
    ):
        expected = (others[0].grad + others[1].grad) / (1 if kind.startswith("zero") else 2)
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        assert_equal(kind, grad, expected, kind)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = network(), reentrant
        self.net[1] = nn.GroupNorm(2, 4)  # running statistics would be updated twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


@on_threads(4)
def test_recomputation(rank: int) -> None:
    mesh = mesh_of((1, 2, 2))
    for reentrant in (False, True):
        compare(Recomputed(reentrant).double(), image(), mesh, DIMS, f"reentrant {reentrant}")


def _compiled(rank: int) -> None:
    mesh = mesh_of((1, 2))
    module = spatial.shard(network().double(), mesh, dims={2: "y"})
    x = spatial.scatter(image(), mesh, {2: "y"})
    eager = spatial.gather(module(x))
    compiled = torch.compile(module, backend="eager")
    assert_equal("compiled", spatial.gather(compiled(x)), eager, "compile")


@pytest.mark.distributed
def test_compiled_equals_eager(on_processes: OnProcesses) -> None:
    on_processes(_compiled, 2)


@on_threads(4)
def test_channels_last_autocast_and_checkpoints(rank: int) -> None:
    mesh = mesh_of((1, 2, 2))
    single = network()
    x = image().float()
    module = spatial.shard(network(), mesh, dims=DIMS).to(memory_format=torch.channels_last)
    part = spatial.scatter(x.to(memory_format=torch.channels_last), mesh, DIMS)
    assert module[0](part).local.is_contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        expected, out = single(x), module(part)
        assert out.dtype == expected.dtype == torch.bfloat16
    error = (spatial.gather(out).float() - expected.float()).abs().max()
    assert float(error) <= 8 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    state = module.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    single.load_state_dict(state)


@on_threads(3)
def test_plain_parts_of_any_extent(rank: int) -> None:
    """A loader that reads its own part, at bounds of its own, gives plain tensors."""
    mesh = mesh_of((1, 3))
    x, bounds = image(), [0, 3, 4, 19]
    part = x[:, :, bounds[rank] : bounds[rank + 1]]
    layer = nn.Conv2d(2, 2, 5, padding=2).double()
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)
    expected = layer(x)
    out = spatial.shard(layer, mesh, dims={2: "y"})(part)
    assert out.local.shape[2] == part.shape[2]
    assert_equal("parts", spatial.gather(out).detach(), expected.detach(), "parts")
    weight = layer.weight.detach()
    expected = F.conv2d(x, weight, padding=2)
    for extents, collective in ((None, ["extents"]), ({2: (3, 1, 15)}, [])):
        with collectives.recorded() as log:
            cut = spatial.from_parts(part, mesh, {2: "y"}, extents=extents)
        assert [call.label for call in log.calls] == collective  # known ones need none
        convolved = spatial.from_parts(F.conv2d(cut, weight, padding=2).local, mesh, {2: "y"})
        assert_equal("conv", spatial.gather(convolved, [2]), expected, "conv")
    rows = spatial.halo_exchange(cut, {2: (4, 5)}, mode="circular")
    index = torch.arange(bounds[rank] - 4, bounds[rank + 1] + 5) % 19
    assert_equal("halo", rows, x[:, :, index], "halo")


@on_threads(8)
def test_gradient_of_a_full_input(rank: int) -> None:
    """A sub-mesh, a copied module, and a full input that requires a gradient."""
    mesh = mesh_of((2, 2, 2))["y", "x"]
    module = copy.deepcopy(spatial.shard(network().double(), mesh, dims=DIMS))
    x, single = (image().requires_grad_() for _ in range(2))
    module(spatial.scatter(x, mesh, DIMS)).square().mean().backward()
    network().double()(single).square().mean().backward()
    assert x.grad is not None and single.grad is not None
    assert_equal("full input", x.grad, single.grad, "scatter")


@on_threads(4)
def test_input_without_a_batch(rank: int) -> None:
    mesh = mesh_of((1, 2, 2))
    conv = nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode="reflect").double()
    compare(conv, image()[0], mesh, {1: "y", -1: "x"}, "unbatched")


@on_threads(2)
def test_bad_input_is_one_sentence(rank: int) -> None:
    mesh = mesh_of((1, 2))
    x = image()
    part = spatial.scatter(x, mesh, {2: "y"})

    plain, two = part.local[:, :, :8], {2: "y"}
    other, weight = spatial.scatter(x, mesh, {3: "y"}), torch.ones(1, 2, 25, 1).double()
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "mean 'y'|one of 'dp', 'y'", lambda: spatial.scatter(x, mesh, {2: "yy"})),
        (ValueError, r"in \[-4, 4\)", lambda: spatial.scatter(x, mesh, {4: "y"})),
        (ValueError, "at least one dim", lambda: spatial.scatter(x, mesh, {})),
        (ValueError, "an axis cuts one dim", lambda: spatial.scatter(x, mesh, {2: "y", 3: "y"})),
        (TypeError, "DeviceMesh", lambda: spatial.scatter(x, None, two)),
        (TypeError, "cut already", lambda: spatial.scatter(part, mesh, two)),
        (TypeError, "as from_parts makes", lambda: spatial.halo_exchange(x, {2: (1, 1)})),
        (ValueError, r"cut dims \[2\]", lambda: spatial.halo_exchange(part, {3: (1, 1)})),
        (ValueError, "at least 0|>= 0", lambda: spatial.halo_exchange(part, {2: (1, -1)})),
        (ValueError, "one of the 4 dims", lambda: spatial.gather(part, [4])),
        (ValueError, "smaller than the 19 rows", lambda: F.pad(part, (0, 0, 19, 0), "reflect")),
        (ValueError, "at most the 19 rows", lambda: F.pad(part, (0, 0, 0, 20), "circular")),
        (ValueError, "at least 25", lambda: F.conv2d(part, weight)),
        (UnsupportedError, "cumsum has no rule", lambda: part.cumsum(2)),
        (UnsupportedError, "one mesh axis cuts different dims", lambda: part + other),
        (UnsupportedError, "Sync", lambda: spatial.shard(nn.SyncBatchNorm(2), mesh, dims=two)),
    ]
    for extents, words in (
        ({3: (10, 9)}, r"dims \[2\]"),
        ({2: (19,)}, "2 integers >= 0, one for each rank"),
        ({2: (9, 9)}, "whose part has"),
        ({2: (-1, 20)}, "integers >= 0"),
    ):
        make = partial(spatial.from_parts, plain, mesh, two, extents=extents)
        refused.append((ValueError, words, make))
    for kind, words, call in refused:
        with pytest.raises(kind, match=words):
            call()


def test_picture_is_the_plan_s() -> None:
    """Else: python docs/gen_spatial.py."""
    names = runpy.run_path(str(ROOT / "docs/gen_spatial.py"))
    assert names["PICTURE"].read_text() == names["picture"]()


@pytest.mark.slow
def test_example_has_the_same_losses_on_four_processes() -> None:
    script = [str(ROOT / "examples/spatial_unet.py"), "--steps", "6"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    runs = [[sys.executable, *script], [*start, *script, "--mesh", "2,2"]]
    one, four = (
        subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for run in runs
    )
    assert one.count("loss") == 6
    assert one == four
