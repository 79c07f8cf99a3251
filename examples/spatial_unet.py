"""Train a small U-Net on generated fields, cut over processes along latitude and longitude.

    python examples/spatial_unet.py                                      # one process
    torchrun --nproc-per-node 4 examples/spatial_unet.py --mesh 2,2      # the same losses

Longitude is periodic: a wave that leaves the field in the east comes back in the west, and the
model pads that dim circularly. The model is plain; ``spatial.shard`` is the only line about
processes. Each process has its part of the fields, the loss is that of the complete ones.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fusedops.parallel import spatial

DIMS = {2: "latitude", 3: "longitude"}


class Block(nn.Module):
    """Convolution that is periodic in longitude and reflects at the poles, norm and activation."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3)
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        x = F.pad(x, (0, 0, 1, 1), mode="reflect")
        return F.gelu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Two levels down and up, with skip connections."""

    def __init__(self, channels: int = 2, width: int = 16) -> None:
        super().__init__()
        self.first = Block(channels, width)
        self.second = Block(width, 2 * width)
        self.bottom = Block(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.third = Block(4 * width, 2 * width)
        self.last = Block(3 * width, width)
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next fields."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.avg_pool2d(second, 2))
        up = F.interpolate(self.up(bottom), size=second.shape[2:], mode="bilinear")
        third = self.third(torch.cat([up, second], 1))
        up = F.interpolate(third, size=first.shape[2:], mode="bilinear")
        return x + self.head(self.last(torch.cat([up, first], 1)))


def fields(step: int, shape: tuple[int, int], batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return waves ``[batch, 2, latitude, longitude]``, and the same one step further east."""
    generator = torch.Generator().manual_seed(step)
    latitude = torch.linspace(-1.5, 1.5, shape[0], dtype=torch.float64).view(1, 1, -1, 1)
    longitude = torch.arange(shape[1], dtype=torch.float64) * (2 * torch.pi / shape[1])
    number = torch.randint(1, 5, (batch, 2, 1, 1), generator=generator)
    phase = torch.rand(batch, 2, 1, 1, generator=generator, dtype=torch.float64) * 6.0

    def at(shift: float) -> torch.Tensor:
        return torch.cos(latitude) * torch.sin(number * (longitude - shift) + phase)

    return at(0.0), at(0.2)


def train(mesh: object, steps: int, shape: tuple[int, int]) -> list[float]:
    """Return the losses; ``mesh`` is ``None`` on one process."""
    torch.manual_seed(0)
    model = UNet().double()
    if mesh is not None:
        model = spatial.shard(model, mesh, dims=DIMS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        pair = fields(step, shape)
        now, later = pair if mesh is None else (spatial.scatter(x, mesh, DIMS) for x in pair)
        loss = F.mse_loss(model(now), later)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Train and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="", help="processes along latitude and longitude: 2,2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", default="45,64", help="latitudes and longitudes")
    options = parser.parse_args()
    height, width = map(int, options.shape.split(","))
    mesh = None
    if options.mesh:
        init_process_group("gloo")
        sizes = tuple(map(int, options.mesh.split(",")))
        if len(sizes) != 2 or sizes[0] * sizes[1] != get_world_size():
            parser.error(f"--mesh {options.mesh} is not two sizes of {get_world_size()} processes")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(DIMS.values()))
    losses = train(mesh, options.steps, (height, width))
    if mesh is None or mesh.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step:3} loss {loss:.12f}")
    if mesh is not None:
        destroy_process_group()


if __name__ == "__main__":
    main()
