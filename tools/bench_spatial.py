"""What two processes of one thread reach of one process of two threads on a cut image.

    python tools/bench_spatial.py --seconds 10 --json out/spatial.json

A training step (forward, backward, SGD) of a U-Net and of residual blocks, float32, interleaved;
on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fusedops.bench.teams import TeamSetting, interleaved
from fusedops.cli.image_models import UNet
from fusedops.parallel import spatial

CUTS = {"one process": (1, 1), "2 x 1": (2, 1), "1 x 2": (1, 2)}


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a residual sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


def residual_net() -> nn.Module:
    """Return a stem of stride 2, pooling and four residual blocks, as ResNet begins."""
    stem = [nn.Conv2d(4, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *(ResidualBlock(32) for _ in range(4)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": partial(UNet, 4, 2),
    "residual": residual_net,
}


def make_step(model_name: str, cut: tuple[int, int], rows: int) -> Callable[[], float]:
    """Return what makes a step in this process, and returns its loss."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    x = torch.randn(1, 4, rows, rows)
    if cut != (1, 1):
        mesh = init_device_mesh("cpu", cut, mesh_dim_names=("y", "x"))
        model = spatial.shard(model, mesh, dims={2: "y", 3: "x"})
        x = spatial.scatter(x, mesh, {2: "y", 3: "x"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, by ,")
    parser.add_argument("--cuts", default=",".join(CUTS), help="names, by ,; the first is compared")
    parser.add_argument("--rows", type=int, default=512, help="rows and columns of the image")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each setting")
    parser.add_argument("--json", help="file for the rows")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        settings = [
            TeamSetting(
                label,
                cut[0] * cut[1],
                2 // (cut[0] * cut[1]),
                partial(make_step, name, cut, arguments.rows),
            )
            for label in arguments.cuts.split(",")
            for cut in [CUTS[label]]
        ]
        measured = interleaved(settings, arguments.seconds, lambda text: None)
        for setting, (times, loss) in zip(settings, measured, strict=True):
            pairs = zip(measured[0][0], times, strict=True)
            ratio = statistics.median(one / own for one, own in pairs)
            row = {
                "model": name,
                "cut": setting.name,
                "seconds": statistics.median(times),
                "speed": ratio,
                "loss": loss,
            }
            rows.append(row)
            print(
                f"{name:9} {setting.name:12} {row['seconds']:.4f} s  {ratio:.2f}  loss {loss:.6f}"
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
