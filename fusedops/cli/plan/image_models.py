"""Models of images that ``fusedops plan image`` cuts: a U-Net, and any importable function."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from fusedops._core import checks

_OP = "image_model"


class UNet(nn.Module):
    """A U-Net of signals, images or volumes with batch norm, for any extent.

    Args:
        channels: of the input and of the output.
        ndim: 1 to 3 spatial dims.
        width: channels of the first level; each level has twice those of the one above.
        levels: that halve the extent.
    """

    def __init__(self, channels: int, ndim: int = 2, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        kinds: dict[str, Any] = {
            name: getattr(nn, f"{name}{ndim}d")
            for name in ("Conv", "BatchNorm", "MaxPool", "ConvTranspose")
        }
        widths = [width << level for level in range(levels + 1)]
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.down = nn.ModuleList(
            [_block(kinds, channels, width), *(_block(kinds, a, b) for a, b in pairs)]
        )
        self.pool = kinds["MaxPool"](2, ceil_mode=True)
        self.grow = nn.ModuleList(
            kinds["ConvTranspose"](b, a, 2, stride=2) for a, b in reversed(pairs)
        )
        self.up = nn.ModuleList(_block(kinds, 2 * a, a) for a, _ in reversed(pairs))
        self.head = kinds["Conv"](width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x [B, channels, ...]``."""
        skips = [self.down[0](x)]
        for block in self.down[1:]:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            skip = skips.pop()
            # An odd extent was rounded up by the pooling.
            index = (..., *(slice(size) for size in skip.shape[2:]))
            x = block(torch.cat([grow(x)[index], skip], 1))
        return self.head(x)


def _block(kinds: dict[str, Any], channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        conv = kinds["Conv"](inputs, width, 3, padding=1, bias=False)
        layers += [conv, kinds["BatchNorm"](width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def image_model(name: str, channels: int = 3, ndim: int = 2) -> nn.Module:
    """Return a U-Net of so many channels and spatial dims, or what an importable function makes.

    ``name`` is ``"unet"``, or that of the function, as ``"torchvision.models:resnet50"``.

    Raises:
        ValueError: there is no such function, or it gives no module.

    Example:
        >>> image_model("unet", channels=1).head.out_channels
        1
    """
    package, colon, function = name.partition(":")
    if not colon:
        if name != "unet":
            known = "unet, or package:function such as torchvision.models:resnet50"
            checks.fail(_OP, "name", known, name)
        with torch.device("meta"):
            return UNet(channels, ndim)
    try:
        module = getattr(importlib.import_module(package), function)()
    except Exception as error:  # of any kind: the function is the user's
        raise ValueError(f"{_OP}: {name} cannot be made: {error}") from error
    if not isinstance(module, nn.Module):
        checks.fail(_OP, name, "a function that returns an nn.Module", type(module).__name__)
    return module
