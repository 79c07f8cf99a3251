"""A model and a training loop for the tests of the offloaded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class TinyModel(nn.Module):
    """A few parameters of odd shapes, and a loss that differs from step to step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(2)
        self.layers = nn.Sequential(
            nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 17), nn.LayerNorm(17), nn.Linear(17, 5)
        )
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=made) / 4)
        self.to(dtype)

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss of a step's batch."""
        made = torch.Generator().manual_seed(step)
        batch = torch.randn(4, 13, generator=made).to(self.layers[0].weight.dtype)
        return self.layers(batch).float().square().mean()


def train(
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int,
    dtype: torch.dtype = torch.bfloat16,
    passes: int = 1,
    before: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    scaler: bool = False,
    **options: Any,
) -> list[Any]:
    """Return parameters and states after some steps.

    Args:
        make: takes parameters and options.
        steps: how many.
        dtype: of the parameters.
        passes: backwards before each step.
        before: is called before the backwards.
        between: is called after the backwards.
        scaler: use a GradScaler, which skips the step before last.
        options: of the optimizer.
    """
    torch.manual_seed(0)
    model = TinyModel(dtype)
    optimizer = make(model.named_parameters(), lr=0.01, **options)
    scaling = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaler)
    for step in range(steps):
        optimizer.zero_grad()
        if before is not None:
            before(step, model, optimizer)
        for index in range(passes):
            scaling.scale(model.loss(10 * step + index)).backward()
        if scaler and step == steps - 2:
            first = next(model.parameters())
            assert first.grad is not None
            first.grad[0, 0] = float("inf")
        if between is not None:
            between(step, model, optimizer)
        scaling.step(optimizer)
        scaling.update()
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    states = [
        {key: state[key] for key in keys if key in state}
        for param in model.parameters()
        for state in [optimizer.state[param]]
    ]
    return [[param.detach().clone() for param in model.parameters()], states]
