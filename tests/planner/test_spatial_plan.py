"""Plans of cut images: bytes equal those of real ranks, and bad input is one sentence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

from fusedops.cli.main import app
from fusedops.cli.plan.images import image_model
from fusedops.parallel import spatial
from fusedops.parallel.comm import collectives
from fusedops.planner import load_device, spatial_plan
from fusedops.planner.spatial import cuts_of
from fusedops.testing import threads

BYTES = ("input", "saved", "halo_forward", "halo_backward", "reduced")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 8, 5, padding=4, dilation=2, padding_mode="circular", groups=2),
        nn.AvgPool2d(3, 2, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(8, 2, 4, 2, 1),
    )


MODELS = {
    "unet": (lambda: image_model("unet", 3), (2, 3, 45, 38)),
    "unet of volumes": (lambda: image_model("unet", 1, 3), (1, 1, 17, 20, 16)),
    "network": (network, (1, 3, 61, 47)),
}


def _real(rank: int, name: str, cut: tuple[int, ...]) -> dict[str, int]:
    """Return what a rank saves and sends in a step with data."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    module = make()
    if next(module.parameters()).is_meta:
        module = module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.0, 0.1)
    names = ("z", "y", "x")[-len(cut) :]
    mesh = DeviceMesh("cpu", torch.arange(math.prod(cut)).view(cut), mesh_dim_names=names)
    dims = {index + 2: names[index] for index, ranks in enumerate(cut) if ranks > 1}
    x = spatial.scatter(torch.randn(shape), mesh, dims)
    owned = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "_local", tensor).untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage
        return tensor

    with collectives.recorded() as log:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = module(x)
        forward = log.bytes("send_receive")
        kept = sum(storage.nbytes() for storage in saved.values())
        out.backward(torch.ones_like(out))
    halo = log.bytes("send_receive")
    sizes = (x.local.numel() * 4, kept, forward, halo - forward, log.bytes() - halo)
    return dict(zip(BYTES, sizes, strict=True))


CUT = [("unet", (2, 2)), ("unet", (3, 1)), ("network", (2, 3)), ("network", (1, 4))]


@pytest.mark.ci(every=2)
@pytest.mark.parametrize(("name", "cut"), [*CUT, ("unet of volumes", (2, 1, 2))])
def test_planned_bytes_are_those_of_real_ranks(name: str, cut: tuple[int, ...]) -> None:
    make, shape = MODELS[name]
    plan = spatial_plan(make(), shape, cut, load_device("h100"))
    planned = [{name: getattr(rank, name) for name in BYTES} for rank in plan.ranks]
    assert planned == threads.run(_real, math.prod(cut), name, cut)
    assert min(rank["halo_forward"] for rank in planned) > 0


def test_a_halo_is_hidden_by_large_parts_and_not_by_small_ones() -> None:
    module, device = image_model("unet", 4), load_device("h100")
    large = spatial_plan(module, (1, 4, 30000, 30000), (2, 2), device)
    assert large.input == 14_400_000_000
    assert large.most("input") == 14_400_000_000 // 4
    assert large.most("exposed_seconds") < 0.05 * large.seconds
    single = large.single.saved
    assert single / 4 <= large.most("saved") <= 1.01 * single / 4
    small = spatial_plan(module, (1, 4, 64, 64), (2, 2), device)
    assert small.most("exposed_seconds") > 0.2 * small.seconds
    assert small.efficiency < large.efficiency < 1


@pytest.mark.parametrize(
    ("module", "sent", "waited", "cards"),
    [
        (nn.BatchNorm2d(8), "reduced", "exposed_seconds", 8),  # sums over all ranks
        (nn.Conv2d(8, 8, 3, padding=1, bias=False), "halo_forward", "halo_seconds", 1),
    ],
)
def test_a_collective_between_nodes_has_all_network_cards_and_a_halo_one(
    module: nn.Module, sent: str, waited: str, cards: int
) -> None:
    device = load_device("h100")
    slow, fast = (
        spatial_plan(
            module.requires_grad_(False),
            (1, 8, 64, 1),
            (16, 1),
            replace(device, links=replace(device.links, network=network)),
        ).ranks[1]
        for network in (1e6, 2e6)
    )
    share = device.efficiency.ring if cards > 1 else device.efficiency.point_to_point
    moved = getattr(slow, sent) / (cards * share)
    difference = getattr(slow, waited) - getattr(fast, waited)
    assert difference == pytest.approx(moved * (1 / 1e6 - 1 / 2e6))


def test_a_longer_axis_traces_its_busiest_ranks() -> None:
    module, device = network(), load_device("h100")
    plan = spatial_plan(module, (1, 3, 96, 8), (6, 1), device)
    assert [rank.place[0] for rank in plan.ranks] == [0, 1, 3, 5]
    assert plan.most("halo_forward") == plan.ranks[1].halo_forward > plan.ranks[0].halo_forward


def test_modules_are_not_changed_and_half_takes_half() -> None:
    module = network()
    device, shape = load_device("h100"), (1, 3, 64, 64)
    full = spatial_plan(module, shape, (2, 2), device)
    half = spatial_plan(module, shape, (2, 2), device, dtype=torch.bfloat16, single=None)
    assert 2 * half.most("halo_forward") == full.most("halo_forward")
    assert half.input * 2 == full.input
    assert all(p.device.type == "cpu" and p.grad is None for p in module.parameters())


def test_cuts_have_a_row_for_each_device() -> None:
    assert cuts_of(4, (1, 1, 2, 9)) == [(1, 4), (2, 2)]
    assert cuts_of(8, (1, 1, 1, 1)) == []


@pytest.mark.parametrize(
    ("shape", "cut", "words"),
    [
        ((1, 3, 8, 8), (2,), "2 numbers"),
        ((1, 3, 8, 8), (9, 1), "at most the 8 rows"),
        ((1, 3), (), "one to three dims"),
        ((1, 3, 0, 8), (1, 1), "at least 1"),
        ((1, 5, 64, 64), (2, 2), "the module does not take"),
    ],
)
def test_bad_sizes_are_one_sentence(shape: Any, cut: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        spatial_plan(network(), shape, cut, load_device("h100"))
    assert "\n" not in str(error.value)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", "image", *args])


def test_command_line() -> None:
    given = ("--model", "unet", "--shape", "1x3x256x200", "--devices", "2", "--device", "h100")
    shown = invoke(*given)
    assert shown.exit_code == 0 and "2 of 2 cuts fit" in shown.output
    record = json.loads(invoke(*given, "--json", "-").output)
    assert [row["fits"] for row in record["cuts"]] == [True, True]
    assert record["cuts"][0]["seconds"] <= record["cuts"][1]["seconds"]
    assert record["cuts"][0]["input"] == 3 * 256 * 200 * 4
    assert invoke(*given, "--memory", "1MiB").exit_code == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--model": "unett"}, "package:function"),
        ({"--model": "torch.nn:Conv2d"}, "cannot be made"),
        ({"--model": "builtins:dict"}, "nn.Module"),
        ({"--shape": "1x3x64"}, ""),
        ({"--shape": "64x64"}, "--shape must be"),
        ({"--shape": "1x3x0x8"}, "without rows"),
        ({"--device": ""}, "--device is missing"),
        ({"--devices": "65536"}, "no cut gives"),
        ({"--precision": "mixed"}, "known: float32, half"),
        ({"--tp": "2"}, "No such option"),
    ],
)
def test_bad_options_are_one_sentence(change: dict[str, str], words: str) -> None:
    options = {"--model": "unet", "--shape": "1x3x64x64", "--devices": "2", "--device": "h100"}
    done = invoke(*(word for pair in (options | change).items() for word in pair))
    assert done.exit_code == (2 if words else 0), done.output
    assert words in " ".join(done.output.split())
