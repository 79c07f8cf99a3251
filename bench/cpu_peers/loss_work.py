"""A language model's head and its cross-entropy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from ways import Contest, Running, Way

from fusedops.ops import linear_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SIZES = ((2048, 768, 50257), (512, 2048, 32000))  # tokens, hidden size, classes


def eager(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the loss as two calls of torch."""
    return F.cross_entropy(F.linear(hidden, weight), target)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the loss in torch's pieces; without ``options`` torch runs the two calls."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, target, options=options)


def _run(loss: Loss, size: tuple[int, int, int], dtype: torch.dtype) -> Running:
    tokens, hidden_size, classes = size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = 0.02 * torch.randn(classes, hidden_size, generator=generator)
    # Rounded once to what all ways start from, the reference too.
    hidden, weight = (each.bfloat16().to(dtype).requires_grad_() for each in (hidden, weight))
    target = torch.randint(classes, (tokens,), generator=generator)

    def run(_: object = None) -> tuple[torch.Tensor, ...]:
        result = loss(hidden, weight, target)
        return result.detach(), *torch.autograd.grad(result, (hidden, weight))

    return Running(run, run())


def contests() -> list[Contest]:
    """Return a contest for each size and dtype."""
    found = []
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            losses: dict[str, tuple[Callable[[], Loss], str]] = {
                "fusedops": (lambda: linear_cross_entropy, "fusedops"),
                "F.linear, F.cross_entropy": (lambda: eager, "torch"),
                "torch.compile": (lambda: torch.compile(eager, dynamic=False), "torch"),
                "F.linear_cross_entropy, chunked": (lambda: chunked, "torch"),
            }
            loss_ways = {
                name: Way(lambda make=make, s=size, d=dtype: _run(make(), s, d), package)
                for name, (make, package) in losses.items()
            }
            tokens, hidden_size, classes = size
            work = f"loss head, {tokens} x {hidden_size} -> {classes}, with backward"
            reference = partial(_reference, size)
            found.append(Contest(work, str(dtype)[6:], reference, loss_ways, "fusedops"))
    return found


def _reference(size: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    return tuple(_run(eager, size, torch.float64).outputs)
