"""Layers and functions on cut tensors equal one process, with the gradients of all inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spatial_cases import compare, mesh_of
from torch import nn
from torch.nn import functional as F

from fusedops.testing import threads


class Fn(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class ChannelsLastLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(4)
        self.l = nn.Linear(4, 9)
        self.g = nn.Parameter(torch.randn(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.l(self.n(x.permute(0, 2, 3, 1))) * self.g).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 1)
        self.p = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a(self.p(x)).sigmoid()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(1, 143, 4))
        self.q = nn.Parameter(torch.randn(13, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.q).flatten(2).transpose(1, 2) + self.p


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(1, 1, 4))
        self.p = nn.Parameter(torch.randn(1, 144, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (
            torch.cat([self.c.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1) + self.p
        )
        tokens = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return tokens[:, 0]


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
    "pu": lambda: Fn(lambda x: F.pixel_unshuffle(x[:, :, :12, :10], 2)),
    "in place": lambda: Fn(
        lambda x: F.pad((x * 1)[:, :, 1:12].relu_()[:, :, 2:], (0, 0, 1, 0)).mul_(2)
    ),
    "slice": lambda: Fn(lambda x: x[:, :, 1:, ::2] * 2),
    "tv": lambda: Fn(lambda x: (x[:, :, 1:] - x[:, :, :-1]).abs()),
    "mean": lambda: Fn(lambda x: x.mean((2, 3), keepdim=True) * x),
    "meanw": lambda: Fn(lambda x: x.mean(3, keepdim=True) * x),
    "var": lambda: Fn(lambda x: x.var((2, 3))),
    "softmin": lambda: Fn(lambda x: F.softmin(x, 1)),
    "amax": lambda: Fn(lambda x: x - x.amax((2, 3), True)),
    "cat": lambda: Fn(lambda x: torch.cat([x, x * 2], 1)),
    "catcut": lambda: Fn(lambda x: torch.cat([x, x * 2], 2)),
    "chunk": lambda: Fn(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    "chunkcut": lambda: Fn(lambda x: x.chunk(3, 2)[1]),
    "row": lambda: Fn(lambda x: x * x[:, :, 3:4] + x[:, :, :, 2:3]),
    "sel": lambda: Fn(lambda x: x[:, :, 3] + x[:, :, -1]),
    "attn": lambda: Fn(
        lambda x: F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3)
    ),
    "attn2": lambda: Fn(
        lambda x: (
            (
                (x.flatten(2).transpose(1, 2) @ x.flatten(2)).softmax(-1)
                @ x.flatten(2).transpose(1, 2)
            )
            .transpose(1, 2)
            .reshape(x.shape)
        )
    ),
    "linattn": lambda: Fn(
        lambda x: (x.flatten(2) @ x.flatten(2).transpose(1, 2)).softmax(-1) @ x.flatten(2)
    ),
    "permln": lambda: ChannelsLastLayers(),
    "lin": lambda: nn.Linear(11, 7),
    "head": lambda: nn.Sequential(nn.Flatten(1), nn.Linear(4 * 13 * 11, 5)),
    "split": lambda: Fn(lambda x: x[:, :, :12, :9].reshape(2, 4, 4, 3, 3, 3).amax((3, 5))),
    "se": lambda: SqueezeExcite(),
    "pos": lambda: Positions(),
    "cls": lambda: ClassToken(),
    **{
        f"pad_{m}": (lambda m=m: Fn(lambda x: F.pad(x, (2, 3, 4, 1), mode=m)))
        for m in ("constant", "reflect", "replicate", "circular")
    },
    "crop": lambda: Fn(lambda x: F.pad(x, (-2, 3, -4, -1))),
    "d2": lambda: nn.Dropout2d(0.0),
}

RESIZES: list[tuple[str, bool | None]] = [
    ("nearest", None),
    ("nearest-exact", None),
    ("area", None),
    ("bilinear", True),
    ("bilinear", False),
]


def resize(mode: str, align: bool | None, size: Any) -> nn.Module:
    options: dict[str, Any] = {"mode": mode, "align_corners": align}
    options["size" if isinstance(size, tuple) else "scale_factor"] = size
    return Fn(lambda x: F.interpolate(x, **options))


for _mode, _align in RESIZES:
    for _size in (2, (20, 7), 0.61, 1.7):
        _name = f"resize {_mode} {_align} {_size}"
        LAYERS[_name] = lambda arguments=(_mode, _align, _size): resize(*arguments)

WORLDS = {
    2: ((1, 2), {2: "y"}),
    3: ((1, 3), {3: "y"}),
    4: ((1, 2, 2), {2: "y", 3: "x"}),
    6: ((1, 2, 3), {3: "y", 2: "x"}),
    8: ((1, 8), {2: "y"}),
}


def _compare_layers(rank: int, ranks: int) -> None:
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


@pytest.mark.parametrize("ranks", WORLDS)
def test_layers_equal_one_process(ranks: int) -> None:
    threads.run(_compare_layers, ranks, ranks)
