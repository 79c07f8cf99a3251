"""Modules that hand their attention to a processor, as those of diffusers do."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from home_made import WIDTH
from patch_testing import assert_same_training, counted
from torch import nn

import fusedops


class Processor:
    """Computes attention with the layers of a module."""

    heads = 4

    def __call__(
        self, module: Any, hidden: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (module.to_q, module.to_k, module.to_v)
        )
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return module.to_out(output.transpose(1, 2).flatten(2))


class Derived(Processor):
    """A processor whose code calls that of its base."""

    def __call__(self, module: Any, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().__call__(module, hidden + 0.0, **options)


class Linear:
    """A processor without attention."""

    def __call__(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return module.to_out(module.to_v(hidden))


class AsModule(nn.Module):
    """A processor with parameters, called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return Processor()(module, hidden * self.scale)


class Attention(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "to_out"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.processor = processor

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        known = set(inspect.signature(self.processor.__call__).parameters)
        options = {name: value for name, value in options.items() if name in known}
        return self.processor(self, hidden, **options)


class SetsProcessor(Attention):
    """Its forward makes the processor when it runs first."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.processor is None:
            self.processor = Processor()
        return self.processor(self, hidden)


MASK = torch.ones(12, 12, dtype=torch.bool).tril()


def pair(processor: Any) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    stock = Attention(processor)
    patched = copy.deepcopy(stock)
    patched.processor = stock.processor
    fusedops.patch(patched, level="O3")
    return patched, stock


def rows() -> torch.Tensor:
    return torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


def num_fused(module: nn.Module, **options: Any) -> int:
    with counted() as calls:
        module(rows(), **options)
    return calls["attention"]


def test_training_matches_stock() -> None:
    def loss(module: nn.Module) -> torch.Tensor:
        x = rows().to(next(module.parameters()).dtype)
        return (module(x, mask=MASK).float() * rows().roll(1, 0)).sum()

    patched, stock = pair(Processor())
    assert num_fused(patched, mask=MASK) == 1
    assert_same_training(patched, stock, loss)


def test_arguments_are_chosen_by_the_signature_of_the_processor() -> None:
    patched, stock = pair(Processor())
    assert torch.allclose(patched(rows(), mask=MASK, other=1), stock(rows(), mask=MASK), atol=1e-6)


def test_a_shared_processor_stays_torchs_elsewhere() -> None:
    patched, stock = pair(Processor())
    patched(rows())
    assert type(patched.processor) is Processor and patched.processor is stock.processor
    assert num_fused(stock) == 0


@pytest.mark.parametrize("processor", [Derived(), Linear(), AsModule()])
def test_another_processor_runs_as_before(processor: Any) -> None:
    stock = Attention(processor)
    patched = copy.deepcopy(stock)
    report = str(fusedops.patch(patched, level="O3"))
    assert f"its {type(processor).__name__} does not call F.scaled_dot_product" in report
    assert num_fused(patched) == 0
    assert torch.allclose(patched(rows()), stock(rows()), atol=1e-6)


def test_a_processor_that_is_set_later_runs() -> None:
    patched, stock = pair(Processor())
    patched.processor = stock.processor = Linear()
    assert torch.allclose(patched(rows()), stock(rows()), atol=1e-6)
    patched.processor = Processor()
    assert num_fused(patched) == 1


def test_a_call_that_is_replaced_in_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, stock = pair(Processor())
    patched(rows())
    monkeypatch.setattr(Processor, "__call__", Linear.__call__)
    assert torch.allclose(patched(rows()), stock(rows()), atol=1e-6)


def test_another_attention_in_torchs_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, _ = pair(Processor())
    torchs = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **options: torchs(*args, **options)
    )
    assert num_fused(patched) == 0


def test_a_forward_that_sets_the_processor_is_kept() -> None:
    module = SetsProcessor(Processor())
    fusedops.patch(module, level="O3")
    module.processor = None
    assert num_fused(module) == 0
    assert type(module.processor) is Processor


def test_one_graph_has_the_fused_attention() -> None:
    patched, stock = pair(Processor())
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with counted() as calls:
        torch.testing.assert_close(compiled(rows(), mask=MASK), stock(rows(), mask=MASK))
    assert calls["attention"] == 1


def test_copied_pickled_and_unpatched() -> None:
    patched, stock = pair(Processor())
    for module in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert num_fused(module) == 1
        assert torch.equal(module(rows()), patched(rows()))
    fusedops.unpatch(patched)
    assert type(patched) is Attention
    assert torch.equal(patched(rows()), stock(rows()))


def test_level_o2_leaves_the_attention_to_torch() -> None:
    module = Attention(Processor())
    assert "from level O3 on" in str(fusedops.patch(module, level="O2"))
    assert num_fused(module) == 0
