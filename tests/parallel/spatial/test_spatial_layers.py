"""Layers and functions on cut tensors equal one process, with the gradients of all inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from run_ranks import on_threads
from spatial_cases import MESHES, compare, draw, mesh_of, run_cases
from torch import nn
from torch.nn import functional as F

from fusedops.testing import threads

Function = Callable[..., torch.Tensor]


class Fn(nn.Module):
    """A function of the input and of parameters of these shapes."""

    def __init__(self, function: Function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def attention(x: torch.Tensor) -> torch.Tensor:
    weights = (tokens(x) @ x.flatten(2)).softmax(-1)
    return (weights @ tokens(x)).transpose(1, 2).reshape(x.shape)


def class_token(x: torch.Tensor, c: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    embedded = torch.cat([c.expand(x.shape[0], -1, -1), tokens(x)], 1) + p
    return F.scaled_dot_product_attention(embedded, embedded, embedded)[:, 0]


def channels_last(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *linear: torch.Tensor
) -> torch.Tensor:
    weight, bias, gain = linear
    normed = F.layer_norm(x.permute(0, 2, 3, 1), [4], scale, shift)
    return (F.linear(normed, weight, bias) * gain).permute(0, 3, 1, 2)


def squeeze_excite(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x * F.conv2d(F.adaptive_avg_pool2d(x, 1), weight, bias).sigmoid()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bn": lambda: nn.BatchNorm2d(4),
    "gn": lambda: nn.GroupNorm(2, 4),
    "in": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "bneval": lambda: nn.BatchNorm2d(4).eval(),
    "relu": lambda: nn.Sequential(nn.ReLU(), nn.GELU(), nn.Hardswish(), nn.PReLU(4)),
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "maxc": lambda: nn.MaxPool2d((3, 2), 2, 1, ceil_mode=True),
    "maxd": lambda: nn.MaxPool2d(3, 1, 1, dilation=2),
    "avg": lambda: nn.AvgPool2d(3, 2, 1),
    "avgc": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avgc2": lambda: nn.AvgPool2d(4, 3, 2, ceil_mode=True),
    "avgo": lambda: nn.AvgPool2d(4, 3, 2, divisor_override=5),
    "ad1": lambda: nn.AdaptiveAvgPool2d(1),
    "ad": lambda: nn.AdaptiveAvgPool2d((5, 3)),
    "admax": lambda: nn.AdaptiveMaxPool2d(1),
    "adx": lambda: nn.AdaptiveAvgPool2d((None, 4)),
    "ps": lambda: nn.PixelShuffle(2),
    "shuffle": lambda: nn.ChannelShuffle(2),
    "lin": lambda: nn.Linear(11, 7),
    "head": lambda: nn.Sequential(nn.Flatten(1), nn.Linear(4 * 13 * 11, 5)),
    "d2": lambda: nn.Dropout2d(0.0),
    "permln": lambda: Fn(channels_last, (4,), (4,), (9, 4), (9,), (9,)),
    "se": lambda: Fn(squeeze_excite, (4, 4, 1, 1), (4,)),
    "pos": lambda: Fn(lambda x, p, q: tokens(x + q) + p, (1, 143, 4), (13, 1)),
    "cls": lambda: Fn(class_token, (1, 1, 4), (1, 144, 4)),
}
FUNCTIONS: dict[str, Function] = {
    "max1": lambda x: F.max_pool1d(x.flatten(0, 1), 3, 2, 1),
    "avg1": lambda x: F.avg_pool1d(x.flatten(0, 1), 3, 2, 1),
    "pu": lambda x: F.pixel_unshuffle(x[:, :, :12, :10], 2),
    "in place": lambda x: F.pad((x * 1)[:, :, 1:12].relu_()[:, :, 2:], (0, 0, 1, 0)).mul_(2),
    "slice": lambda x: x[:, :, 1:, ::2] * 2,
    "tv": lambda x: (x[:, :, 1:] - x[:, :, :-1]).abs(),
    "mean": lambda x: x.mean((2, 3), keepdim=True) * x,
    "meanw": lambda x: x.mean(3, keepdim=True) * x,
    "var": lambda x: x.var((2, 3)),
    "special": lambda x: torch.where(
        (x > 0) & ~(x > 1), 2 / (x.abs() + 1), 5 % (x.detach().abs() + 1)
    ),
    "norm": lambda x: x * x.norm(dim=(2, 3), keepdim=True),
    # A norm of zeros has the gradient zero.
    "norm0": lambda x: (x * torch.eye(4)[0].view(4, 1, 1)).norm(dim=(2, 3)),
    "softmin": lambda x: F.softmin(x, 1),
    "amax": lambda x: x - x.amax((2, 3), True),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "catcut": lambda x: torch.cat([x, x * 2], 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "chunkcut": lambda x: x.chunk(3, 2)[1],
    "row": lambda x: x * x[:, :, 3:4] + x[:, :, :, 2:3],
    "sel": lambda x: x[:, :, 3] + x[:, :, -1],
    "attn": lambda x: F.scaled_dot_product_attention(*[tokens(x)] * 3),
    "attn2": attention,
    "linattn": lambda x: (x.flatten(2) @ tokens(x)).softmax(-1) @ x.flatten(2),
    "split": lambda x: x[:, :, :12, :9].reshape(2, 4, 4, 3, 3, 3).amax((3, 5)),
    "crop": lambda x: F.pad(x, (-2, 3, -4, -1)),
    **{
        f"pad_{mode}": partial(F.pad, pad=(2, 3, 4, 1), mode=mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
}

RESIZES: list[tuple[str, bool | None]] = [
    ("nearest", None),
    ("nearest-exact", None),
    ("area", None),
    ("bilinear", True),
    ("bilinear", False),
]


for _mode, _align in RESIZES:
    for _size in (2, (20, 7), 0.61, 1.7):
        _argument = "size" if isinstance(_size, tuple) else "scale_factor"
        _options: dict[str, Any] = {"mode": _mode, "align_corners": _align, _argument: _size}
        FUNCTIONS[f"resize {_mode} {_align} {_size}"] = partial(F.interpolate, **_options)
LAYERS |= {name: partial(Fn, function) for name, function in FUNCTIONS.items()}

WORLDS = {
    2: ((1, 2), {2: "y"}),
    3: ((1, 3), {3: "y"}),
    4: ((1, 2, 2), {2: "y", 3: "x"}),
    6: ((1, 2, 3), {3: "y", 2: "x"}),
    8: ((1, 8), {2: "y"}),
}


@pytest.mark.ci(every=2)
@pytest.mark.parametrize("ranks", WORLDS)
@on_threads("ranks")
def test_layers_equal_one_process(rank: int, ranks: int) -> None:
    shape, dims = WORLDS[ranks]
    mesh = mesh_of(shape)
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer = make().double()
        for parameter in layer.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.data.normal_(generator=generator)
        x = torch.randn(2, 4, 13, 11, generator=torch.Generator().manual_seed(5)).double()
        compare(layer, x, mesh, dims, name)


def sweep(ranks: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    threads.run(run_cases, ranks, [draw(rng, ranks) for _ in range(count)])


@pytest.mark.parametrize("ranks", MESHES)
def test_convolutions_equal_one_process(ranks: int) -> None:
    """Random ones, in float64."""
    sweep(ranks, 40, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", MESHES)
def test_many_convolutions_equal_one_process(ranks: int, seed: int) -> None:
    sweep(ranks, 150, seed=1000 + 10 * ranks + seed)
