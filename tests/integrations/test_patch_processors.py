"""Modules that hand their attention to a processor, as those of diffusers do."""

from __future__ import annotations

import copy
from typing import Any

import followed_modules as followed
import pytest
import torch
from followed_modules import WIDTH
from patch_testing import assert_same_training, counted
from torch import nn

import fusedops


class Derived(followed.Processor):
    """A processor whose code calls that of its base."""

    def __call__(self, module: Any, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().__call__(module, hidden + 0.0, **options)


class AsModule(nn.Module):
    """A processor with parameters, called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return followed.Processor()(module, hidden * self.scale)


class SetsProcessor(followed.ProcessorAttention):
    """Its forward makes the processor when it runs first."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.processor is None:
            self.processor = followed.Processor()
        return self.processor(self, hidden)


MASK = torch.ones(12, 12, dtype=torch.bool).tril()
ROWS = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


def pair(processor: Any) -> tuple[nn.Module, nn.Module]:
    stock = followed.ProcessorAttention(processor)
    patched = copy.deepcopy(stock)
    patched.processor = stock.processor
    fusedops.patch(patched, level="O3")
    return patched, stock


def num_fused(module: nn.Module, **options: Any) -> int:
    with counted() as calls:
        module(ROWS, **options)
    return calls["attention"]


def test_arguments_are_chosen_by_the_signature_of_the_processor() -> None:
    def loss(module: nn.Module) -> torch.Tensor:
        x = ROWS.to(next(module.parameters()).dtype)
        return (module(x, mask=MASK, other=1).float() * ROWS.roll(1, 0)).sum()

    patched, stock = pair(followed.Processor())
    assert num_fused(patched, mask=MASK, other=1) == 1
    assert_same_training(patched, stock, loss)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with counted() as calls:
        torch.testing.assert_close(compiled(ROWS, mask=MASK), stock(ROWS, mask=MASK))
    assert calls["attention"] == 1


def test_a_shared_processor_stays_torchs_elsewhere() -> None:
    patched, stock = pair(followed.Processor())
    patched(ROWS)
    assert type(patched.processor) is followed.Processor and patched.processor is stock.processor
    assert num_fused(stock) == 0


@pytest.mark.parametrize("make", [Derived, followed.LinearProcessor, AsModule])
def test_another_processor_runs_as_before(make: type) -> None:
    stock = followed.ProcessorAttention(make())
    patched = copy.deepcopy(stock)
    report = str(fusedops.patch(patched, level="O3"))
    assert f"its {make.__name__} does not call F.scaled_dot_product" in report
    assert num_fused(patched) == 0
    assert torch.allclose(patched(ROWS), stock(ROWS), atol=1e-6)


def test_a_forward_that_sets_the_processor_is_kept() -> None:
    module = SetsProcessor(followed.Processor())
    fusedops.patch(module, level="O3")
    module.processor = None
    assert num_fused(module) == 0
    assert type(module.processor) is followed.Processor
