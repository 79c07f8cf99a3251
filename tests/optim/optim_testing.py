"""What the tests of optimizers share: models of odd shapes, gradients, and runs to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fusedops.optim import AdamW

# A bias, a chunk and a bit, several chunks, nothing, one element.
SHAPES = ((7,), (3, 5, 2), (129, 131), (40000,), (0, 4), ())
Hook = Callable[[int, nn.Module, Any], None]


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """Return the same parameters at each call."""
    made = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def values(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values of parameters, which later steps change."""
    return [param.detach() for param in params]


def set_gradients(params: Iterable[torch.Tensor], step: int, scale: float = 1.0) -> None:
    """Give parameters the gradients of a step: the same values in every dtype, but for rounding."""
    made = torch.Generator().manual_seed(1000 + step)
    for param in params:
        drawn = torch.randn(param.shape, generator=made, dtype=torch.float64) * scale
        # Of any size, as gradients are; multiples of bfloat16's spacing, so that dtypes agree.
        drawn = drawn * torch.exp2(torch.randint(-12, 4, param.shape, generator=made).double())
        param.grad = drawn.bfloat16().to(param.dtype)


def steps(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Make some steps of parameters in one group."""
    for step in range(first, last):
        set_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()


def run(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.Tensor]:
    """Return the parameters after some steps of an optimizer."""
    params = parameters(dtype, shapes)
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return values(params)


class TinyModel(nn.Module):
    """A few parameters of odd shapes, and a loss that differs from step to step."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
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

    def train(self, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
        """Make steps with the batches of these numbers."""
        for step in numbers:
            optimizer.zero_grad()
            self.loss(step).backward()
            optimizer.step()


def masters(params: Any, **options: Any) -> AdamW:
    """Return the optimizer whose bits the offloaded one has."""
    options.pop("device_fraction", None)
    return AdamW(params, master_weights=True, **options)


def train(
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int,
    dtype: torch.dtype = torch.bfloat16,
    passes: int = 1,
    before: Hook = lambda *_: None,
    between: Hook = lambda *_: None,
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
        before(step, model, optimizer)
        for index in range(passes):
            scaling.scale(model.loss(10 * step + index)).backward()
        if scaler and step == steps - 2:
            model.layers[0].weight.grad[0, 0] = float("inf")
        between(step, model, optimizer)
        scaling.step(optimizer)
        scaling.update()
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    states = [
        {key: optimizer.state[param][key] for key in keys if key in optimizer.state[param]}
        for param in model.parameters()
    ]
    return [[param.detach().clone() for param in model.parameters()], states]
